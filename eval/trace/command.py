"""``continuum trace COMMAND``: finds the module of a sub-command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from eval.errors import TraceFileError
from tracing.plain_text import PlainStream, plain_name
from tracing.reader import TraceError


@dataclass(frozen=True, slots=True)
class SubCommand:
    """``module`` has ``add_arguments(parser)`` and ``run(arguments)``, which returns the exit code."""

    name: str
    told: str
    module: str


SUB_COMMANDS: tuple[SubCommand, ...] = (
    SubCommand(
        "summary",
        "Summarize the trace: completeness, throughput, jobs",
        "eval.trace.analysis.commands.summary",
    ),
    SubCommand("jobs", "List the jobs with a breakdown of their time", "eval.trace.analysis.commands.jobs"),
    SubCommand("explain", "Explain one job: where each second went", "eval.trace.analysis.commands.explain"),
    SubCommand(
        "pins", "Evaluate the pins: KV retained and tokens saved", "eval.trace.analysis.commands.pins"
    ),
    SubCommand("diff", "Compare two traces of the same jobs", "eval.trace.analysis.commands.diff"),
    SubCommand("export", "Export to the formats of other tools", "eval.trace.analysis.commands.export"),
    SubCommand("report", "Write an HTML report", "eval.trace.page.command"),
    SubCommand("validate", "Check the trace against the rules of docs/trace.md", "tracing.validate"),
    SubCommand("schema", "Print the JSON Schema of the trace's lines", "tracing.schema"),
    SubCommand("replay", "Replay all decisions, or simulate another policy", "eval.trace.replay.command"),
)


class SubParser(argparse.ArgumentParser):
    """Imports the module of its sub-command only when it is chosen, as some are heavy."""

    def __init__(self, *, module: str, **options: Any) -> None:
        super().__init__(**options)
        self._module: str | None = module

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self._module is not None:
            module = import_module(self._module)
            self._module = None
            module.add_arguments(self)
            self.set_defaults(run_trace=module.run)
        return super().parse_known_args(args, namespace)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the sub-commands, each with its flags."""
    commands = parser.add_subparsers(
        title="commands", metavar="COMMAND", required=True, parser_class=SubParser
    )
    for command in SUB_COMMANDS:
        commands.add_parser(
            command.name,
            module=command.module,
            help=command.told,
            description=f"{command.told}.",
            formatter_class=parser.formatter_class,
            allow_abbrev=False,
        )


def run(arguments: argparse.Namespace) -> int:
    """Runs the sub-command; an invalid file gives one sentence. Output has no control characters."""
    run_trace: Callable[[argparse.Namespace], int] = arguments.run_trace
    try:
        with redirect_stdout(PlainStream(sys.stdout)):
            return run_trace(arguments)
    except TraceError as error:
        raise TraceFileError(plain_name(str(error))) from error
