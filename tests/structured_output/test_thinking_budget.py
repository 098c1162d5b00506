"""Promises of limits on reasoning: its end follows after the given number of tokens, and the answer goes on;
kept by ``LLM`` and by a server for all three APIs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.errors import RequestError
from engine.frontend.llm import LLM
from engine.records.sampling_params import SamplingParams
from engine.records.structured_outputs import ReasoningSpan, StructuredOutputsParams, ThinkingLimit
from engine.structured_output.thinking_budget import MAX_BEFORE, ThinkingBudget
from engine.worker.loading import tiny_models
from tests.api.server import Server, running_server

PROMPTS = ["Think about it", "Which blocks", "a"]
OPENED = ReasoningSpan("</think>")
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokenizer has reasoning tags as tokens."""
    root = tmp_path_factory.mktemp("thinker")
    plain = tiny_models.make_model_folder(root / "plain", max_position_embeddings=1024)
    tokenizer = AutoTokenizer.from_pretrained(plain)
    tokenizer.add_tokens(["<think>", "</think>"])
    model: Any = AutoModelForCausalLM.from_pretrained(plain)
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(root / "model")
    tokenizer.save_pretrained(root / "model")
    return root / "model"


@pytest.fixture(scope="module")
def tags(thinker: Path) -> tuple[int, int]:
    """The tokens that open and end reasoning."""
    tokenizer = AutoTokenizer.from_pretrained(thinker)
    added: dict[str, int] = tokenizer.get_added_vocab()
    return added["<think>"], added["</think>"]


@pytest.fixture(scope="module")
def llm(thinker: Path) -> Iterator[LLM]:
    with LLM(thinker, multiprocess=False, num_gpu_blocks_override=400) as llm:
        yield llm


def tokens(llm: LLM, *params: SamplingParams, prompts: list[str] | None = None) -> list[list[int]]:
    given = list(params) if len(params) > 1 else params[0]
    outputs = llm.generate(prompts or PROMPTS, given, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def greedy(budget: int | None = None, span: ReasoningSpan | None = OPENED, **more: Any) -> SamplingParams:
    options = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True, **more}
    return SamplingParams(thinking_token_budget=budget, reasoning=span, **options)


@pytest.mark.parametrize("budget", [0, 1, 7, 100])
def test_reasoning_ends_at_its_limit(llm: LLM, tags: tuple[int, int], budget: int) -> None:
    """Tokens before the limit are those without a limit; after the end tag the model is free."""
    free, limited = tokens(llm, greedy()), tokens(llm, greedy(budget))
    for unlimited, found in zip(free, limited, strict=True):
        assert tags[1] not in unlimited, "by chance it thinks to the end"
        assert found[:budget] == unlimited[:budget]
        if budget < NUM_TOKENS:
            assert found[budget] == tags[1]
            assert found.count(tags[1]) == 1
        assert len(found) == NUM_TOKENS


def test_reasoning_that_the_model_opens_is_limited(llm: LLM, tags: tuple[int, int]) -> None:
    """Reasoning is limited from its begin tag; without reasoning there is no limit."""
    begin, end = tags
    span = ReasoningSpan("</think>", "<think>")
    for found in tokens(llm, greedy(5, span, logit_bias={begin: 100.0})):
        assert found.index(begin) == 0
        assert found.index(end) == 6
    assert tokens(llm, greedy(5, span)) == tokens(llm, greedy())


def test_others_of_a_batch_are_not_limited(llm: LLM, tags: tuple[int, int]) -> None:
    limited, free, other = tokens(llm, greedy(3), greedy(), greedy(6))
    assert limited.index(tags[1]) == 3
    assert other.index(tags[1]) == 6
    assert free == tokens(llm, greedy())[1]


def test_the_answer_follows_its_grammar_behind_the_limit(llm: LLM, tags: tuple[int, int]) -> None:
    digits = StructuredOutputsParams(regex="[0-9]{4}", reasoning=OPENED)
    params = greedy(5, structured_outputs=digits, ignore_eos=False)
    for output in llm.generate(PROMPTS, params, use_tqdm=False):
        answer = output.outputs[0]
        assert answer.token_ids.index(tags[1]) <= 5
        text = llm.get_tokenizer().decode(answer.token_ids[answer.token_ids.index(tags[1]) + 1 :])
        assert text.removesuffix("<|im_end|>").strip().isdigit()
        assert answer.finish_reason == "stop"


@pytest.mark.parametrize(
    "options",
    [
        {"speculative_config": {"method": "suffix", "num_speculative_tokens": 6}},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}},
        {"async_scheduling": True},
        {"tensor_parallel_size": 2, "multiprocess": True},
        {"num_gpu_blocks_override": 66, "max_num_seqs": 3, "max_num_batched_tokens": 16},
    ],
    ids=["suffix", "ngram", "async", "two ranks", "short of blocks"],
)
def test_drafts_and_plans_ahead_change_nothing(llm: LLM, thinker: Path, options: dict[str, Any]) -> None:
    again = [*PROMPTS, *PROMPTS]
    expected = [tokens(llm, greedy(budget), prompts=again) for budget in (0, 4, 9)]
    options = {"multiprocess": False, "num_gpu_blocks_override": 400, **options}
    with LLM(thinker, **options) as other:
        for budget, found in zip((0, 4, 9), expected, strict=True):
            assert tokens(other, greedy(budget), prompts=again) == found


def test_a_limit_needs_tokens_to_end_with(llm: LLM) -> None:
    with pytest.raises(RequestError, match="needs a model whose replies begin with reasoning"):
        tokens(llm, greedy(5, None))
    with pytest.raises(RequestError, match="needs '</reasoning>' to be a token"):
        tokens(llm, greedy(5, ReasoningSpan("</reasoning>")))
    with pytest.raises(RequestError, match="thinking_token_budget must not be negative, got -1"):
        tokens(llm, greedy(-1))


BEGIN, END, STOP = 1, 2, 3


@given(
    budget=st.integers(0, 4),
    opened=st.booleans(),
    output=st.lists(st.sampled_from([BEGIN, END, STOP, 4, 5]), max_size=16),
    drafts=st.lists(st.sampled_from([BEGIN, END, STOP, 4]), max_size=6),
)
def test_the_limit_counts_as_it_says(budget: int, opened: bool, output: list[int], drafts: list[int]) -> None:
    """The grammar forces the token that the definition forces; drafts are checked without a step."""
    limit = ThinkingLimit(budget, END, None if opened else BEGIN)
    grammar = ThinkingBudget(limit, None, {STOP})
    for count in range(len(output) + 1):
        assert grammar.only == only(limit, output[:count])
        if count < len(output):
            assert grammar.accept(output[count])
    num_allowed = grammar.count_allowed(drafts)
    for count, token in enumerate(drafts[:num_allowed]):
        assert only(limit, output + drafts[:count]) in (None, token)
    if num_allowed < len(drafts) and drafts[num_allowed] != STOP:
        assert only(limit, output + drafts[:num_allowed]) not in (None, drafts[num_allowed])
    behind = [each.only for each in grammar.ahead(drafts[:num_allowed])]
    assert behind == [only(limit, output + drafts[: count + 1]) for count in range(num_allowed)]
    assert grammar.only == only(limit, output), "it has not advanced"


def only(limit: ThinkingLimit, output: list[int]) -> int | None:
    """The token that must follow this output, if any."""
    if limit.start is not None:
        if limit.start not in output[:MAX_BEFORE]:
            return None
        output = output[output.index(limit.start) + 1 :]
    return limit.end if limit.end not in output and len(output) >= limit.num_tokens else None


# ---- over HTTP ----


@pytest.fixture(scope="module")
def server(thinker: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose template opens the reasoning, unless thinking is disabled."""
    template = tmp_path_factory.mktemp("templates") / "thinking.jinja"
    shipped = Path(tiny_models.__file__).with_name("chat_template.jinja").read_text()
    opened = "{{- '<think>\\n' if enable_thinking is not false else '<think>\\n\\n</think>\\n\\n' }}"
    asked = "{{- '<|im_start|>assistant\\n' }}"
    assert asked in shipped
    template.write_text(shipped.replace(asked, f"{asked}\n{opened}"))
    flags = ("--num-gpu-blocks-override", "400", "--chat-template", str(template))
    with running_server(thinker, *flags) as running:
        yield running
        assert running.interrupt() == 0


MESSAGES = [{"role": "user", "content": "Hello"}]


def chat_tokens(server: Server, **fields: Any) -> list[int]:
    body = {"messages": MESSAGES, "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    asked = {**body, "return_token_ids": True, **fields}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=asked, timeout=60)
    assert answer.status_code == 200, answer.text
    ids: list[int] = answer.json()["choices"][0]["token_ids"]
    return ids


@pytest.mark.parametrize(
    ("fields", "budget"),
    [
        ({"thinking_token_budget": 6}, 6),
        ({"reasoning_effort": "low"}, 4),
        ({"reasoning": {"effort": "minimal"}}, 2),
        ({"reasoning_effort": "high", "max_completion_tokens": 10}, 8),
        ({"reasoning_effort": "high", "thinking_token_budget": 3}, 3),
        ({"reasoning_effort": "max"}, None),
        ({"thinking_token_budget": 6, "chat_template_kwargs": {"enable_thinking": False}}, None),
        ({"reasoning_effort": "none"}, None),
        ({}, None),
    ],
)
def test_chats_are_limited(
    server: Server, tags: tuple[int, int], fields: dict[str, Any], budget: int | None
) -> None:
    """The field or the effort, a share of max_tokens, sets the limit; without reasoning there is none."""
    found = chat_tokens(server, **fields)
    assert (found.index(tags[1]) if tags[1] in found else None) == budget


def test_what_is_streamed_has_the_reasoning_and_the_answer(server: Server) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=60) as client:
        stream: Any = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "Hello"}],
            max_tokens=20,
            temperature=0,
            stream=True,
            extra_body={"thinking_token_budget": 6, "ignore_eos": True},
        )
        deltas = [chunk.choices[0].delta for chunk in stream if chunk.choices]
    reasoning = "".join(getattr(delta, "reasoning", None) or "" for delta in deltas)
    content = "".join(delta.content or "" for delta in deltas)
    assert reasoning
    assert content
    assert "think" not in reasoning + content


def test_anthropics_budget_is_a_limit(server: Server, tags: tuple[int, int]) -> None:
    body: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    body |= {"thinking": {"type": "enabled", "budget_tokens": 5}, "return_token_ids": True}
    answer = httpx.post(f"{server.url}/v1/messages", json=body, timeout=60).json()
    assert answer["token_ids"].index(tags[1]) == 5
    body["thinking"] = {"type": "adaptive"}
    body["output_config"] = {"effort": "medium"}
    answer = httpx.post(f"{server.url}/v1/messages", json=body, timeout=60).json()
    assert answer["token_ids"].index(tags[1]) == 10


def test_effort_limits_responses(server: Server) -> None:
    body = {"input": "Hello", "max_output_tokens": 20, "reasoning": {"effort": "low"}, "temperature": 0}
    answer = httpx.post(f"{server.url}/v1/responses", json={**body, "ignore_eos": True}, timeout=60).json()
    kinds = [item["type"] for item in answer["output"]]
    assert kinds == ["reasoning", "message"]
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] <= 4


def test_what_cannot_be_limited_is_said(server: Server, model_folder: Path) -> None:
    """Completions refuse the field; other servers' names for it are answered with this one."""
    asked: dict[str, Any] = {"prompt": "Hello", "max_tokens": 4, "thinking_token_budget": 2}
    refused = httpx.post(f"{server.url}/v1/completions", json=asked, timeout=60)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "thinking_token_budget")
    for name in ("thinking_budget", "reasoning_budget"):
        body = {"messages": MESSAGES, name: 5}
        refused = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
        assert "use thinking_token_budget" in refused.json()["error"]["message"]
