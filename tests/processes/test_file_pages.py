"""Dropping file pages at the end of a process's start changes nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from engine.process.file_pages import drop_file_pages

PROGRAM = """
import ctypes, mmap, pathlib, re, sys
import numpy as np
from engine.process.file_pages import drop_file_pages

def of_files():
    told = pathlib.Path("/proc/self/smaps_rollup").read_text()
    sizes = dict(re.findall(r"^(Rss|Anonymous): +(\\d+)", told, re.MULTILINE))
    return int(sizes["Rss"]) - int(sizes["Anonymous"])

path = pathlib.Path(sys.argv[1])
with path.open("r+b") as file:
    read = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
    changed = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
assert sum(read[::4096]) > 0
changed[:7] = b"changed"
matrix = np.linspace(0, 1, 4096).reshape(64, 64)
product = matrix @ matrix
before = of_files()
drop_file_pages()
after = of_files()
assert (matrix @ matrix == product).all()
assert read[:] == path.read_bytes()
assert changed[:7] == b"changed"
print(before, after)
"""


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="the kernel does not tell")
def test_what_was_only_read_goes_and_comes_back(tmp_path: Path) -> None:
    """Most file pages leave the process; code still runs, files read as before, changed pages stay."""
    file = tmp_path / "file"
    file.write_bytes(bytes(range(1, 256)) * 2**15)
    told = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(file)], capture_output=True, text=True, check=False
    )
    assert told.returncode == 0, told.stderr
    before_kib, after_kib = map(int, told.stdout.split())
    assert before_kib > 8 * 2**10
    assert after_kib < before_kib / 2


def test_it_may_be_done_at_any_time() -> None:
    """Pages may be dropped repeatedly, without effect on the process."""
    drop_file_pages()
    drop_file_pages()
