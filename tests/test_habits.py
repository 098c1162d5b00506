"""The usual files of a repository: hooks, a workflow and forms that name existing things."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
FORMS = [ROOT / ".github" / "ISSUE_TEMPLATE" / f"{name}.yml" for name in ("fault", "wish")]


def read(path: str | Path) -> Any:
    return yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))


def test_hooks_run_the_tools_of_the_makefile() -> None:
    """Each hook names a pinned tool, and existing tests."""
    pinned = {line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()}
    (hooks,) = (repo["hooks"] for repo in read(".pre-commit-config.yaml")["repos"])
    for hook in hooks:
        tool, *words = hook["entry"].removeprefix(".venv/bin/").split()
        assert (words[1] if tool == "python" else tool) in pinned
        assert all((ROOT / word).exists() for word in words if word.endswith(".py"))


def test_the_workflow_runs_what_developers_run() -> None:
    """The workflow runs ``make check`` on Pythons that the package supports."""
    workflow = read(".github/workflows/check.yml")["jobs"]["check"]
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    runs = [step["run"] for step in workflow["steps"] if "run" in step]
    assert runs == ["make check"]
    assert {run.removeprefix("make ") for run in runs} <= targets
    accepted = (ROOT / "pyproject.toml").read_text()
    for version in workflow["strategy"]["matrix"]["python"]:
        assert f"Python :: {version}" in accepted


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.stem)
def test_forms_ask_for_what_commands_print(form: Path) -> None:
    """Each form has a name, unique field ids, and names existing commands."""
    fields = read(form)
    assert fields["name"]
    assert fields["description"]
    ids = [field["id"] for field in fields["body"]]
    assert len(ids) == len(set(ids))
    for command in re.findall(r"`continuum ([a-z-]+)", form.read_text()):
        assert f'"{command}"' in (ROOT / "continuum/cli/main.py").read_text()


def test_editors_and_tools_agree_on_line_lengths() -> None:
    said = (ROOT / ".editorconfig").read_text()
    (columns,) = re.findall(r"^line-length = (\d+)", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert f"[*.py]\nmax_line_length = {columns}" in said
