"""Writes structural tags, the formats of text and tags that V1 and XGrammar use, as a Lark grammar.

XGrammar's formats for text are supported; those for tokens, and parameters in XML, are refused by name. It
does not know schemas or expressions: the caller writes everything that is neither text nor tag.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.errors import RequestError
from engine.tool_parsers.forced import Literals, escaped, without

MAX_DEPTH = 32

Ends = tuple[str, ...]
"""One of these texts follows a format; empty: it ends with the format around it."""
Inner = Callable[[str, Any], str]
"""Writes a part that is not text, from its kind (json_schema, regex, grammar) and source; returns a rule's
name."""

_SOURCES = {"json_schema": "json_schema", "regex": "pattern", "grammar": "grammar"}
"""The field that holds the source, by kind."""
_REPEATS = {"optional": "?", "star": "*", "plus": "+"}
_KINDS = (
    *("const_string", "any_text", "tag", "triggered_tags", "tags_with_separator"),
    *("sequence", "or", *_REPEATS, *_SOURCES),
)


def structural_tag_grammar(asked: Any, field: str, tokens: Mapping[str, int], inner: Inner) -> str:
    """Returns a grammar in Lark; RequestError that names the invalid part. ``tokens``: ids of the texts that
    are single tokens, and appear only as those."""
    writer = _Writer(tokens, inner)
    start = writer.write(*_outermost(asked, field), (), 0)
    return f"start: {start}\n" + "".join(f"{rule}\n" for rule in writer.rules)


def _outermost(asked: Any, field: str) -> tuple[Any, str]:
    """Returns the format of a structural tag, and its path; also for V1's older form."""
    if not isinstance(asked, dict):
        raise RequestError(f"{field} must be an object.", field)
    if asked.get("type", "structural_tag") != "structural_tag":
        raise RequestError(f"{field}.type must be 'structural_tag'.", f"{field}.type")
    if "format" in asked:
        return asked["format"], f"{field}.format"
    if "structures" not in asked or "triggers" not in asked:
        raise RequestError(f"{field} needs a format, or structures and triggers.", field)
    tags = [
        {**each, "content": {"type": "json_schema", "json_schema": each.get("schema")}}
        for each in _each(asked["structures"], dict, f"{field}.structures")
    ]
    return {"type": "triggered_tags", "triggers": asked["triggers"], "tags": tags}, field


def _each(value: Any, kind: type, field: str) -> list[Any]:
    """Returns the value if it is a list with at least one item, all of this kind; else RequestError."""
    if not isinstance(value, list) or not value or not all(isinstance(item, kind) for item in value):
        what = "texts" if kind is str else "objects"
        raise RequestError(f"{field} must be a list of {what} with at least one.", field)
    return value


def _text(form: Mapping[str, Any], name: str, field: str) -> str:
    value = form.get(name)
    if not isinstance(value, str):
        raise RequestError(f"{field}.{name} must be a text.", f"{field}.{name}")
    return value


def _flag(form: Mapping[str, Any], name: str, field: str) -> bool:
    value = form.get(name, False)
    if not isinstance(value, bool):
        raise RequestError(f"{field}.{name} must be true or false.", f"{field}.{name}")
    return value


@dataclass(frozen=True, slots=True)
class _Tag:
    """One tag of a list of tags."""

    begin: str
    form: Mapping[str, Any]
    field: str


class _Writer:
    """Collects the rules of one grammar."""

    def __init__(self, tokens: Mapping[str, int], inner: Inner) -> None:
        self.rules: list[str] = []
        self._literal = Literals(tokens, spelled=False)
        self._inner = inner
        self._names: dict[str, str] = {}
        """The names of rules, by what they match."""

    def write(self, form: Any, field: str, ends: Ends, depth: int) -> str:
        """An expression for a format that is followed by one of ``ends``."""
        if depth > MAX_DEPTH:
            raise RequestError(f"{field} is nested more than {MAX_DEPTH} formats deep.", field)
        if not isinstance(form, dict):
            raise RequestError(f"{field} must be an object.", field)
        match kind := form.get("type"):
            case "const_string":
                return self._literal(_text(form, "value", field)) + self._one_of(ends)
            case "any_text":
                return self._any_text(ends, _excludes(form, field))
            case "tag":
                return self._tag(form, field, ends, depth)
            case "triggered_tags":
                return self._triggered_tags(form, field, ends, depth)
            case "tags_with_separator":
                return self._separated_tags(form, field, depth) + self._one_of(ends)
            case "sequence":
                return self._sequence(form, field, ends, depth)
            case "or":
                choices = self._elements(form, field)
                parts = [self.write(each, place, ends, depth + 1) for each, place in choices]
                return f"({' | '.join(parts)})"
            case "optional" | "star" | "plus":
                content = self._limited(form.get("content"), f"{field}.content", depth)
                return f"({content}){_REPEATS[kind]}" + self._one_of(ends)
            case "json_schema" | "regex" | "grammar":
                return self._source(kind, form, field) + self._one_of(ends)
            case _:
                raise RequestError(
                    f"{field}.type must be one of {', '.join(_KINDS)}, got {str(kind)[:50]!r}.",
                    f"{field}.type",
                )

    def _source(self, kind: str, form: Mapping[str, Any], field: str) -> str:
        name = _SOURCES[kind]
        source = form.get(name)
        if not isinstance(source, str if kind != "json_schema" else dict | bool):
            what = "a schema" if kind == "json_schema" else "a text"
            raise RequestError(f"{field}.{name} must be {what}.", f"{field}.{name}")
        if form.get("style", "json") != "json":
            raise RequestError(f"{field}.style must be 'json'.", f"{field}.style")
        return f" {self._inner(kind, source)} "

    def _elements(self, form: Mapping[str, Any], field: str) -> list[tuple[Any, str]]:
        elements = _each(form.get("elements"), dict, f"{field}.elements")
        return [(each, f"{field}.elements[{number}]") for number, each in enumerate(elements)]

    def _sequence(self, form: Mapping[str, Any], field: str, ends: Ends, depth: int) -> str:
        *first, (last, place) = self._elements(form, field)
        parts = [self._limited(each, at, depth) for each, at in first]
        return " ".join((*parts, self.write(last, place, ends, depth + 1)))

    def _limited(self, form: Any, field: str, depth: int) -> str:
        """An expression for a format that another one follows."""
        if _is_endless(form):
            raise RequestError(
                f"{field} is text without an end, which nothing can follow: put it into a tag.", field
            )
        return self.write(form, field, (), depth + 1)

    def _tag(self, form: Mapping[str, Any], field: str, ends: Ends, depth: int) -> str:
        own = _ends_of(form, field)
        content = self.write(form.get("content"), f"{field}.content", own or ends, depth + 1)
        return f"{self._literal(_text(form, 'begin', field))} {content}" + self._one_of(ends if own else ())

    def _tags(self, form: Mapping[str, Any], field: str) -> list[_Tag]:
        found: list[_Tag] = []
        for number, each in enumerate(_each(form.get("tags"), dict, f"{field}.tags")):
            place = f"{field}.tags[{number}]"
            found.append(_Tag(_text(each, "begin", place), {**each, "type": "tag"}, place))
        return found

    def _whole(self, tag: _Tag, depth: int, begun: str = "") -> str:
        """A tag of a list, without the text ``begun`` at its start."""
        return self._limited({**tag.form, "begin": tag.begin.removeprefix(begun)}, tag.field, depth)

    def _separated_tags(self, form: Mapping[str, Any], field: str, depth: int) -> str:
        tags = " | ".join(self._whole(tag, depth) for tag in self._tags(form, field))
        separator = self._literal(_text(form, "separator", field))
        more = "" if _flag(form, "stop_after_first", field) else f" ({separator} ({tags}))*"
        return f"(({tags}){more})" + ("" if _flag(form, "at_least_one", field) else "?")

    def _triggered_tags(self, form: Mapping[str, Any], field: str, ends: Ends, depth: int) -> str:
        tags = self._tags(form, field)
        excluded = _excludes(form, field)
        text = self._any_text(ends, excluded)
        end = self._one_of(ends)
        triggered = self._triggered(form, field, tags, excluded, depth)
        only_one = _flag(form, "stop_after_first", field)
        if not _flag(form, "at_least_one", field):
            return f"({triggered}{end} | {text})" if only_one else f"({triggered})* {text}"
        first = " | ".join(self._whole(tag, depth) for tag in tags)
        return f"({first}){end}" if only_one else f"({first}) ({triggered})* {text}"

    def _triggered(
        self, form: Mapping[str, Any], field: str, tags: Sequence[_Tag], excluded: Sequence[str], depth: int
    ) -> str:
        """Any text up to a trigger, and the rest of one of its tags."""
        triggers = _each(form.get("triggers"), str, f"{field}.triggers")
        by_trigger: dict[str, list[_Tag]] = {}
        for tag in tags:
            fitting = [trigger for trigger in triggers if trigger and tag.begin.startswith(trigger)]
            if len(fitting) != 1:
                raise RequestError(
                    f"{tag.field}.begin must begin with exactly one of the triggers.", f"{tag.field}.begin"
                )
            by_trigger.setdefault(self._in_tokens(fitting[0], tag.begin), []).append(tag)
        parts: list[str] = []
        for trigger, its_tags in by_trigger.items():
            rests = " | ".join(self._whole(tag, depth, begun=trigger) for tag in its_tags)
            parts.append(f"{self._any_text((trigger,), excluded)} ({rests})")
        return " | ".join(parts)

    def _in_tokens(self, trigger: str, begin: str) -> str:
        """The trigger, extended to the end of a token if it ends inside one."""
        num_chars = 0
        for piece in self._literal.pieces(begin):
            num_chars += len(piece)
            if num_chars >= len(trigger):
                return begin[:num_chars] if piece in self._literal.special_tokens else trigger
        return trigger

    def _any_text(self, ends: Ends, excluded: Sequence[str]) -> str:
        """Text up to and including the first of ``ends``, without an excluded text."""
        if not ends:
            return self._named(f"/(?s:.+)/{_unlike(excluded)}", "TEXT") + "?"
        in_text: list[str] = []
        parts: list[str] = []
        for end in ends:
            before, token, after = self._literal.at_token(end)
            if not token:
                in_text.append(escaped(end))
                continue
            some = f"/(?s:.*){escaped(before)}/" if before else "/(?s:.+)/"
            text = self._named(f"{some}{_unlike(excluded)}", "TEXT")
            parts.append(f"{text}{'' if before else '?'} {token} {self._literal(after)}")
        if in_text:
            parts.append(self._named(f"/(?s:.*)({'|'.join(in_text)})/{_unlike(excluded)}", "text", lazy=True))
        return f"({' | '.join(parts)})"

    def _named(self, matches: str, kind: str, *, lazy: bool = False) -> str:
        """Returns the name of a rule or terminal that matches this, added if missing."""
        name = self._names.get(f"{kind} {matches}")
        if name is None:
            name = self._names[f"{kind} {matches}"] = f"{kind}_{len(self._names)}"
            self.rules.append(f"{name}{'[lazy]' if lazy else ''}: {matches}")
        return name

    def _one_of(self, ends: Ends) -> str:
        return f" ({' | '.join(map(self._literal, ends))})" if ends else ""


def _ends_of(form: Mapping[str, Any], field: str) -> Ends:
    """The ends of a tag; empty if it ends with the format around it."""
    given = form.get("end")
    ends = _each(given, str, f"{field}.end") if isinstance(given, list) else [_text(form, "end", field)]
    if "" in ends and len(ends) > 1:
        raise RequestError(f"{field}.end must not have an empty text among others.", f"{field}.end")
    return () if ends == [""] else tuple(ends)


def _excludes(form: Mapping[str, Any], field: str) -> list[str]:
    given = form.get("excludes")
    return _each(given, str, f"{field}.excludes") if given else []


def _is_endless(form: Any) -> bool:
    """Whether a format ends only at the text that follows it."""
    if not isinstance(form, dict):
        return False
    match form.get("type"):
        case "any_text":
            return True
        case "triggered_tags":
            return not (form.get("stop_after_first") and form.get("at_least_one"))
        case "tag":
            return form.get("end") == "" and _is_endless(form.get("content"))
        case "or":
            elements = form.get("elements")
            return isinstance(elements, list) and any(map(_is_endless, elements))
        case "sequence":
            elements = form.get("elements")
            return isinstance(elements, list) and bool(elements) and _is_endless(elements[-1])
        case _:
            return False


def _unlike(excluded: Sequence[str]) -> str:
    return f" & {without([escaped(text) for text in excluded])}" if excluded else ""
