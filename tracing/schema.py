"""``continuum trace schema``: prints what a line of a trace may be, as JSON Schema or as tables for
docs/trace.md.

Both are generated from tracing/events.py and its docstrings, so neither becomes outdated.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from inspect import cleandoc
from pathlib import Path
from typing import Any, get_args

import msgspec

from tracing import events
from tracing.events import SCHEMA_VERSION, BaseReceipt, TraceEvent

DIALECT = "https://json-schema.org/draft/2020-12/schema"
COMMON = {
    "now": "When, on the engine's clock.",
    "step": "Number of the step, from 0.",
    "req_id": "The request.",
    "job_id": "The job.",
}
"""Meaning of fields that many records have, used where they have no docstring."""
_TABLE = re.compile(r"(<!-- fields of (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class FieldText:
    """A field as defined in events.py."""

    name: str
    kind: str
    """Its type as a Python annotation."""
    default: str | None
    """Its default; None: the field is required."""
    meaning: str


def json_schema() -> dict[str, Any]:
    """JSON Schema of one line. Numbers of seconds are finite; bytes are base64."""
    (schema,), definitions = msgspec.json.schema_components([TraceEvent], ref_template="#/$defs/{name}")
    for name, definition in definitions.items():
        for field in fields_of(name):
            if field.meaning:
                definition["properties"][field.name]["description"] = field.meaning
    head = {"$schema": DIALECT, "title": f"A line of a scheduler trace, schema version {SCHEMA_VERSION}"}
    return {**head, **schema, "$defs": definitions}


def record_names() -> list[str]:
    """Names of all structs that lines consist of: the records, then the structs inside them."""
    records = [kind.__name__ for kind in get_args(TraceEvent)]
    return [*records, *(name for name in _texts() if name not in (*records, BaseReceipt.__name__))]


def fields_of(name: str) -> tuple[FieldText, ...]:
    """Fields of a struct of events.py, in its order."""
    return _texts()[name]


@cache
def _texts() -> dict[str, tuple[FieldText, ...]]:
    """Fields by struct; a struct that extends another has its own fields first, as msgspec writes them."""
    tree = ast.parse(Path(events.__file__).read_text())
    texts: dict[str, tuple[FieldText, ...]] = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            extended = [ast.unparse(base) for base in node.bases]
            inherited = (field for base in extended for field in texts.get(base, ()))
            texts[node.name] = (*_fields(node), *inherited)
    return texts


def _fields(struct: ast.ClassDef) -> Iterator[FieldText]:
    """Yields each annotated name, with the string that follows it, if any."""
    for index, node in enumerate(struct.body):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            following = struct.body[index + 1] if index + 1 < len(struct.body) else None
            default = None if node.value is None else ast.unparse(node.value)
            name = node.target.id
            meaning = _string_of(following) or COMMON.get(name, "")
            yield FieldText(name, ast.unparse(node.annotation), default, meaning)


def _string_of(node: ast.stmt | None) -> str:
    match node:
        case ast.Expr(value=ast.Constant(value=str(text))):
            return " ".join(cleandoc(text).split())
    return ""


# ---- the tables of the document ----


def with_tables(document: str) -> str:
    """The document with its tables of fields regenerated: between ``fields of NAME`` and ``end``."""
    return _TABLE.sub(lambda found: found[1] + table(found[2]) + found[3], document)


def table(name: str) -> str:
    """The fields of one struct as a table in Markdown."""
    lines = ["| field | type | default | meaning |", "|---|---|---|---|"]
    for field in fields_of(name):
        default = "" if field.default is None else _code(field.default)
        lines.append(f"| {_code(field.name)} | {_code(field.kind)} | {default} | {_cell(field.meaning)} |")
    return "\n".join(lines) + "\n"


def _code(text: str) -> str:
    return f"`{_cell(text)}`"


def _cell(text: str) -> str:
    return text.replace("``", "`").replace("|", "\\|")


# ---- the command ----


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--update",
        type=Path,
        metavar="FILE",
        help="Update the tables of fields in this document instead",
    )


def run(arguments: argparse.Namespace) -> int:
    if arguments.update is None:
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(json_schema())) + b"\n")
        return 0
    try:
        document = arguments.update.read_text()
        if _TABLE.search(document) is None:
            print(
                f"{arguments.update}: no '<!-- fields of NAME -->' with an '<!-- end -->'.", file=sys.stderr
            )
            return 1
        arguments.update.write_text(with_tables(document))
    except OSError as error:
        print(f"{arguments.update}: {error.strerror or error}.", file=sys.stderr)
        return 1
    return 0
