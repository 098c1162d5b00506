"""The command line, and the composition root where all parts are connected.

Modules of ``eval``, a package above, are imported by name, for their commands only."""

from __future__ import annotations

import argparse
import difflib
import errno
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, NoReturn

from continuum.cli import interrupts  # first: after this import, Ctrl-C leaves no traceback

# isort: split
from continuum.cli.help_text import HelpFormatter, ServeHelp, ServeHelpFormatter
from continuum.cli.serve_args import continuum_config, engine_config, named_by_flag, server_config
from continuum.cli.serve_flags import add_serve_arguments
from continuum.config import ContinuumConfig
from engine.core.policy import PolicyFactory, fcfs, priority
from engine.errors import ConfigError, EngineError
from engine.frontend.options_of_v1 import why_not
from engine.version import package_version

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

interrupts.back_to_usual()

WRONG_USAGE = 2
"""Exit code for wrong options, as in argparse; other errors exit with 1."""
INTERRUPTED = 130
"""Exit code after Ctrl-C, by the convention of shells."""
UNREAD = 141
"""Exit code after SIGPIPE, by the convention of shells, as in ``| head``."""

DISK_FULL = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO))
"""Errors of a full disk. An error with a file name concerns that file, otherwise standard output."""


@dataclass(frozen=True, slots=True)
class Command:
    """A sub-command. Its module has ``add_arguments(parser)`` and ``run(args) -> exit code``."""

    name: str
    module: str
    summary: str


SERVE = "Serve a model over the OpenAI and Anthropic HTTP APIs"
COMMANDS = (
    Command("chat", "eval.agents.chat", "Chat in the terminal with a tool-calling agent"),
    Command("demo", "eval.demo.command", "Run agents under two scheduling policies, and compare them"),
    Command("route", "eval.route.command", "Route agent jobs to several running servers"),
    Command("bench", "eval.load.bench", "Benchmark a running server by replaying agent jobs"),
    Command("simulate", "eval.sim.command", "Compare scheduling policies on simulated GPUs"),
    Command("fit", "eval.fit.command", "Compute how many agents a GPU serves, and how"),
    Command("compare", "eval.report.compare", "Compare results of bench and simulate"),
    Command("workload", "eval.workloads.command", "Summarize a workload of agent jobs, or convert it"),
    Command("profile", "eval.profile.command", "Measure step times on this machine for simulate --profile"),
    Command("learn", "eval.learn.command", "Learn from traces or jobs what a server can start with"),
    Command(
        "reproduce",
        "eval.reproduction.command",
        "Simulate the Continuum paper's settings, and compare",
    ),
    Command("trace", "eval.trace.command", "Analyze a scheduler trace: jobs, pins, and what-if replays"),
    Command(
        "collect-env",
        "continuum.cli.collect_env",
        "Print what a bug report needs to know of this machine",
    ),
)


class _Parser(argparse.ArgumentParser):
    def _print_message(self, message: str, file: SupportsWrite[str] | None = None) -> None:
        """Like argparse, but raises if the help cannot be written."""
        if file is None or file is not sys.stdout:
            super()._print_message(message, file)
        else:
            file.write(message)


def main(argv: list[str] | None = None) -> int:
    """Runs a command line; returns its exit code. Start-up errors are one sentence on stderr."""
    arguments = sys.argv[1:] if argv is None else argv
    try:
        args = _parsed(arguments)
        _require_output(args)
        code = int(args.run(args))
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except EngineError as error:
        print(f"continuum: {error}", file=sys.stderr)
        return WRONG_USAGE if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _print_no_more()
        return UNREAD
    except OSError as error:
        if error.filename is not None or error.errno not in DISK_FULL:
            raise
        _print_no_more()
        print(f"continuum: Cannot write the output: {error.strerror}.", file=sys.stderr)
        return 1


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """Parses the command line. SystemExit after ``--help`` and for wrong options, ConfigError for V1's."""
    arguments = [_with_dashes(word) for word in arguments]
    parser = _parser(arguments)
    try:
        args, unknown = parser.parse_known_args(arguments, argparse.Namespace(given=arguments))
        for word in unknown:
            if reason := why_not(word):
                raise ConfigError(reason)
        if unknown:
            _refuse(parser, arguments, unknown)
    except SystemExit:
        if sys.stdout is not None:
            sys.stdout.flush()
        raise
    return args


def _refuse(parser: argparse.ArgumentParser, arguments: Sequence[str], unknown: Sequence[str]) -> NoReturn:
    """Ends the program with the usage of the given command, and suggests the flag that may be meant."""
    (commands,) = (each for each in parser._actions if isinstance(each, argparse._SubParsersAction))
    chosen = next((word for word in arguments if word in commands.choices), None)
    of_command: argparse.ArgumentParser = parser if chosen is None else commands.choices[chosen]
    message = f"unrecognized arguments: {' '.join(unknown)}"
    flags = [flag for each in of_command._actions for flag in each.option_strings]
    near = difflib.get_close_matches(unknown[0].partition("=")[0], flags, n=1)
    of_command.error(f"{message}; did you mean {near[0]}?" if near else message)


def _with_dashes(word: str) -> str:
    """Returns ``--a-b`` for ``--a_b``, which V1 accepts too."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if re.fullmatch(r"--\w[\w-]*", name) else word


def _require_output(args: argparse.Namespace) -> None:
    """Raises EngineError if standard output is closed, except for a server, which does not need it."""
    if sys.stdout is None and args.run is not _serve:
        raise EngineError("Cannot write the output: standard output is closed.")


def _print_no_more() -> None:
    """Redirects standard output to the null device, so that the flush at exit does not fail."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    parser = _Parser(
        prog="continuum",
        description="An LLM server for agents: it keeps a job's KV cache across the job's tool calls.",
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {package_version()}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    serve = _add_command(commands, "serve", SERVE, add_help=False)
    serve.formatter_class = ServeHelpFormatter
    serve.usage = "continuum serve [MODEL] [--flag VALUE ...]"
    serve.add_argument("-h", "--help", action=ServeHelp, metavar="all", help="Show this help, or every flag")
    add_serve_arguments(serve)
    serve.set_defaults(run=_serve)
    chosen = next((word for word in arguments if not word.startswith("-")), None)
    for command in COMMANDS:
        added = _add_command(commands, command.name, command.summary)
        if command.name == chosen:  # do not import modules of other commands
            module = import_module(command.module)
            module.add_arguments(added)
            added.set_defaults(run=module.run)
    return parser


def _add_command(
    commands: argparse._SubParsersAction[_Parser], name: str, summary: str, add_help: bool = True
) -> _Parser:
    return commands.add_parser(
        name,
        help=summary,
        description=f"{summary}.",
        formatter_class=HelpFormatter,
        allow_abbrev=False,
        add_help=add_help,
    )


def _serve(args: argparse.Namespace) -> int:
    bundled = args.model is None
    if bundled:
        _take_bundled_model(args)
    try:
        config = engine_config(args)
        policy = _policy_factory(args.scheduling_policy, continuum_config(args))
        server = server_config(args)
        if bundled:
            name = server.served_model_names[0]
            print(f"No MODEL given; serving the bundled demo model as {name!r}.", flush=True)

        from continuum.routing.catalog import router_factory
        from engine.api.processes.server import serve
        from engine.core_process.core_start import CoreSpec
        from engine.model_executor import model_executor

        spec = CoreSpec(config, model_executor, policy, router_factory(args.router))
        if config.parallel.headless:
            from engine.core_group.headless import run_headless

            return run_headless(spec)
        return serve(server, spec)
    except ConfigError as error:
        raise named_by_flag(error, args) from error


def _take_bundled_model(args: argparse.Namespace) -> None:
    bundled = import_module("eval.agent_model")
    args.model = str(bundled.folder())
    args.served_model_name = args.served_model_name or [bundled.NAME]


def _policy_factory(name: str, config: ContinuumConfig) -> PolicyFactory:
    if name == "continuum":
        from continuum.policy import ContinuumPolicyFactory

        return ContinuumPolicyFactory(config)
    if name in ("fcfs", "priority"):
        return priority if name == "priority" else fcfs

    try:
        policy: PolicyFactory = import_module("eval.baselines.catalog").serving_policy(name)
    except ConfigError as error:
        raise ConfigError(f"argument --scheduling-policy: {error}") from error
    return policy


if __name__ == "__main__":
    sys.exit(main())
