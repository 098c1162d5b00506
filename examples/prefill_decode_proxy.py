"""A proxy before two servers: one computes long prompts, the other goes on with their KV, or does it all.

continuum serve --port 8100 --kv-transfer-config '{"kv_connector": "TCPConnector", "kv_role": "kv_producer"}'
continuum serve --port 8200 --kv-transfer-config '{"kv_connector": "TCPConnector", "kv_role": "kv_consumer"}'
python prefill_decode_proxy.py http://127.0.0.1:8100 http://127.0.0.1:8200 8000
"""

import json
import sys
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

CHATS = ("/v1/completions", "/v1/chat/completions")
LIMITS = {**dict.fromkeys(CHATS, "max_tokens"), "/v1/responses": "max_output_tokens"}
KEPT = ("authorization", "content-type", "x-session-id", "x-request-id")
UNWANTED = ("stream_options", "max_completion_tokens", "min_tokens", "background", "store")


async def prefilled(
    first: httpx.AsyncClient, path: str, body: dict[str, Any], headers: dict[str, str]
) -> Any:
    """Where the prompt's KV lies; None if the first server has not computed it."""
    body = {name: value for name, value in body.items() if name not in UNWANTED}
    body |= {LIMITS[path]: 1, "stream": False, "kv_transfer_params": {"do_remote_decode": True}}
    try:
        answer = await first.post(path, json=body, headers=headers)
        return answer.json().get("kv_transfer_params") if answer.status_code == 200 else None
    except (httpx.HTTPError, ValueError):
        return None


def proxy(prefill: str, decode: str, short: int = 2000) -> Starlette:
    """``short``: requests of fewer bytes are the second server's alone."""
    first, second = (httpx.AsyncClient(base_url=url, timeout=None) for url in (prefill, decode))

    async def forward(request: Request) -> StreamingResponse:
        content, path = await request.body(), request.url.path
        headers = {name: request.headers[name] for name in KEPT if name in request.headers}
        if path in LIMITS and len(content) >= short:
            body = json.loads(content)
            body["kv_transfer_params"] = await prefilled(first, path, body, headers)
            content = json.dumps(body).encode()
        asked = second.build_request(request.method, path, content=content, headers=headers)
        answer = await second.send(asked, stream=True)
        kind = answer.headers.get("content-type", "application/json")
        return StreamingResponse(answer.aiter_raw(), answer.status_code, {"content-type": kind})

    return Starlette(routes=[Route("/{path:path}", forward, methods=["GET", "POST", "DELETE"])])


if __name__ == "__main__":
    prefill, decode, port, *short = sys.argv[1:]
    uvicorn.run(proxy(prefill, decode, *map(int, short)), port=int(port), log_level="warning")
