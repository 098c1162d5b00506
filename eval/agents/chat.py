"""``continuum chat``: a chat with an agent in the terminal; shows its text, its tool calls and cache hits."""

from __future__ import annotations

import argparse
import asyncio
import errno
import io
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from eval.agent_model import MAX_REPLY_TOKENS
from eval.agent_model import folder as model_in_the_box
from eval.agents.agent import Agent, AgentRun, Ending, Event, ReplyCame, ResultCame, TextCame
from eval.agents.example import FILES, QUESTIONS
from eval.agents.http_model import HttpModel
from eval.agents.model import Message, Sampling
from eval.agents.notes import call_line, result_lines, warmth_line
from eval.agents.sandbox import Refused, copy_of, folder_of
from eval.agents.screen import Screen, Style
from eval.agents.server import MODEL_NAME, served
from eval.agents.tools import Toolbox
from eval.arguments import amount, count
from eval.errors import EvalError, UsageError
from eval.load.client import ServerClient

PROMPT = "> "
MAX_TURNS = 20
SHOWN_FROM_S = 0.1
"""Calls shorter than this are shown without their time."""
SERVER_FLAGS = ("--kv-cache-memory-bytes", "256M")
HELP = """\
/help  this
/new   start a new conversation; the folder stays as it is
/quit  leave (Ctrl-D too); Ctrl-C stops the response
Anything else is sent to the model."""


@dataclass(slots=True)
class Chat:
    """Sends a person's input to the agent, and shows what the agent does."""

    agent: Agent
    screen: Screen
    runner: asyncio.Runner
    opening: tuple[Message, ...] = ()
    """Messages that every conversation begins with."""

    def talk(self) -> None:
        """Converses until /quit or the end of the input. Raises ServerGoneError."""
        while (line := self._line()) is not None:
            match line.strip():
                case "":
                    pass
                case "/quit" | "/exit":
                    return
                case "/help":
                    self.screen.note(HELP, Style.PLAIN)
                case "/new":
                    self._start_over()
                case command if command.startswith("/"):
                    self.screen.note(f"Unknown command {command.split()[0]}; /help lists the commands.")
                case question:
                    self.ask(question)

    def ask(self, question: str) -> bool:
        """Sends the question to the agent; returns whether there was an answer. Ctrl-C stops it."""
        try:
            run = self.runner.run(self.agent.ask(question))
        except KeyboardInterrupt:
            self.screen.note("Stopped; the question was dropped.")
            return False
        self.screen.end_line()
        if trouble := _trouble(run):
            self.screen.note(trouble, Style.ERROR)
        return run.ending is Ending.ANSWERED

    def _line(self) -> str | None:
        """Returns the next input line; None at the end."""
        while True:
            try:
                return input(PROMPT)
            except EOFError:
                self.screen.say("\n")
                return None
            except KeyboardInterrupt:
                self.screen.note("\n/quit leaves.")

    def _start_over(self) -> None:
        self.agent.messages[:] = self.opening
        self.screen.note("A new conversation.")


def _trouble(run: AgentRun) -> str | None:
    """Returns why there is no answer, and what to do about it; None if there is one."""
    if run.ending is Ending.OVER_LIMIT:
        return f"No answer after {len(run.turns)} turns; the question was dropped."
    if run.ending is Ending.FAILED:
        return f"{run.error} The question was dropped; /new starts over."
    if not run.answer.strip():
        return "(an empty answer)"
    return None


def _show(screen: Screen, event: Event) -> None:
    match event:
        case TextCame(text):
            screen.say(text)
        case ReplyCame(reply):
            screen.note(warmth_line(reply))
        case ResultCame(result):
            took = f"  {result.seconds:.2f} s" if result.seconds >= SHOWN_FROM_S else ""
            screen.note(f"-> {call_line(result.call)}{took}", Style.CALL)
            screen.note(result_lines(result.result), Style.PLAIN)


# ---- the command ----


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``continuum chat``."""
    add = parser.add_argument
    add(
        "question",
        nargs="?",
        metavar="QUESTION",
        help="Question to answer, then exit (default: an interactive chat)",
    )
    add("--base-url", metavar="URL", help="URL of a running server (default: start one)")
    add(
        "--model",
        metavar="NAME",
        help="Model name at --base-url; else a model folder to serve (default: the bundled demo model)",
    )
    add(
        "--folder",
        type=Path,
        metavar="PATH",
        help="Folder whose copy the tools work in (default: an example)",
    )
    add("--system", metavar="TEXT", help="System message (default: none)")
    add(
        "--temperature",
        type=amount,
        metavar="X",
        help="Sampling temperature (default: 0; with --base-url the server's)",
    )
    add(
        "--max-tokens",
        type=count,
        metavar="N",
        help=f"Maximum tokens per response (default: what fits; bundled model: {MAX_REPLY_TOKENS})",
    )
    add(
        "--max-turns", type=count, default=MAX_TURNS, metavar="N", help="Maximum number of turns per question"
    )
    add("--api-key", metavar="KEY", help="API key of the server (default: none)")


def run(arguments: argparse.Namespace) -> int:
    """Runs ``continuum chat``. Exit code 1 if the single question of a non-interactive run was not
    answered."""
    try:
        return _run(arguments)
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        # The terminal is closed. Its SIGHUP may come later than the end of the input, or be ignored.
        for stream in (sys.stdout, sys.stderr):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return 128 + signal.SIGHUP


def _run(arguments: argparse.Namespace) -> int:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a model's text need not fit the terminal's encoding
    screen = Screen(sys.stdout, sys.stderr)
    question = _question(arguments)
    with (
        _folder(arguments.folder, screen) as root,
        _server(arguments, screen) as base_url,
        asyncio.Runner() as runner,
        _connected(runner, arguments, base_url) as client,
    ):
        chat = _chat(arguments, client, root, screen, runner)
        if question is not None:
            return 0 if chat.ask(question) else 1
        _greet(screen, arguments)
        chat.talk()
    return 0


def _question(arguments: argparse.Namespace) -> str | None:
    """Returns the one question to answer; None at a terminal. Raises EvalError if standard input is empty."""
    question: str | None = arguments.question
    if question is None:
        if sys.stdin.isatty():
            return None
        question = sys.stdin.buffer.read().decode(errors="replace")
    if not question.strip():
        raise EvalError("No question: standard input is empty.")
    return question.strip()


@contextmanager
def _folder(given: Path | None, screen: Screen) -> Iterator[Path]:
    """Yields the folder for the tools, always a copy. Raises EvalError if it cannot be copied."""
    if given is None:
        with folder_of(FILES) as root:
            screen.note("The tools work in a temporary example folder.")
            yield root
        return
    if not given.is_dir():
        raise UsageError(f"--folder: {given} is not a folder.")
    with ExitStack() as stack:
        try:
            root = stack.enter_context(copy_of(given))
        except Refused as refused:
            raise EvalError(f"--folder: {refused}.") from refused
        except OSError as error:  # includes shutil.Error, which lists all files that failed
            reason = error.strerror or f"{len(error.args[0])} of its files cannot be read"
            raise EvalError(f"--folder: {given} cannot be copied: {reason}.") from error
        screen.note(f"The tools work in a temporary copy of {given}; {given} itself does not change.")
        yield root


@contextmanager
def _server(arguments: argparse.Namespace, screen: Screen) -> Iterator[str]:
    """Yields the address of the given server, else of one started for the duration."""
    if arguments.base_url is not None:
        yield arguments.base_url
        return
    model = arguments.model
    screen.note(f"Starting a server for {model or 'the bundled demo model'} ...")
    started = time.monotonic()
    with served(model or str(model_in_the_box()), SERVER_FLAGS) as base_url:
        screen.note(f"Server ready after {time.monotonic() - started:.1f} s, at {base_url}.")
        yield base_url


@contextmanager
def _connected(
    runner: asyncio.Runner, arguments: argparse.Namespace, base_url: str
) -> Iterator[ServerClient]:
    model = MODEL_NAME if arguments.base_url is None else arguments.model
    client = ServerClient(base_url, model=model, api_key=arguments.api_key)
    runner.run(client.__aenter__())
    try:
        runner.run(client.connect())
        yield client
    finally:
        runner.run(client.__aexit__())


def _chat(
    arguments: argparse.Namespace, client: ServerClient, root: Path, screen: Screen, runner: asyncio.Runner
) -> Chat:
    temperature = arguments.temperature
    max_tokens = arguments.max_tokens
    if temperature is None and arguments.base_url is None:
        temperature = 0.0
    if max_tokens is None and arguments.base_url is None and arguments.model is None:
        max_tokens = MAX_REPLY_TOKENS
    opening = () if arguments.system is None else ({"role": "system", "content": arguments.system},)
    agent = Agent(
        model=HttpModel(client, Sampling(temperature=temperature, max_tokens=max_tokens)),
        tools=Toolbox(root),
        max_turns=arguments.max_turns,
        watch=lambda event: _show(screen, event),
        messages=list(opening),
    )
    return Chat(agent, screen, runner, opening)


def _greet(screen: Screen, arguments: argparse.Namespace) -> None:
    with suppress(ImportError):  # not on every platform; adds line editing and history
        import readline  # noqa: F401
    if arguments.folder is None:
        screen.note("\n".join(["Try asking:", *(f"  {question}" for question in QUESTIONS)]))
    screen.note("/help lists the commands.")
