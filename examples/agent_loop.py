"""An agent of one tool, as any framework runs it: the server keeps the KV cache while the tool works.

continuum serve --port 8000
python examples/agent_loop.py http://localhost:8000/v1 "Add the plants of north.txt and south.txt."
"""

import json
import sys
from typing import Any

import openai

FILES = {"north.txt": "plants: 412", "south.txt": "plants: 231"}


def tool(name: str, argument: str, description: str) -> Any:
    parameters = {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


TOOLS = [tool("read_file", "path", "Read a file."), tool("python", "expression", "Compute a sum.")]


def run(name: str, arguments: dict[str, str]) -> str:
    if name == "read_file":
        return FILES.get(arguments.get("path", ""), "no such file")
    return str(sum(int(term) for term in arguments["expression"].split("+")))


MAX_TURNS = 6


def main(base_url: str, task: str) -> None:
    client = openai.OpenAI(base_url=base_url, api_key="none")
    model = client.models.list().data[0].id
    messages: list[Any] = [{"role": "user", "content": task}]
    for _ in range(MAX_TURNS):
        answer = client.chat.completions.create(
            model=model, messages=messages, tools=TOOLS, max_tokens=128, temperature=0
        )
        message = answer.choices[0].message
        messages.append(message)
        receipt = (answer.usage.model_extra or {})["receipt"] if answer.usage else {}
        print(f"cached {receipt['cached_tokens']} of {receipt['prompt_tokens']}: {message.content or ''}")
        for call in message.tool_calls or []:
            assert call.type == "function"
            result = run(call.function.name, json.loads(call.function.arguments))
            print(f"  {call.function.name} {call.function.arguments} -> {result}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        if not message.tool_calls:
            return


if __name__ == "__main__":
    main(*sys.argv[1:3])
