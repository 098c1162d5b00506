"""Grammars of responses that may contain calls, some of which have one argument that follows a grammar of the
client's: for formats that write a text verbatim between tags (llguidance's Lark).

The format's parser reads text allowed by such a grammar as no other call. This module does not know how a
grammar is enforced.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from engine.tool_parsers.forced import Literals, escaped, without
from engine.tool_parsers.parameters import Tool
from engine.tool_parsers.text_syntax import TextSyntax

_OBJECT = r"[\x5b\x7b\x60]"
"""Expression for the start of a call that is written as an object: a bracket, a brace or a fence."""


def free_text_grammar(
    syntax: TextSyntax,
    tools: Sequence[Tool],
    parameters: Mapping[str, str],
    parallel: bool,
    special_tokens: Mapping[str, int],
) -> str:
    """A grammar of text that may contain calls, some of which have one argument that follows a grammar: for
    the function ``i`` of ``parameters``, which has this parameter, that is ``@text_i``."""
    return "\n".join(_Rules(syntax, list(parameters), special_tokens).of(tools, parameters, parallel))


def calls_of_texts(syntax: TextSyntax, functions: Collection[str]) -> list[str]:
    """Expressions for text that the parser could take for a call of these functions in an argument or in
    reasoning."""
    sign = _any_of([syntax.call] if syntax.call else syntax.begins)
    calls = [f"{sign}\\s*{_any_of(functions)}"]
    return [*calls, f"{_any_of(syntax.begins)}\\s*{_OBJECT}"] if syntax.reads_objects else calls


class _Rules:
    """The rules of one grammar."""

    def __init__(self, syntax: TextSyntax, texts: list[str], special_tokens: Mapping[str, int]) -> None:
        self._syntax = syntax
        self._texts = texts
        self._literal = Literals(special_tokens, spelled=True)

    def of(self, tools: Sequence[Tool], parameters: Mapping[str, str], parallel: bool) -> list[str]:
        syntax = self._syntax
        signs = [*syntax.other_begins, *filter(None, [syntax.call])]
        names = [str(tool.get("function", tool)["name"]) for tool in tools]
        more = "(ws call)*" if parallel and syntax.several else ""
        return [
            f"start: section{'*' if parallel else '?'} TEXT?",
            f"TEXT: /(?s:.+)/ & {without([*map(escaped, [*syntax.begins, *signs])])}",
            f"section: opened ws call {more} ws {self._one_of(syntax.ends)}",
            *self._until("opened", syntax.begins, [*map(escaped, signs)]),
            "call: " + " | ".join(f"call_{index}" for index in range(len(names))),
            *(f"call_{i}: {self._call(name, parameters.get(name))}" for i, name in enumerate(names)),
            f"key: {self._literal(syntax.key)} KEY {self._key_end(syntax.flags)}",
            r"KEY: /[^<>\x22\n]+/",
            *self._until("value", [syntax.value_end], calls_of_texts(syntax, self._texts)),
            *self._text_end(),
            r"ws: /[ \t\r\n]{0,8}/",
            "",
        ]

    def _call(self, name: str, parameter: str | None) -> str:
        syntax = self._syntax
        literal = self._literal
        head = literal(syntax.before + syntax.call + name + syntax.name_end)
        end = literal(syntax.call_end)
        if parameter is None:
            return f"{head} (ws key value)* ws {end}"
        key = f"{literal(syntax.key + parameter)} {self._key_end(syntax.flags[:1])} {literal(syntax.line)}"
        return f"{head} ws {key} @text_{self._texts.index(name)} text_end ws {end}"

    def _text_end(self) -> list[str]:
        """Rules for the end of a text. Lazy: if it could also be part of the text, it is the end."""
        tag = self._syntax.value_end
        line = self._syntax.line
        before, token, after = self._literal.at_token(tag)
        spelled = f"text_end_spelled[lazy]: /{escaped(line)}{'?' if line else ''}{escaped(tag)}/"
        in_tokens = f" | {self._literal(line + before)} {token} {self._literal(after)}" if token else ""
        return [f"text_end: text_end_spelled{in_tokens}", spelled]

    def _key_end(self, flags: Sequence[str]) -> str:
        ends = self._one_of([flag + self._syntax.key_end for flag in flags])
        return f"{ends} ws {self._literal(self._syntax.value)}" if self._syntax.value else ends

    def _until(self, name: str, tags: Sequence[str], avoided: Sequence[str]) -> list[str]:
        """Rules for any text up to the first of these tags; the text matches none of the expressions
        ``avoided``."""
        avoids = f" & {without(avoided)}" if avoided else ""
        ways = [f"{name}_spelled"]
        rules = [f"{name}_spelled[lazy]: /(?s:.*){_any_of(tags)}/{avoids}"]
        texts: dict[str, str] = {}
        for tag in tags:
            before, token, after = self._literal.at_token(tag)
            if token:
                text = texts.setdefault(before, f"{name}_{len(texts)}".upper())
                ways.append(f"{text}{'' if before else '?'} {token} {self._literal(after)}")
        # One complement: the library's expressions grow without end if several of them are combined.
        unlike = without([*map(escaped, tags), *avoided])
        for before, text in texts.items():
            some = f"/(?s:.*){escaped(before)}/" if before else "/(?s:.+)/"
            rules.append(f"{text}: {some} & {unlike}")
        return [f"{name}: {' | '.join(ways)}", *rules]

    def _one_of(self, texts: Sequence[str]) -> str:
        return f"({' | '.join(map(self._literal, texts))})"


def _any_of(texts: Collection[str]) -> str:
    return f"({'|'.join(map(escaped, texts))})"
