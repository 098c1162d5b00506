"""The formatter of ``--help`` for all commands, and the short and the full help of ``serve``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

from continuum.cli.flag_group import in_units
from continuum.cli.serve_flags import EXPERIMENTAL, SHORT_HELP

ALL = "all"
EPILOG = """\
These are the flags that most servers need. --help=all lists every flag; --help=WORD those with
WORD in the section or the name, such as --help=offloading."""
EPILOG_OF_ALL = "Flags marked [experimental] are for experiments and tuning, and may change in any release."

Shown = Callable[[str | None, argparse.Action], bool]
"""Decides whether the help shows a flag; the first argument is the title of its section."""


class HelpFormatter(argparse.HelpFormatter):
    """Shows defaults, and keeps the line breaks of multi-line texts."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=26)

    def add_argument(self, action: argparse.Action) -> None:
        super().add_argument(action)
        if isinstance(action, argparse._SubParsersAction):  # indents its names by one more step
            self._action_max_length += self._indent_increment

    def _get_help_string(self, action: argparse.Action) -> str:
        return help_of(action)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n" not in text.strip():
            return super()._fill_text(text, width, indent)
        return "\n".join(indent + line for line in text.rstrip().splitlines())


class ServeHelpFormatter(HelpFormatter):
    """Marks the flags that are experimental."""

    def _get_help_string(self, action: argparse.Action) -> str:
        mark = " [experimental]" if action.dest in EXPERIMENTAL else ""
        return super()._get_help_string(action) + mark


class ServeHelp(argparse.Action):
    """``--help``, ``--help=all`` and ``--help=WORD``."""

    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs="?", default=argparse.SUPPRESS, **options)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        parser._print_message(serve_help(parser, values), sys.stdout)
        parser.exit()


def serve_help(parser: argparse.ArgumentParser, word: str | None = None) -> str:
    """Returns the short help; for ``all`` every flag; for another word the flags that match it, if any."""
    if word == ALL:
        return _help(parser, lambda *_: True, EPILOG_OF_ALL)
    wanted = "" if word is None else word.lower().lstrip("-").replace("_", "-")

    def is_found(title: str | None, action: argparse.Action) -> bool:
        return any(wanted in name.lower() for name in (title or "", *action.option_strings))

    if wanted and any(is_found(group.title, action) for group, action in _flags(parser)):
        return _help(parser, is_found, EPILOG)
    return _help(parser, lambda _, action: action.dest in (*SHORT_HELP, argparse.SUPPRESS), EPILOG)


def _flags(parser: argparse.ArgumentParser) -> list[tuple[argparse._ArgumentGroup, argparse.Action]]:
    return [(group, action) for group in parser._action_groups for action in group._group_actions]


def _help(parser: argparse.ArgumentParser, shown: Shown, epilog: str) -> str:
    formatter = parser._get_formatter()
    formatter.add_usage(parser.usage, parser._actions, parser._mutually_exclusive_groups)
    formatter.add_text(parser.description)
    for group in parser._action_groups:
        actions = [action for action in group._group_actions if shown(group.title, action)]
        if actions:
            formatter.start_section(group.title)
            formatter.add_text(group.description)
            formatter.add_arguments(actions)
            formatter.end_section()
    formatter.add_text(epilog)
    return formatter.format_help()


def help_of(action: argparse.Action) -> str:
    """Returns a flag's text with its default, unless it has none or the text already names it."""
    text = action.help or ""
    default = shown_default(action)
    return text if default is None or "(default:" in text else f"{text} (default: {default})"


def shown_default(action: argparse.Action) -> str | None:
    """Returns a default as a user would type it; None if there is none to show."""
    match action.default:
        case None | argparse.SUPPRESS:
            return None
        case bool() as on if isinstance(action, argparse.BooleanOptionalAction):
            return "on" if on else "off"
        case bool():
            return None
        case int() as size if action.metavar == "BYTES":
            return in_units(size)
        case list() | tuple() as words:
            return " ".join(map(str, words)) or None
        case float() as value:
            return f"{value:g}"
        case dict():
            return None
        case default:
            return str(default).replace("%", "%%")
