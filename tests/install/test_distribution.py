"""What a user gets: the source distribution, the wheel, the package's page, and an error when pip fails."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
NOT_SOURCE = (".git", ".venv", "out", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis")
BUILD = "import setuptools.build_meta as b; print(b.build_sdist('made')); print(b.build_wheel('made'))"
LINK = re.compile(r"\]\((?!https?://|#)([^)\s]+)\)")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("source") / "tree"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*NOT_SOURCE), symlinks=True)
    return copy


@pytest.fixture(scope="module")
def made(source: Path) -> Path:
    """A folder with both distributions."""
    subprocess.run([sys.executable, "-c", BUILD], cwd=source, check=True, capture_output=True)
    return source / "made"


@pytest.fixture(scope="module")
def sdist(made: Path) -> set[str]:
    """Names of files in the source distribution, relative to the repository's root."""
    with tarfile.open(next(made.glob("*.tar.gz"))) as archive:
        return {name.partition("/")[2] for name in archive.getnames()}


def test_the_source_distribution_holds_what_the_readme_names(sdist: set[str]) -> None:
    """The README's links and ``make`` commands work in an unpacked sdist, which has tests and benchmarks."""
    readme = (ROOT / "README.md").read_text()
    linked = {target.partition("#")[0].rstrip("/") for target in LINK.findall(readme)}
    beside = {
        str(path.relative_to(ROOT))
        for folder in ("benchmarks", "tests")
        for path in (ROOT / folder).rglob("*.py")
    }
    needed = linked | beside | {"Makefile", "constraints.txt", "setup.py", "LICENSE", ".ci/run"}
    assert needed - sdist == set()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:^|`)make ([a-z-]+)", readme, re.MULTILINE)) - targets == set()


def test_the_package_page_has_no_link_that_leads_nowhere(made: Path) -> None:
    """The package's page has no relative links: the README's links to files name the repository."""
    with zipfile.ZipFile(next(made.glob("*.whl"))) as wheel:
        metadata = next(name for name in wheel.namelist() if name.endswith("METADATA"))
        page = Parser().parsestr(wheel.read(metadata).decode()).get_payload()
    assert isinstance(page, str)
    assert page.startswith("# continuum-engine")
    assert LINK.findall(page) == []


def test_the_wheel_is_the_product_and_nothing_else(made: Path) -> None:
    """Weights, their card, kernels, templates and assets are in the wheel; benchmarks and tests are not."""
    with zipfile.ZipFile(next(made.glob("*.whl"))) as wheel:
        names = set(wheel.namelist())
    assert not [name for name in names if name.startswith(("benchmarks/", "examples/", "tests/"))]
    for package in ("engine", "continuum", "estimator", "tracing", "eval"):
        data = [
            path
            for path in (ROOT / package).rglob("*")
            if path.is_file() and path.suffix not in {".py", ".pyc"}
        ]
        assert {str(path.relative_to(ROOT)) for path in data} - names == set()


def test_nothing_names_a_file_outside_the_repository() -> None:
    """No text refers to a file outside the clone."""
    texts = [ROOT / "Makefile", *ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    for package in ("engine", "continuum", "estimator", "tracing", "eval", "benchmarks"):
        texts += (ROOT / package).rglob("*.py")
    for path in texts:
        for outside in re.findall(r"(?<![\w./])(?:\.\./)+[\w./-]+", path.read_text()):
            assert (path.parent / outside).resolve().is_relative_to(ROOT), f"{path}: {outside}"


def test_a_failed_installation_says_what_pip_said(source: Path, tmp_path: Path) -> None:
    """The output shows pip's reason before make's own line."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "MAKE"))}
    command = ["make", "demo", f"VENV={tmp_path / 'venv'}", f"PYTHON={sys.executable}", "PIP_ARGS=--no-index"]
    done = subprocess.run(command, check=False, cwd=source, env=env, capture_output=True, text=True)
    assert done.returncode == 2
    assert "pip could not install it" in done.stdout
    assert "No matching distribution found for setuptools" in done.stdout
    assert "2.7 GB" in done.stdout
