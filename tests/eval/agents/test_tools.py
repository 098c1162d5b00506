"""An agent's tools: their effects in the folder, and their refusals."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval.agents.expression import evaluate
from eval.agents.sandbox import Refused, Sandbox, copy_of, folder_of
from eval.agents.tools import MAX_HITS, MAX_RESULT_CHARACTERS, SCHEMAS, Toolbox

FILES = {
    "notes/first.txt": "alpha\nowner: maren\n",
    "notes/second.md": "beta\n",
    "conf/app.toml": '[server]\nport = 8143\nhost = "atlas"\n',
    "conf/app.json": '{"server": {"port": 8143, "tags": ["a", "b"]}}',
    "conf/app.ini": "[server]\nport = 8143\n",
}


@pytest.fixture
def root() -> Iterator[Path]:
    with folder_of(FILES) as folder:
        yield folder


@pytest.fixture
def tools(root: Path) -> Toolbox:
    return Toolbox(root)


def call(tools: Toolbox, name: str, **arguments: object) -> str:
    return tools.run(name, json.dumps(arguments))


def test_each_tool_does_what_it_says(tools: Toolbox, root: Path) -> None:
    assert call(tools, "list_files") == "conf/\nnotes/"
    assert call(tools, "list_files", path="notes") == "first.txt\nsecond.md"
    assert call(tools, "read_file", path="notes/first.txt") == "alpha\nowner: maren"
    assert call(tools, "search", text="maren") == "notes/first.txt:2: owner: maren"
    assert call(tools, "search", text="beta", path="conf") == "no match"
    assert call(tools, "count_lines", path="notes/first.txt") == "2"
    assert call(tools, "python", expression="max(12, 3) * 2") == "24"
    assert call(tools, "write_file", path="out/new.txt", content="hello") == "wrote 5 characters"
    assert (root / "out/new.txt").read_text() == "hello"


@pytest.mark.parametrize("suffix", ["toml", "json", "ini"])
def test_a_key_is_found_in_each_kind_of_configuration(tools: Toolbox, suffix: str) -> None:
    path = f"conf/app.{suffix}"
    assert call(tools, "config_get", path=path, key="server.port") == "8143"
    assert call(tools, "config_get", path=path, key="server.size") == f"error: no key server.size in {path}"


def test_every_tool_is_told_to_the_model_and_every_told_one_runs(tools: Toolbox) -> None:
    for schema in SCHEMAS:
        function = schema["function"]
        needed = dict.fromkeys(function["parameters"]["required"], "x")
        assert "there is no tool" not in call(tools, function["name"], **needed)


@pytest.mark.parametrize(
    "path", ["../secret", "/etc/passwd", "notes/../../secret", "~/../../x", "a\0b", "x" * 600]
)
def test_a_path_that_leads_out_is_refused_and_said(tools: Toolbox, path: str) -> None:
    for name in ("read_file", "list_files", "count_lines"):
        assert call(tools, name, path=path).startswith("error: ")
    assert call(tools, "write_file", path=path, content="x").startswith("error: ") or path.startswith("~")
    assert "outside the folder" in call(tools, "read_file", path="../secret")


def test_a_link_that_leads_out_is_refused_for_reading_writing_and_searching(
    root: Path, tmp_path: Path
) -> None:
    (tmp_path / "secret.txt").write_text("treasure")
    os.symlink(tmp_path, root / "link")
    os.symlink(root / "loop", root / "loop")
    tools = Toolbox(root)
    assert "outside the folder" in call(tools, "read_file", path="link/secret.txt")
    assert "outside the folder" in call(tools, "write_file", path="link/new.txt", content="x")
    assert call(tools, "search", text="treasure") == "no match"
    assert call(tools, "read_file", path="loop").startswith("error: ")
    assert not (tmp_path / "new.txt").exists()


@given(st.lists(st.sampled_from(["..", ".", "notes", "/", "first.txt", "~", "link"]), max_size=8))
def test_no_path_that_a_sandbox_gives_is_outside(parts: list[str]) -> None:
    with folder_of(FILES) as root:
        sandbox = Sandbox(root)
        try:
            path = sandbox.path("/".join(parts))
        except Refused:
            return
        assert path.is_relative_to(root.resolve())


def test_a_copy_is_worked_on_not_the_folder(root: Path) -> None:
    with copy_of(root) as copy:
        call(Toolbox(copy), "write_file", path="notes/first.txt", content="changed")
        assert (copy / "notes/first.txt").read_text() == "changed"
    assert (root / "notes/first.txt").read_text() == FILES["notes/first.txt"]
    assert not copy.exists()


def test_a_folder_too_large_to_copy_is_refused(root: Path) -> None:
    with pytest.raises(Refused, match="holds more than"), copy_of(root, max_bytes=10):
        pass


@pytest.mark.parametrize(
    ("name", "arguments", "told"),
    [
        ("read_file", '{"path": "nowhere.txt"}', "error: no such file: nowhere.txt"),
        ("read_file", '{"path": "notes"}', "error: notes is a folder"),
        ("list_files", '{"path": "nowhere"}', "error: no such folder: nowhere"),
        ("list_files", '{"path": "notes/first.txt"}', "error: notes/first.txt is a file"),
        ("read_file", "{}", "error: read_file needs the argument path"),
        ("read_file", '{"file": "x"}', "error: read_file has no argument file"),
        ("read_file", '{"path": 3}', "error: argument path of read_file must be a string"),
        ("read_file", "[1]", "error: the arguments of read_file are not a JSON object"),
        ("read_file", "{", "error: the arguments of read_file are not JSON"),
        ("remove_all", "{}", "error: there is no tool remove_all"),
        ("search", '{"text": ""}', "error: text must not be empty"),
        ("write_file", '{"path": "notes", "content": "x"}', "error: notes is a folder"),
        ("config_get", '{"path": "notes/first.txt", "key": "a"}', "error: notes/first.txt is not a .toml"),
    ],
)
def test_what_goes_wrong_is_told_in_a_sentence(tools: Toolbox, name: str, arguments: str, told: str) -> None:
    assert tools.run(name, arguments).startswith(told)


def test_results_are_cut_where_they_would_fill_the_context(tools: Toolbox, root: Path) -> None:
    (root / "long.txt").write_text("needle in a line\n" * 1000)
    read = call(tools, "read_file", path="long.txt")
    assert len(read) < MAX_RESULT_CHARACTERS + 100
    assert read.endswith("more characters")
    assert call(tools, "search", text="needle").count("\n") == MAX_HITS


def test_what_is_no_text_is_told_and_not_searched(tools: Toolbox, root: Path) -> None:
    (root / "picture.bin").write_bytes(b"\xff\xfe maren")
    assert call(tools, "read_file", path="picture.bin") == "error: the file is not text"
    assert call(tools, "search", text="maren") == "notes/first.txt:2: owner: maren"


@pytest.mark.parametrize(
    "expression",
    [
        "().__class__",
        "__import__('os')",
        "[x for x in (1, 2)]",
        "(lambda: 1)()",
        "open('notes')",
        "x := 1",
        "import os",
        "1 +",
        "9" * 600,
        "f'{1}'",
    ],
)
def test_an_expression_may_compute_and_nothing_else(tools: Toolbox, expression: str) -> None:
    assert call(tools, "python", expression=expression).startswith("error: ")


@pytest.mark.slow
def test_an_expression_without_end_or_bounds_is_stopped() -> None:
    assert evaluate("9**9**9", timeout_s=1.0).startswith("error: the expression")
    assert evaluate("'x' * 10**11", timeout_s=5.0).startswith("error: ")
    assert evaluate("1 / 0") == "error: ZeroDivisionError: division by zero"
