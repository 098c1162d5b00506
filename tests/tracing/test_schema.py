"""The JSON Schema and the document of a trace equal its structs, and written records conform to them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import jsonschema
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from continuum.cli.main import main
from tests.tracing.test_trace import EVENTS
from tracing import events
from tracing.events import TraceEnd, TraceEvent, TraceHeader
from tracing.schema import fields_of, json_schema, record_names, with_tables

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "trace.md"
VALIDATOR = jsonschema.Draft202012Validator(json_schema())


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    """The command prints a valid schema of its dialect, as JSON."""
    assert main(["trace", "schema"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json_schema()
    jsonschema.Draft202012Validator.check_schema(printed)


@settings(max_examples=100, deadline=None)
@given(event=EVENTS)
def test_every_line_fits(event: TraceEvent) -> None:
    """The schema allows every record that is written."""
    VALIDATOR.validate(msgspec.json.decode(msgspec.json.encode(event)))


@settings(max_examples=50, deadline=None)
@given(event=EVENTS, data=st.data())
def test_what_a_reader_refuses_does_not(event: TraceEvent, data: st.DataObject) -> None:
    """A field of a wrong type, or a record of an unknown type, fits neither the schema nor the reader."""
    line: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(event))
    field = data.draw(st.sampled_from(sorted(line)))
    line[field] = [[{"no field": "is like this"}]]
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(line, TraceEvent)
    with pytest.raises(jsonschema.ValidationError):
        VALIDATOR.validate(line)


def test_every_field_says_what_it_means() -> None:
    """Each field has a description in the schema, which is the struct's."""
    definitions = json_schema()["$defs"]
    assert definitions.keys() == set(record_names())
    for name, definition in definitions.items():
        assert definition["description"]
        described = {key for key, field in definition["properties"].items() if "description" in field}
        assert described >= {field.name for field in fields_of(name)}, name
        assert [f.name for f in fields_of(name)] == [
            f.name for f in msgspec.structs.fields(getattr(events, name))
        ]


def test_the_document_is_up_to_date(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """docs/trace.md has every record, under its tag, with its current fields; otherwise run ``continuum trace
    schema --update docs/trace.md``."""
    text = DOCUMENT.read_text()
    assert with_tables(text) == text
    for name in record_names():
        assert f"<!-- fields of {name} -->" in text, name
    for kind in get_args(TraceEvent):
        assert f"\n### `{kind.__struct_config__.tag}`\n" in text
    copy = tmp_path / "trace.md"
    copy.write_text(text.replace("| `dropped` |", "| `lost` |"))
    assert main(["trace", "schema", "--update", str(copy)]) == 0
    assert copy.read_text() == text
    assert main(["trace", "schema", "--update", str(tmp_path / "none.md")]) == 1
    assert "none.md: No such file" in capsys.readouterr().err
    copy.write_text("# A document without tables\n")
    assert main(["trace", "schema", "--update", str(copy)]) == 1
    assert f"{copy}: no '<!-- fields of NAME -->'" in capsys.readouterr().err


def test_the_version_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """The document and the schema name the header's version."""
    version = TraceHeader(wall_time_s=0.0, monotonic_s=0.0).schema_version
    assert f"This is schema version {version}." in DOCUMENT.read_text()
    assert json_schema()["title"].endswith(f"schema version {version}")
    assert TraceEnd(written=1, dropped=0).__struct_config__.tag == "end"
