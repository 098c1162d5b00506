"""Import paths of earlier versions lead to the modules that took their place."""

from __future__ import annotations

import subprocess
import sys

import pytest

from engine.moved_modules import MOVED

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("old", MOVED)
def test_an_old_path_is_another_name_of_the_new_one(old: str) -> None:
    """It is the same module, so that a class is the same under both, and a warning says where it is now."""
    new = MOVED[old]
    program = f"import sys, {old}, {new}; assert sys.modules[{old!r}] is sys.modules[{new!r}]"
    done = subprocess.run(
        [sys.executable, "-W", "default", "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert old != new
    assert f"{old} has moved to {new}" in done.stderr
