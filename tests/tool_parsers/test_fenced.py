"""Promises of the reader of text agents' commands."""

from __future__ import annotations

import json

import pytest

from engine.tool_parsers import read_fenced_command


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("THOUGHT: look\n\n```bash\nls -l && cat x\n```", "ls -l && cat x"),
        ("```bash\ncat <<'EOF' > a\nx\n\ny\nEOF\n```\nbye", "cat <<'EOF' > a\nx\n\ny\nEOF"),
        ("```mswea_bash_command\nls\n```", "ls"),
    ],
)
def test_the_only_block_is_the_command(text: str, command: str) -> None:
    """Exactly one fenced bash block is the command that will run."""
    call = read_fenced_command(text)
    assert call is not None
    assert (call.name, json.loads(call.arguments)) == ("bash", {"command": command})


@pytest.mark.parametrize(
    "text",
    [
        "no block",
        "```python\nx\n```",
        2 * "```bash\na\n```\n",
        "```bash\nunfinished",
        "```bash\n \n```",
    ],
)
def test_no_block_or_several_are_no_command(text: str) -> None:
    """A reply that such an agent would refuse contains no command."""
    assert read_fenced_command(text) is None
