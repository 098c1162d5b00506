"""Promises of ``make bench-cpu``: a bad description of other servers names its field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eval.cpu_bench.command import main


@pytest.mark.parametrize(
    ("peer", "complaint"),
    [
        ({"command": "x {model} {port}"}, "missing required field `name` - at `$.peers[0]`"),
        ({"name": "x", "command": 5}, "Expected `str`, got `int` - at `$.peers[0].command`"),
        ({"name": "x", "command": "x {model}"}, "`$.peers[0].command` does not say where {port} goes"),
        ({"name": "ours", "command": "x {model} {port}"}, "`$.peers[0].name` is 'ours', which is taken"),
        (
            {"name": "x", "command": "x {model} {port}", "cases": ["speed"]},
            "`$.peers[0].cases` names 'speed'; there is decode, ",
        ),
        (
            {"name": "x", "command": "x {model} {port}", "models": {"big": "b"}},
            "`$.peers[0].models` names 'big'; there is tiny, small",
        ),
        ({"name": "x", "command": "x {model} {port}", "color": 1}, "unknown field `color`"),
        ({"name": "x", "command": "'x {model} {port}"}, "`$.peers[0].command` is no command"),
    ],
)
def test_a_bad_description_names_its_field(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], peer: dict[str, Any], complaint: str
) -> None:
    """One sentence with file and field, before anything is started."""
    path = tmp_path / "peers.json"
    path.write_text(json.dumps({"peers": [peer]}))
    assert main(["--quick", "--folder", str(tmp_path), "--peers", str(path)]) == 1
    told = capsys.readouterr()
    assert complaint in told.err
    assert str(path) in told.err
    assert not told.out


def test_a_folder_holds_a_toml_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``--peers FOLDER`` reads its peers.toml; one that is not TOML is told of, as is one that is missing."""
    for content, complaint in (
        (None, "No such file"),
        ("[[peers]", "does not describe servers"),
        ("peers = []", "$.peers"),
    ):
        if content is not None:
            (tmp_path / "peers.toml").write_text(content)
        assert main(["--quick", "--folder", str(tmp_path), "--peers", str(tmp_path)]) == 1
        told = capsys.readouterr().err
        assert complaint in told
        assert "peers.toml" in told
