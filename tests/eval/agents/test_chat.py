"""Promises of ``continuum chat``: what a terminal shows, and what a pipe gets."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from eval.agents.sandbox import folder_of
from tests.eval.agents.scripts import FILES
from tests.eval.agents.terminal import Person, at_a_terminal

PROMPT = "> "
CTRL_C, CTRL_D = b"\x03", b"\x04"


def piped(question: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "continuum.cli", "chat", *arguments],
        input=question,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with folder_of(FILES) as made:
        subprocess.run(["cp", "-r", str(made), str(tmp_path / "mine")], check=True)
    return tmp_path / "mine"


def interrupts_typing(person: Person) -> None:
    """Presses Ctrl-C once typed text is shown: before, the program may not be reading yet."""
    person.presses(b"x")
    person.sees("x")
    person.awaits_a_key()
    person.presses(CTRL_C)


def asks(person: Person, question: str) -> None:
    person.sees(PROMPT)
    person.types(question)


def test_a_conversation_at_a_terminal(agent_server: str, folder: Path) -> None:
    """A terminal shows the reply, each call with its result, and the cached share; the folder stays
    unchanged."""
    with at_a_terminal("chat", "--base-url", agent_server, "--folder", str(folder)) as person:
        person.sees(f"The tools work in a temporary copy of {folder}")
        asks(person, "Write the port, please.")
        first = person.sees("It is written.")
        assert "\x1b[" in first  # colors
        assert '-> config_get(path="app.toml", key="server.port")' in first
        assert "  8123" in first
        assert '-> write_file(path="port.txt", content="8123")' in first
        assert "its pin was handed over" in first
        assert "prompt tokens cached (" in first
        assert "pinned for " in first
        asks(person, "/nonsense")
        person.sees("Unknown command /nonsense")
        asks(person, "/help")
        person.sees("/quit  leave")
        asks(person, "/quit")
        assert person.ends() == 0
    assert sorted(path.name for path in folder.iterdir()) == ["app.toml", "notes"]


def test_ctrl_c_stops_the_reply_and_not_the_program(agent_server: str) -> None:
    """The question is dropped and the next one answered; Ctrl-C does not leave the prompt."""
    flags = ("--base-url", agent_server, "--max-turns", "500")
    with at_a_terminal("chat", *flags, NO_COLOR="1") as person:
        asks(person, "Never stop looking.")
        for _ in range(3):
            person.sees('-> list_files(path=".")')
        person.presses(CTRL_C)
        person.sees("Stopped")
        asks(person, "How many lines are in notes?")
        person.sees("There are 4 lines.")
        person.sees(PROMPT)
        interrupts_typing(person)
        person.sees("/quit leaves")
        asks(person, "/new")
        person.sees("A new conversation.")
        person.sees(PROMPT)
        person.presses(CTRL_D)
        assert person.ends() == 0
        assert "\x1b[36m" not in person.shown  # NO_COLOR


def test_a_pipe_is_answered_and_left(agent_server: str, folder: Path) -> None:
    """A pipe gets the answer on stdout, everything else on stderr, without colors."""
    done = piped("How many lines\nare in notes?\n", "--base-url", agent_server, "--folder", str(folder))
    assert (done.returncode, done.stdout) == (0, "I look around.\nThere are 4 lines.\n")
    assert '-> count_lines(path="notes/b.txt")' in done.stderr
    assert "\x1b" not in done.stdout + done.stderr


def test_a_call_out_of_the_folder_is_refused_and_shown(agent_server: str) -> None:
    """A question may be an argument; stdin is then not read."""
    done = piped("", "--base-url", agent_server, "Read the secret")
    assert (done.returncode, done.stdout) == (0, "I was not allowed to.\n"), done.stderr
    assert "error: ../secret.txt is outside the folder" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_server_of_its_own(agent_model: Path) -> None:
    """A server started for the chat ignores Ctrl-C, and ends with the terminal."""
    with at_a_terminal("chat", "--model", str(agent_model), NO_COLOR="1") as person:
        person.sees(f"Starting a server for {agent_model} ...")
        address = person.sees("/help", timeout_s=200).split(", at ")[1].split(".\n")[0]
        person.sees(PROMPT)
        interrupts_typing(person)
        asks(person, "How many lines are in notes?")
        person.sees("There are 4 lines.")
        person.sees(PROMPT)
        assert httpx.get(f"{address}/health").status_code == 200
        assert person.hangs_up() == 128 + signal.SIGHUP
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{address}/health")


def test_no_answer_is_exit_code_1(agent_server: str) -> None:
    """No answer gives exit code 1, for scripts."""
    done = piped("Never stop", "--base-url", agent_server, "--max-turns", "2")
    assert (done.returncode, done.stdout) == (1, "")
    assert "No answer after 2 turns" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--base-url", "http://127.0.0.1:9"], "Cannot reach the server at http://127.0.0.1:9"),
        (["--base-url", "http://127.0.0.1:9", "--folder", "/no/such"], "/no/such is not a folder"),
        (["--base-url", "SERVER", "--model", "other"], "does not serve 'other' but tiny"),
    ],
)
def test_what_cannot_be_is_one_sentence(agent_server: str, arguments: list[str], told: str) -> None:
    """An impossible request gives one sentence without a traceback; exit code 2 for a wrong option."""
    done = piped("Hello", *(agent_server if word == "SERVER" else word for word in arguments))
    assert done.returncode == (2 if "--folder" in arguments else 1)
    assert told in done.stderr.splitlines()[-1]


def test_a_folder_too_large_to_copy_is_an_error(tmp_path: Path) -> None:
    """The folder is refused before gigabytes are copied."""
    with (tmp_path / "big").open("wb") as file:
        file.truncate(65 * 2**20)
    done = piped("Hello", "--base-url", "http://127.0.0.1:9", "--folder", str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.endswith("holds more than 64 MiB; choose a smaller folder.\n")


def test_an_empty_question_is_an_error(agent_server: str) -> None:
    """An empty question is refused."""
    done = piped(" \n", "--base-url", agent_server)
    assert (done.returncode, done.stderr.strip()) == (
        1,
        "continuum: No question: standard input is empty.",
    )


def test_what_is_shown_cannot_steer_the_terminal(agent_server: str, folder: Path) -> None:
    """Control characters of a file are shown as text."""
    (folder / "notes" / "\x1b[2Jx.txt").write_text("y")
    done = piped("How many lines are in notes?", "--base-url", agent_server, "--folder", str(folder))
    assert "\\x1b[2Jx.txt" in done.stderr
    assert "\x1b" not in done.stderr
