"""Renders conversations with a model's chat template, like transformers but faster. It does not know tokens.

A template is a program that may write anything anywhere, so no earlier text is reused: only the cost of
accessing each field of a message is saved.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from jinja2 import Template, nodes
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.tokenization import bounded_loops
from engine.tokenization.content_format import ContentFormat, takes_parts, takes_texts
from engine.tokenization.unfinished_message import cut_at_mark, with_mark

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_COMPILED_TEMPLATES = 16
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's reasoning; transformers sets the first two from the first name present."""

_JSON_PROBE: dict[str, Any] = {"z": ["é", "<&'>", None, True, 1.5, {}], "a": ""}
_TRIAL = (("user", "a trial"), ("assistant", "of shapes"), ("user", "and no more"))
_OF_DICT = frozenset(dir(dict))
_OF_LOOP = frozenset(
    ("depth", "depth0", "first", "index", "index0", "last", "length", "nextitem", "previtem")
)


@dataclass(frozen=True, slots=True)
class ContentShape:
    """The content formats that a template reads; at least one."""

    texts: bool
    parts: bool


class QuickSandbox(ImmutableSandboxedEnvironment):
    """transformers' sandbox with shortcuts for accesses that its checks always allow: fields of plain
    dictionaries, and loop variables. Also bounds loops and products."""

    intercepted_binops = frozenset(("*", "**"))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        bounded_loops.check_operator(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        """Generates the program of a parsed template."""
        bounded_loops.count_loops(source)
        return super()._generate(source, *args, **kwargs)

    def getattr(self, obj: Any, attribute: str) -> Any:
        kind = type(obj)
        if kind is dict and attribute not in _OF_DICT:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if kind is LoopContext and attribute in _OF_LOOP:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)


class ChatTemplate:
    """Renders conversations for one tokenizer."""

    def __init__(self, hf: PreTrainedTokenizerBase) -> None:
        self._hf = hf
        self._environment = _environment() if _renders_as_library(hf) else None
        self._compiled = lru_cache(MAX_COMPILED_TEMPLATES)(self._compile)
        self._shape_of = lru_cache(MAX_COMPILED_TEMPLATES)(self._read_shape)

    def content_shape(
        self,
        chat_template: str | None,
        tools: Sequence[Mapping[str, Any]] | None,
        wanted: ContentFormat = ContentFormat.AUTO,
    ) -> ContentShape:
        """Returns the content formats that the template reads; raises any error of an invalid template."""
        if wanted is not ContentFormat.AUTO:
            return ContentShape(texts=wanted is ContentFormat.STRING, parts=wanted is ContentFormat.OPENAI)
        if self._environment is None:  # the tokenizer renders in its own way
            return ContentShape(texts=True, parts=False)
        template: str = self._hf.get_chat_template(
            chat_template,
            list(tools) if tools else None,  # type: ignore[arg-type]
        )
        return self._shape_of(template)

    def _read_shape(self, template: str) -> ContentShape:
        """Reads the formats from the template's source, corrected by rendering a small conversation."""
        assert self._environment is not None
        parsed = self._environment.parse(template)
        loops = takes_parts(parsed)
        reads_texts = self._reads(template, lambda text: text)
        reads_parts = self._reads(template, lambda text: [{"type": "text", "text": text}])
        if reads_texts is None or reads_parts is None or not (reads_texts or reads_parts):
            return ContentShape(texts=not loops or takes_texts(parsed), parts=loops)
        parts = reads_parts and (loops or not reads_texts)
        return ContentShape(texts=reads_texts or not parts, parts=parts)

    def _reads(self, template: str, shaped: Callable[[str], Any]) -> bool | None:
        """Whether the rendered conversation contains all of its texts and nothing else of their parts; None
        if the template refuses it."""
        messages = [{"role": role, "content": shaped(text)} for role, text in _TRIAL]
        try:
            bounded_loops.begin()
            text = self._compiled(template).render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=False,
                **self._hf.special_tokens_map,
            )
        except Exception:  # a template is a program: it may raise anything
            return None
        return all(said in text for _, said in _TRIAL) and "'type'" not in text and '"type"' not in text

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        chat_template: str | None,
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        extra: Mapping[str, Any],
    ) -> str:
        """Returns the rendered conversation; raises any error of the template. ``extra``: the template's own
        arguments."""
        tools = list(tools) if tools else None
        is_plain = all(map(_is_plain, (*messages, *(tools or ()), *extra.values())))
        if self._environment is None or not is_plain:
            return self._render_by_library(
                messages, tools, chat_template, add_generation_prompt, continue_final_message, extra
            )
        template: str = self._hf.get_chat_template(chat_template, tools)  # type: ignore[arg-type]
        shown = [_as_shown(message) for message in messages]
        arguments = {"documents": None, **self._hf.special_tokens_map, **extra}
        bounded_loops.begin()
        text = self._compiled(template).render(
            messages=with_mark(shown) if continue_final_message else shown,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            **arguments,
        )
        return cut_at_mark(text, shown[-1]) if continue_final_message else text

    def _render_by_library(
        self,
        messages: Sequence[dict[str, Any]],
        tools: list[Mapping[str, Any]] | None,
        chat_template: str | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        extra: Mapping[str, Any],
    ) -> str:
        text = self._hf.apply_chat_template(
            list(messages),
            tools=tools,  # type: ignore[arg-type]
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tokenize=False,
            **extra,
        )
        assert isinstance(text, str)
        return text

    def _compile(self, template: str) -> Template:
        assert self._environment is not None
        return self._environment.from_string(template)


def _renders_as_library(hf: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer renders like the library, and not in its own way."""
    from transformers import PreTrainedTokenizerBase

    return type(hf).apply_chat_template is PreTrainedTokenizerBase.apply_chat_template


def _environment() -> QuickSandbox | None:
    """Returns a quick sandbox with everything that transformers adds to its own; None if this version
    differs."""
    from transformers.utils import chat_template_utils

    try:
        theirs = chat_template_utils._compile_jinja_template("").environment
    except AttributeError:
        return None
    if type(theirs) is not ImmutableSandboxedEnvironment:
        return None
    ours = QuickSandbox(
        trim_blocks=theirs.trim_blocks,
        lstrip_blocks=theirs.lstrip_blocks,
        extensions=[type(extension) for extension in theirs.extensions.values()],
    )
    ours.filters.update(theirs.filters, tojson=_quick_json(theirs.filters["tojson"]))
    ours.filters[bounded_loops.FILTER] = bounded_loops.counted
    ours.tests.update(theirs.tests)
    ours.globals.update(theirs.globals)
    return ours


def _quick_json(tojson: Callable[..., str]) -> Callable[..., str]:
    """Returns an equal filter that, without arguments, does not create an encoder each time."""
    encode = json.JSONEncoder(ensure_ascii=False).encode
    if tojson(_JSON_PROBE) != encode(_JSON_PROBE):
        return tojson

    def quick(value: Any, *args: Any, **kwargs: Any) -> str:
        return tojson(value, *args, **kwargs) if args or kwargs else encode(value)

    return quick


def _as_shown(message: dict[str, Any]) -> dict[str, Any]:
    """Returns the message as transformers passes it to templates: without null fields, and with reasoning
    under the names that templates know."""
    shown = {name: value for name, value in message.items() if value is not None}
    for name in REASONING_FIELDS:
        if name in shown:
            return {"thinking": shown[name], **shown, "reasoning_content": shown[name]}
    return shown


def _is_plain(value: Any) -> bool:
    """Whether the value consists of JSON types: transformers sanitizes other values before a template sees
    them."""
    kind = type(value)
    if kind is str or value is None or kind is int or kind is float or kind is bool:
        return True
    if kind is dict:
        for name, item in value.items():
            if type(name) is not str or (type(item) is not str and not _is_plain(item)):
                return False
        return True
    return kind is list and all(map(_is_plain, value))
