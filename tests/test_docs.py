"""Pages for users are true: links lead somewhere, flags exist, and the reference is made from the flags."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from continuum.engine_args import add_serve_arguments
from continuum.flag_reference import reference

ROOT = Path(__file__).parents[1]
PAGES = ("quickstart", "clients", "deployment", "troubleshooting")
OTHER_COMMANDS = {"--gpu", "--kv-tokens", "--workload", "--index-url"}
"""Flags on these pages that belong to simulate and to pip."""
LINK = re.compile(r"\]\((?!https?://|#)([^)\s#]+)")


def texts() -> list[Path]:
    return [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]


def test_the_reference_of_flags_is_as_they_are() -> None:
    """Else run ``python -m continuum.flag_reference > docs/configuration.md``."""
    assert (ROOT / "docs" / "configuration.md").read_text() == reference()


@pytest.mark.parametrize("path", texts(), ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files(path: Path) -> None:
    """From where the page lies."""
    for target in LINK.findall(path.read_text()):
        assert (path.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES)
def test_a_page_names_flags_that_there_are(page: str) -> None:
    """And its prose fits a screen's width."""
    parser = argparse.ArgumentParser(add_help=False)
    add_serve_arguments(parser)
    known = {name for action in parser._actions for name in action.option_strings} | OTHER_COMMANDS
    text = (ROOT / "docs" / f"{page}.md").read_text()
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)) - known == set()
    prose = [line for line in text.splitlines() if not line.startswith("|")]
    assert max(map(len, prose)) <= 120
