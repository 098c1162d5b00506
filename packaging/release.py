"""Makes a release: ``python packaging/release.py 0.2.0``. With ``--dry-run`` it only says what it would do.

It sets the version, moves the changelog's unreleased part under it, runs all checks, commits and tags, and
builds the sdist, the wheel and, where docker is installed, the image. It publishes nothing: the last lines
that it prints are the commands for that.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parents[1]
VERSION = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)")
UNRELEASED = "## [Unreleased]"
IN_PYPROJECT = re.compile(r'^version = "(?P<version>[^"]*)"$', re.MULTILINE)
BUILD = "import setuptools.build_meta as b; print(b.build_sdist('dist')); print(b.build_wheel('dist'))"


class ReleaseError(Exception):
    """Why there is no release, in a sentence."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a release."""

    what: str
    run: Callable[[], None]


def with_version(pyproject: str, version: str) -> str:
    """The text of ``pyproject.toml`` with this version."""
    return IN_PYPROJECT.sub(f'version = "{version}"', pyproject, count=1)


def with_release(changelog: str, version: str, day: str) -> str:
    """The changelog with its unreleased part under this version. ReleaseError if there is none."""
    before, heading, after = changelog.partition(f"{UNRELEASED}\n")
    unreleased = re.split(r"^## ", after, maxsplit=1, flags=re.MULTILINE)[0]
    if not heading or not re.search(r"^- ", unreleased, re.MULTILINE):
        raise ReleaseError(f"CHANGELOG.md has no entries under {UNRELEASED}.")
    return f"{before}{heading}\n## [{version}] - {day}\n{after}"


def check_version(version: str, current: str, tags: set[str]) -> None:
    """Raise ReleaseError unless this version may come after the current one."""
    new, old = VERSION.fullmatch(version), VERSION.fullmatch(current)
    if new is None or old is None:
        raise ReleaseError(f"the version must be three numbers, such as 0.2.0, got {version!r}.")
    if f"v{version}" in tags:
        raise ReleaseError(f"version {version} has been released: there is a tag v{version}.")
    if tuple(map(int, new.groups())) < tuple(map(int, old.groups())):
        raise ReleaseError(f"version {version} is below {current}, the version of pyproject.toml.")


def git(*words: str) -> str:
    """The output of a git command. ReleaseError if it fails."""
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ReleaseError(f"git {words[0]} failed: {done.stderr.strip()}")
    return done.stdout.strip()


def run(*words: str) -> None:
    """Run a command. ReleaseError if it fails."""
    if subprocess.run(words, cwd=ROOT, check=False).returncode:
        raise ReleaseError(f"{' '.join(words[:3])} failed; nothing was tagged.")


def steps_of(version: str, day: str) -> list[Step]:
    """The steps of a release, in order. ReleaseError if it cannot be made."""
    pyproject, changelog = ROOT / "pyproject.toml", ROOT / "CHANGELOG.md"
    found = IN_PYPROJECT.search(pyproject.read_text())
    check_version(version, found["version"] if found else "", set(git("tag", "--list").split()))
    if git("status", "--porcelain"):
        raise ReleaseError("the working tree has changes: commit or remove them.")
    new_pyproject = with_version(pyproject.read_text(), version)
    new_changelog = with_release(changelog.read_text(), version, day)

    def write() -> None:
        pyproject.write_text(new_pyproject)
        changelog.write_text(new_changelog)

    def record() -> None:
        git("commit", "--all", "--message", f"Release {version}")
        git("tag", "--annotate", f"v{version}", "--message", f"Release {version}")

    def build() -> None:
        shutil.rmtree(ROOT / "dist", ignore_errors=True)
        run(sys.executable, "-c", BUILD)

    steps = [
        Step(f"set the version to {version} and date the changelog {day}", write),
        Step("run all checks: make check", lambda: run("make", "check")),
        Step(f"commit, and tag v{version}", record),
        Step("build the sdist and the wheel in dist/", build),
    ]
    if shutil.which("docker") is not None:
        image = f"continuum-engine:{version}"
        steps.append(Step(f"build the image {image}", lambda: run("docker", "build", "--tag", image, ".")))
    return steps


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0; 1 with a sentence if there is no release."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("version", help="such as 0.2.0")
    parser.add_argument("--date", default=date.today().isoformat(), help="its day (default: today)")
    parser.add_argument("--dry-run", action="store_true", help="say what would be done, and do nothing")
    options = parser.parse_args(arguments)
    try:
        for number, step in enumerate(steps_of(options.version, options.date), 1):
            print(f"{number}. {step.what}", flush=True)
            if not options.dry_run:
                step.run()
    except ReleaseError as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    print(f"To publish: git push origin main v{options.version}; twine upload dist/*")
    return 0


if __name__ == "__main__":
    sys.exit(main())
