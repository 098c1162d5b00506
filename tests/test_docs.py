"""Pages for users are true: links resolve, flags exist, tables equal those of the code.

These tests start no server; ``test_examples.py`` runs the commands of the pages.
"""

from __future__ import annotations

import ast
import contextlib
import io
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from continuum.cli import flag_reference, metric_reference
from continuum.cli.main import main
from engine.config.engine_config import DTYPES, KV_CACHE_DTYPES, QUANTIZATIONS
from engine.tool_parsers.catalog import (
    REASONING_PARSERS,
    THINK_TAGS,
    TOOL_CALL_PARSERS,
    TOOL_FORMATS,
)
from engine.tool_parsers.messages.formats import MESSAGE_FORMATS
from engine.worker.models.families.table import NATIVE_MODEL_TYPES

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
COLUMNS = 100
COMMANDS = (
    *(
        ("serve",),
        ("bench",),
        ("simulate",),
        ("reproduce",),
        ("profile",),
        ("workload",),
        ("compare",),
        ("route",),
    ),
    *(
        ("chat",),
        ("fit",),
        ("demo",),
        ("trace", "export"),
        ("trace", "report"),
        ("trace", "replay"),
        ("trace", "schema"),
    ),
)
NOT_OURS = {
    *("--index-url", "--extra-index-url", "--build-arg"),  # pip, docker
    *(
        "--init",
        "--env-file",
        "--stop-timeout",
        "--gpus",
        "--cpuset-cpus",
        "--cpus",
        "--health-cmd",
    ),  # docker
    "--config.file",  # prometheus
    *("--head", "--address"),  # ray
    "--budget-s",  # make gpu-check
    *(
        "--backend",
        "--dataset-name",
        "--endpoint",
        "--ignore-eos",
        "--logprobs",
        "--num-prompts",
        "--profile",
    ),
    *("--random-input-len", "--random-output-len"),  # of vllm bench serve
    *("--policy", "--kv-event-model", "--kv-event-source", "--worker-urls"),  # of vLLM's router
}
"""Flags on the pages that belong to other programs."""
IN_THE_WHEEL = ("engine", "continuum", "estimator", "tracing", "eval")
STILL = ("glossary.md",)
"""The page that lists the words to avoid."""
LINK = re.compile(r"\]\((?!https?://|mailto:)([^)]+)\)")
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def texts() -> list[Path]:
    return [*ROOT.glob("*.md"), *DOCS.rglob("*.md"), ROOT / "eval" / "agent_model" / "MODEL_CARD.md"]


def pages() -> list[Path]:
    """The pages for users, without lab notes."""
    return [ROOT / "README.md", *DOCS.glob("*.md")]


def spoken() -> list[Path]:
    """Current texts; lab notes and decision records keep the words of their time."""
    return [path for path in texts() if path.parent != DOCS / "lab"]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_the_reference_of_flags_is_as_they_are() -> None:
    """Update the page: ``python -m continuum.cli.flag_reference > docs/configuration.md``."""
    assert (DOCS / "configuration.md").read_text() == flag_reference.reference()


def test_the_page_of_metrics_is_made_from_the_table() -> None:
    """Update the page: ``python -m continuum.cli.metric_reference > docs/metrics.md``."""
    assert (DOCS / "metrics.md").read_text() == metric_reference.reference()


def anchors(path: Path) -> set[str]:
    """Anchors of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", path.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", texts(), ids=name)
def test_links_lead_somewhere(path: Path) -> None:
    """Each link leads to a file, relative to its page, and to a heading of that file."""
    for link in LINK.findall(FENCED.sub("", path.read_text())):
        target, _, anchor = link.partition("#")
        file = path.parent / target if target else path
        assert file.exists(), link
        assert not anchor or anchor in anchors(file), link


def test_every_page_can_be_reached() -> None:
    """Another page links to each page."""
    linked = {
        (path.parent / link.partition("#")[0]).resolve()
        for path in texts()
        for link in LINK.findall(path.read_text())
    }
    assert [name(page) for page in pages()[1:] if page not in linked] == []


@cache
def flags(*command: str) -> frozenset[str]:
    """All flags in a command's help."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.raises(SystemExit):
        main([*command, "--help=all" if command == ("serve",) else "--help"])
    return frozenset(re.findall(r"(?<![\w-])--[a-z][a-z-]+", out.getvalue()))


@pytest.mark.parametrize("path", pages(), ids=name)
def test_a_page_names_flags_that_there_are(path: Path) -> None:
    """Each flag on a page belongs to one of the commands."""
    known = NOT_OURS.union(*(flags(*command) for command in COMMANDS), {"--help", "--no-name"})
    found = set(re.findall(r"(?<![\w-])--[a-z][a-z.-]*[a-z]", path.read_text()))
    assert found - known == set()


@pytest.mark.parametrize("path", spoken(), ids=name)
def test_a_text_names_targets_that_make_has(path: Path) -> None:
    """Each ``make`` target in a command block or between backquotes exists."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = path.read_text()
    code = "".join(FENCED.findall(text)) + "".join(re.findall(r"^    .*\n", text, re.MULTILINE))
    named = re.findall(r"^ *make ([a-z-]+)", code, re.MULTILINE) + re.findall(r"`make ([a-z-]+)", text)
    assert set(named) - targets == set()


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines, without code, tables, and words that cannot be divided."""
    fenced = False
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced and not re.match(r"\s*\||    |<|!\[", line) and " " in line.strip():
            yield number, line


@pytest.mark.parametrize("path", texts(), ids=name)
def test_prose_fits_a_screen(path: Path) -> None:
    """Prose has at most 100 columns."""
    long = [f"{name(path)}:{number}" for number, line in prose(path) if len(line) > COLUMNS]
    assert long == []


@pytest.mark.parametrize("path", texts(), ids=name)
def test_a_text_names_no_machine(path: Path) -> None:
    """No text names a folder of the author's machine."""
    assert re.findall(r"(?<![\w.])/(?:work|root|home|mnt)/[\w/]*", path.read_text()) == []


@pytest.mark.parametrize("path", [path for path in texts() if path.parent != DOCS / "lab"], ids=name)
def test_a_text_names_files_that_there_are(path: Path) -> None:
    """Paths between backquotes exist, relative to the repository's root."""
    rooms = "benchmarks|continuum|docs|engine|estimator|eval|examples|tests|tracing"
    named = re.findall(rf"`((?:{rooms})/[\w./-]+)`", path.read_text())
    assert [each for each in named if not (ROOT / each).exists()] == []


def test_where_to_look_names_files_that_there_are() -> None:
    """A bare name is in the folder of the previous name, or in one of that folder's subfolders."""
    for line in (DOCS / "where-to-look.md").read_text().splitlines():
        folder = ROOT
        for named in re.findall(r"`([\w./-]+)`", line):
            path = (
                ROOT / named if "/" in named and (ROOT / named.partition("/")[0]).is_dir() else folder / named
            )
            assert path.exists(), f"{named}: {line[:60]}"
            folder = path if path.is_dir() else path.parent


def test_each_task_begins_at_a_name_that_is_there() -> None:
    """Each of eight tasks has a line with an existing file and a symbol in it."""
    table = (DOCS / "where-to-look.md").read_text().partition("| question |")[0]
    tasks = [line for line in table.splitlines() if line.startswith("| ") and "begin at" not in line]
    assert len(tasks) == 8
    for task in tasks:
        named = re.findall(r"`([\w/]+\.py):(\w+)`", task)
        assert named, task
        for path, symbol in named:
            defined = rf"^(?:class |(?:async )?def |){symbol}\b(?:\(|:| =|: )"
            assert re.search(defined, (ROOT / path).read_text(), re.MULTILINE), f"{path}:{symbol}"


def words_to_avoid() -> list[str]:
    """The left column of the glossary's last table."""
    return [word.strip() for row in rows(DOCS / "glossary.md", "Not these") for word in row[0].split(",")]


@pytest.mark.parametrize("path", [page for page in spoken() if page.name not in STILL], ids=name)
def test_a_page_speaks_the_fields_words(path: Path) -> None:
    """A page uses no word that the glossary excludes, except in code and in names of files."""
    text = re.sub(r"\]\([^)]*\)|`[^`]*`", "", FENCED.sub("", path.read_text()))
    avoided = "|".join(re.escape(word).replace(r"\ ", r"[\s-]+") for word in words_to_avoid())
    assert re.findall(rf"\b(?:{avoided})s?\b", text, re.IGNORECASE) == []


def rows(page: Path, heading: str) -> list[list[str]]:
    """The cells of each row of the first table under a heading."""
    text = page.read_text()
    start = text.index(f"\n## {heading}\n")
    table = re.search(r"(?:^\|.*\n)+", text[start:], re.MULTILINE)
    assert table is not None
    return [line.strip("|\n").split("|") for line in table[0].splitlines()[2:]]


def names_in(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_the_tables_of_models_are_those_of_the_code() -> None:
    """Architectures, formats of calls and of reasoning, and types are those of the code."""
    page = DOCS / "models.md"
    native = [name for row in rows(page, "Architectures") for name in names_in(row[0])]
    assert sorted(native) == sorted(NATIVE_MODEL_TYPES)
    calls, reasoning = rows(page, "Tool-call formats"), rows(page, "Reasoning formats")
    assert {names_in(row[0])[0] for row in calls} == set(TOOL_FORMATS)
    for row in calls:
        forced = TOOL_FORMATS[names_in(row[0])[0]].syntax is not None
        assert row[3].strip() == ("in its own syntax" if forced else "as JSON"), row
    for table, parsers in ((calls, TOOL_CALL_PARSERS), (reasoning, REASONING_PARSERS)):
        listed = [each for row in table for cell in row[:2] for each in names_in(cell)]
        assert sorted([*listed, "auto", "none"]) == sorted(parsers)
    assert {names_in(row[0])[0] for row in reasoning} == {*THINK_TAGS, *MESSAGE_FORMATS}
    values = {names_in(row[0])[0]: row[1] for row in rows(page, "Types and quantization")}
    for flag, choices in (
        ("--dtype", DTYPES),
        ("--quantization", QUANTIZATIONS),
        ("--kv-cache-dtype", KV_CACHE_DTYPES),
    ):
        assert [each for each in names_in(values[flag]) if not each.startswith("-")] == list(choices)


@pytest.mark.parametrize("path", sorted((DOCS / "design").glob("[a-z]*.md")), ids=name)
def test_a_design_page_is_short(path: Path) -> None:
    """A design page has at most 900 words and ends with "Held by"."""
    text = path.read_text()
    assert len(text.split()) <= 900
    assert re.findall(r"^## (.*)$", text, re.MULTILINE)[-1] == "Held by"


def test_the_readme_is_one_screen() -> None:
    """The README has 30 to 60 lines and ends with "Docs"."""
    readme = (ROOT / "README.md").read_text()
    assert 30 <= len(readme.splitlines()) <= 60
    assert re.findall(r"^## (.*)$", readme, re.MULTILINE)[-1] == "Docs"


def test_the_image_is_built_of_what_there_is() -> None:
    """The Dockerfile copies existing, unignored files and all packages, and runs our command."""
    text = re.sub(r"\\\n", "", (ROOT / "Dockerfile").read_text())
    sources = [word for line in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE) for word in line.split()]
    assert [source for source in sources if not (ROOT / source).exists()] == []
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = {each.rstrip("*") for each in project["tool"]["setuptools"]["packages"]["find"]["include"]}
    assert packages <= set(sources)
    assert set(project["project"]["license-files"]) <= set(sources)
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert set(sources) == kept
    assert 'ENTRYPOINT ["continuum", "serve"]' in text
    assert "continuum" in project["project"]["scripts"]
    assert set(re.findall(r'"(--[a-z-]+)"', text)) <= flags("serve")
    named = re.findall(r"EXTRAS=\[([\w,]+)\]", text)
    assert {extra for names in named for extra in names.split(",")} == {"audio", "gpu", "pictures"}
    assert {"gpu", "pictures"} <= project["project"]["optional-dependencies"].keys()


def attribute_docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Yields line and text of each string that follows an assignment."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            continue
        for above, below in pairwise(node.body):
            if isinstance(above, ast.Assign | ast.AnnAssign) and isinstance(below, ast.Expr):
                value = below.value
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    yield below.lineno, value.value.strip()


def reads_on_its_own(docstring: str) -> bool:
    """Whether it is a sentence or a noun phrase, and does not need the identifier before it."""
    begins = re.match(r"[A-Z0-9`\[]", docstring) and not re.match(r"(?:Of|By) ", docstring)
    return bool(begins) and docstring.endswith((".", "]", ")", ":"))


@pytest.mark.parametrize("package", IN_THE_WHEEL)
def test_an_attributes_docstring_reads_on_its_own(package: str) -> None:
    """In the wheel's packages they begin with a capital, a shape, a number or code, and end properly."""
    for path in (ROOT / package).rglob("*.py"):
        for line, docstring in attribute_docstrings(path.read_text(encoding="utf-8")):
            assert reads_on_its_own(docstring), f"{name(path)}:{line}: {docstring}"


def test_half_a_sentence_is_told_from_a_whole_one() -> None:
    source = 'A = 1\n"""Of a turn."""\nB = 2\n"""[n] places"""\nC = 3\n"""Tokens of a turn."""\n'
    found = {line: reads_on_its_own(docstring) for line, docstring in attribute_docstrings(source)}
    assert found == {2: False, 4: False, 6: True}
