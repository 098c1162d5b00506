"""A proxy before two servers: one computes prompts, the other goes on with their KV.

    continuum serve MODEL --port 8100 --kv-transfer-config \\
        '{"kv_connector": "TCPConnector", "kv_role": "kv_producer"}'
    continuum serve MODEL --port 8200 --kv-transfer-config \\
        '{"kv_connector": "TCPConnector", "kv_role": "kv_consumer"}'
    python prefill_decode_proxy.py --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200 --port 8000

Prompts that are short are not worth the way; all else of the API goes to the server that decodes. If the
first server does not answer, the second one computes the prompt, too.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

LIMITS = {
    "/v1/completions": "max_tokens",
    "/v1/chat/completions": "max_tokens",
    "/v1/responses": "max_output_tokens",
}
"""Paths of what generates, and the field that bounds it."""
KEPT = ("authorization", "content-type", "x-session-id", "x-request-id")
ORDER = {"do_remote_decode": True, "do_remote_prefill": False}


async def prefilled(http: httpx.AsyncClient, path: str, body: dict[str, Any], headers: dict[str, str]) -> Any:
    """Where the prompt's KV lies; None if the server that computes prompts has not done it."""
    body = {**body, LIMITS[path]: 1, "stream": False, "kv_transfer_params": ORDER}
    for name in ("stream_options", "max_completion_tokens", "min_tokens", "background"):
        body.pop(name, None)
    if path == "/v1/responses":
        body["store"] = False
    try:
        answer = await http.post(path, json=body, headers=headers)
        return answer.json().get("kv_transfer_params") if answer.status_code == 200 else None
    except (httpx.HTTPError, ValueError):
        return None


def proxy(prefill: str, decode: str, short: int) -> Starlette:
    first = httpx.AsyncClient(base_url=prefill, timeout=None)
    second = httpx.AsyncClient(base_url=decode, timeout=None)

    async def forward(request: Request) -> StreamingResponse:
        content = await request.body()
        headers = {name: request.headers[name] for name in KEPT if name in request.headers}
        path = request.url.path
        if path in LIMITS and request.method == "POST" and len(content) >= short:
            body = json.loads(content)
            body["kv_transfer_params"] = await prefilled(first, path, body, headers)
            content = json.dumps(body).encode()
        asked = second.build_request(
            request.method, path, params=request.query_params, content=content, headers=headers
        )
        answer = await second.send(asked, stream=True)
        kind = answer.headers.get("content-type", "application/json")
        return StreamingResponse(answer.aiter_raw(), answer.status_code, {"content-type": kind})

    return Starlette(routes=[Route("/{path:path}", forward, methods=["GET", "POST", "DELETE"])])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--prefill", default="http://127.0.0.1:8100", help="the server that computes prompts")
    parser.add_argument("--decode", default="http://127.0.0.1:8200", help="the server that goes on")
    parser.add_argument("--short", type=int, default=2000, help="fewest bytes of a request that both serve")
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args()
    uvicorn.run(proxy(args.prefill, args.decode, args.short), port=args.port, log_level="warning")
