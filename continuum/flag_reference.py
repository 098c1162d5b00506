"""docs/configuration.md: every flag of ``continuum serve``, made from the flags themselves.

python -m continuum.flag_reference > docs/configuration.md
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from continuum.engine_args import add_serve_arguments

INTRODUCTION = """\
# Configuration

All flags of `continuum serve MODEL`, in the groups of `--help`. vLLM's name and default are kept
where it has the flag. A switch `--name` is turned off by `--no-name`. `LLM(MODEL, name=value)`
takes the fields of the model, KV cache and scheduler groups by the same names, with `_` for `-`.

Made from the flags by `python -m continuum.flag_reference`; a test holds it to them."""


def reference() -> str:
    """The page, in Markdown."""
    parser = argparse.ArgumentParser(prog="continuum serve", add_help=False)
    add_serve_arguments(parser)
    return "\n".join([INTRODUCTION, *_groups(parser)]) + "\n"


def _groups(parser: argparse.ArgumentParser) -> Iterator[str]:
    for group in parser._action_groups:
        actions = [action for action in group._group_actions if action.help != argparse.SUPPRESS]
        if group.title is None or not actions:
            continue
        yield f"\n## {group.title[:1].upper()}{group.title[1:]}\n"
        yield "| flag | default | what it does |"
        yield "|---|---|---|"
        yield from (_row(action) for action in actions)


def _row(action: argparse.Action) -> str:
    names = [name for name in action.option_strings if not name.startswith("--no-")]
    if action.nargs != 0:
        values = action.metavar or "{" + ",".join(action.choices or ()) + "}"
        names[-1:] = [f"{names[-1]} {values}"] if names else [str(values)]
    flags = ", ".join(f"`{name}`" for name in names)
    text = (action.help or "").replace("|", "\\|").replace("%%", "%")
    return f"| {flags} | {_default(action)} | {text} |"


def _default(action: argparse.Action) -> str:
    match action.default:
        case None | argparse.SUPPRESS:
            return ""
        case bool() as on:
            return "on" if on else "off"
        case default:
            return f"`{default}`"


if __name__ == "__main__":
    print(reference(), end="")
