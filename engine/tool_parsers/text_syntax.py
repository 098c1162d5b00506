"""How formats write calls whose arguments are texts, verbatim between tags."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.tool_parsers.tagged.dsml import DsmlToolParser
from engine.tool_parsers.tagged.invoke import InvokeTags, MiniMaxToolParser, StepToolParser


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSyntax:
    """How a format writes calls whose arguments are texts between tags; white space may separate the tags."""

    begins: tuple[str, ...]
    """Each of these begins a section."""
    ends: tuple[str, ...]
    """Each of these ends a section."""
    several: bool = False
    """Whether a section may contain more than one call."""
    before: str = ""
    """The text before ``call``."""
    call: str = ""
    """The text that begins a call, before the function's name; the parser may read it as a call outside a
    section, too."""
    name_end: str = ""
    key: str
    key_end: str
    value: str = ""
    """The text that begins a value, if ``key_end`` does not."""
    flags: tuple[str, ...] = ("",)
    """Texts that may be between a key and ``key_end``; the first one marks the value as text."""
    line: str = ""
    """The line break on both sides of a value, which belongs to its tags."""
    value_end: str
    call_end: str = ""
    other_begins: tuple[str, ...] = ()
    """Other texts that the parser reads as the beginning of a call."""
    reads_objects: bool = False
    """Whether the parser reads an object after ``begins`` as a call."""


CODER = TextSyntax(
    begins=("<tool_call>",),
    ends=("</tool_call>",),
    call="<function=",
    name_end=">",
    key="<parameter=",
    key_end=">",
    line="\n",
    value_end="</parameter>",
    call_end="</function>",
    reads_objects=True,
)
SEED = replace(CODER, begins=("<seed:tool_call>",), ends=("</seed:tool_call>",), line="")
GLM = TextSyntax(
    begins=("<tool_call>",),
    ends=("</tool_call>",),
    key="<arg_key>",
    key_end="</arg_key>",
    value="<arg_value>",
    value_end="</arg_value>",
    reads_objects=True,
)


def _of_elements(tags: InvokeTags) -> TextSyntax:
    return TextSyntax(
        begins=tags.sections,
        ends=tags.section_ends,
        several=True,
        call=tags.invoke,
        name_end='">',
        key=tags.parameter,
        key_end='">',
        value_end=tags.parameter_end,
        call_end=tags.invoke_end + (tags.call_end or ""),
    )


MINIMAX = _of_elements(MiniMaxToolParser.tags)
DSML = replace(_of_elements(DsmlToolParser.tags), flags=('" string="true', '" string="false'))
_STEP_BEGIN, _STEP_CALL = StepToolParser.tags.sections
STEP = replace(
    _of_elements(StepToolParser.tags),
    begins=(_STEP_BEGIN,),
    before=f"{_STEP_CALL}function<｜tool_sep｜>",
    other_begins=(_STEP_CALL,),
)
