"""The key of a tool call: the command that takes the time, whatever surrounds it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from estimator.tool_key import MAX_KEY_CHARS, ToolKey, tool_key

SHELL_TEXTS = {
    # Directory changes, environment and other prefixes do not take the time.
    "cd x && pytest": "bash/pytest/all",
    "cd /testbed && PYTHONPATH=. timeout 60 python3.11 -m pytest tests/test_a.py::t -x 2>&1 | tail -50": (
        "bash/pytest/file"
    ),
    "pytest -q -k 'a or b' tests": "bash/pytest/dir",
    "source .venv/bin/activate; uv run --with x pytest": "bash/pytest/all",
    "sudo -u root env A=1 nice -n 5 make -j4 test": "bash/make/test",
    "time -p sleep 5": "bash/sleep/5",
    # sub-commands
    "git -C /x --no-pager log --oneline | head": "bash/git/log",
    "python -m pip install -e .": "bash/pip/install",
    "pip3 install a && python -m venv v": "bash/pip/install",
    "npm run build": "bash/npm/run_build",
    "python -c 'import a; print(a)'": "bash/python/-c",
    "python manage.py test": "bash/python/script",
    "ls && ./tests/runtests.py expressions": "bash/python/script",
    "grep -rn foo . | head": "bash/grep/recursive",
    "cat a | grep foo": "bash/cat",
    # files written first, then run; loops; nested shells
    "cat <<'EOF' > r.py\nimport pytest\npytest; make\nEOF\npython r.py": "bash/python/script",
    "python - <<EOF\nimport os\nEOF": "bash/python/stdin",
    "for f in a b; do grep x $f; done": "bash/grep",
    "if [ -f a ]; then cargo test; fi": "bash/cargo/test",
    "bash -lc \"cd a && bash -c 'make test'\"": "bash/make/test",
    "x=$(git rev-parse HEAD) && echo $x": "bash/git/rev-parse",
    "echo 'a && pytest; b' # make": "bash/echo",
    "git log \\\n  --oneline": "bash/git/log",
    # Nothing but preparation, or nothing at all.
    "cd x": "bash/cd",
    "": "bash",
    "A=1": "bash",
}


@pytest.mark.parametrize(("text", "key"), SHELL_TEXTS.items())
def test_shell_text(text: str, key: str) -> None:
    """A shell call is named by its dominant command, whether its text is JSON or plain."""
    assert str(tool_key("Bash", json.dumps({"command": text}))) == key
    assert str(tool_key("execute_bash", text)) == key


@pytest.mark.parametrize(
    ("name", "arguments", "key"),
    [
        ("shell", '{"command": ["bash", "-lc", "cd x && pytest"], "workdir": "/"}', "bash/pytest/all"),
        ("run_terminal_cmd", '{"cmd": "ls"}', "bash/ls"),
        ("str_replace_editor", '{"command": "view", "path": "/x"}', "str_replace_editor/view"),
        ("mcp__github__get_issue", "{}", "mcp/github/get_issue"),
        ("Read", '{"file_path": "a && b"}', "read"),
        ("bash", '{"command": 5}', "bash"),
        ("bash", '{"command": "pyte', "bash"),
        ("bash", "[" * 100_000, "bash"),
        ("", "", "*"),
    ],
)
def test_call(name: str, arguments: str, key: str) -> None:
    """Any tool has a key: shells by the command they run, others by name and, if there is one, command."""
    assert str(tool_key(name, arguments)) == key


LIMITS = {
    # In the text, as in coreutils, before the command that takes the time.
    "cd x && timeout 60 pytest | tail": 60.0,
    "timeout -k 5 1.5m python a.py": 90.0,
    'timeout 1h bash -lc "cd a && timeout 30s make"': 30.0,
    "timeout 0 make": None,
    "timeout soon make": None,
    "make": None,
    # Other commands that may take time have no limit.
    "pip install -e . && timeout 60 pytest": None,
    "for t in a b; do timeout 60 pytest $t; done": None,
}


@pytest.mark.parametrize(("text", "limit_s"), LIMITS.items())
def test_limit_in_the_text(text: str, limit_s: float | None) -> None:
    """A command under ``timeout`` has that limit, and the same class as without it."""
    assert tool_key("bash", text).limit_s == limit_s
    assert tool_key("bash", text.replace("timeout 60 ", "")) == tool_key("bash", text)


@pytest.mark.parametrize(
    ("arguments", "limit_s"),
    [
        ('{"command": "make", "timeout": 120000}', 120.0),
        ('{"command": "make", "timeout": 90.5}', 90.5),
        ('{"command": "make", "timeout": "300"}', None),
        ('{"command": ["make"], "timeout_ms": 5000}', 5.0),
        ('{"command": "timeout 20 make", "timeout": 120000}', 20.0),
        ('{"command": "make", "timeout": -1}', None),
        ('{"command": "make", "timeout": {"a": [1]}}', None),
        ('{"command": "make", "timeout": 1e999}', None),
    ],
)
def test_limit_in_the_arguments(arguments: str, limit_s: float | None) -> None:
    """A timeout argument is read as seconds or, where that is impossible, as milliseconds; an invalid one is
    ignored."""
    key = tool_key("bash", arguments)
    assert (str(key), key.limit_s) == ("bash/make", limit_s)


def test_background() -> None:
    """A command left in the background returns at once, so it is not classified by what it runs."""
    assert str(tool_key("Bash", '{"command": "pytest", "run_in_background": true}')) == "bash/background"
    assert str(tool_key("Bash", '{"command": "pytest", "run_in_background": false}')) == "bash/pytest/all"


def test_chain() -> None:
    """A key falls back on increasingly general ones, down to any call at all."""
    chain = tool_key("bash", "pytest a.py").chain()
    assert [str(key) for key in chain] == ["bash/pytest/file", "bash/pytest", "bash", "*"]
    assert chain[-1] == ToolKey(())


SHELL_WORDS = """
    cd sudo timeout env -n A= bash -c ' " \\ && || ; | ( $( <<E E > 2>&1 # uv run python -m git { for
"""
SHELLISH = st.lists(
    st.sampled_from([*SHELL_WORDS.split(), "\n", " "]),
    max_size=30,
).map(" ".join)
ANYTHING = st.text(max_size=200) | SHELLISH | SHELLISH.map(lambda text: json.dumps({"command": text}))
NAMES = st.sampled_from(["bash", "Read", "mcp__a__b"]) | st.text(max_size=100)


@given(name=NAMES, arguments=ANYTHING)
def test_anything_has_a_key(name: str, arguments: str) -> None:
    """No name and no arguments raise; a key is short and printable, and equals the key read from its text."""
    key = tool_key(name, arguments)
    assert key == tool_key(name, arguments)
    assert len(str(key)) <= MAX_KEY_CHARS
    assert str(key).isascii()
    assert str(key).isprintable()
    assert ToolKey.parse(str(key)) == key
    assert len({hash(k) for k in key.chain()}) == len(key.parts) + 1
