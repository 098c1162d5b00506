"""One question to a running server through the openai library, streamed, and the receipt of the turn.

continuum serve --port 8000
python examples/openai_client.py http://localhost:8000/v1 "How many plants are in stock/north.txt?"
"""

import sys

import openai


def main(base_url: str, question: str) -> None:
    client = openai.OpenAI(base_url=base_url, api_key="none")
    model = client.models.list().data[0].id
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_tokens=64,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
        if chunk.usage is not None:
            print("\nreceipt:", (chunk.usage.model_extra or {})["receipt"])


if __name__ == "__main__":
    main(*sys.argv[1:3])
