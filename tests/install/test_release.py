"""The release script: what it changes, what it rejects, and that a dry run changes nothing."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "packaging" / "release.py"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with the files that a release reads."""
    folder = tmp_path / "tree"
    (folder / "packaging").mkdir(parents=True)
    for name in (".gitignore", "pyproject.toml", "CHANGELOG.md", "packaging/release.py"):
        shutil.copyfile(ROOT / name, folder / name)
    for words in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message", "First"]):
        git(folder, *words)
    return folder


def git(folder: Path, *words: str) -> str:
    who = ("-c", "user.name=tests", "-c", "user.email=tests@localhost")
    done = subprocess.run(["git", *who, *words], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout


def release(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(folder / "packaging" / "release.py"), *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_a_dry_run_names_the_steps_and_changes_nothing(repository: Path) -> None:
    done = release(repository, "0.1.0", "--date", "2027-01-02", "--dry-run")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "1. set the version to 0.1.0 and date the changelog 2027-01-02"
    assert [line for line in lines if "make check" in line]
    assert "tag v0.1.0" in done.stdout
    assert lines[-1].startswith("To publish: ")
    assert git(repository, "status", "--porcelain") == ""
    assert git(repository, "tag") == ""


@pytest.mark.parametrize(
    ("version", "why"),
    [
        ("0.1", "the version must be three numbers"),
        ("v0.2.0", "the version must be three numbers"),
        ("0.0.9", "version 0.0.9 is below 0.1.0"),
    ],
)
def test_a_wrong_version_is_rejected(repository: Path, version: str, why: str) -> None:
    done = release(repository, version, "--dry-run")
    assert done.returncode == 1
    assert done.stderr.startswith(f"release: {why}")


def test_a_version_is_released_once_and_from_a_clean_tree(repository: Path) -> None:
    (repository / "CHANGELOG.md").write_text("# Changelog\n\n## [Unreleased]\n\n### Added\n")
    assert "the working tree has changes" in release(repository, "0.2.0", "--dry-run").stderr
    git(repository, "commit", "--quiet", "--all", "--message", "Empty")
    assert "no entries under ## [Unreleased]" in release(repository, "0.2.0", "--dry-run").stderr
    git(repository, "tag", "v0.2.0")
    assert "there is a tag v0.2.0" in release(repository, "0.2.0", "--dry-run").stderr


def test_the_files_get_the_version_and_the_day(repository: Path) -> None:
    """The steps that write, without the checks between them."""
    code = (
        "import sys; sys.path.insert(0, 'packaging'); import release\n"
        "steps = release.steps_of('0.2.0', '2027-01-02'); steps[0].run()"
    )
    subprocess.run([sys.executable, "-c", code], cwd=repository, check=True)
    assert 'version = "0.2.0"\n' in (repository / "pyproject.toml").read_text()
    before, _, after = (repository / "CHANGELOG.md").read_text().partition("## [0.2.0] - 2027-01-02\n")
    assert before.endswith("## [Unreleased]\n\n")
    assert after == (ROOT / "CHANGELOG.md").read_text().partition("## [Unreleased]\n")[2]
