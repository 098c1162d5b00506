"""A policy is named by its module and attribute; a wrong name is refused with a sentence."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from engine.core.policy import FcfsPolicy, PolicyContext, PriorityPolicy
from engine.errors import ConfigError
from engine.policy_loader import load_policy


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory that is not yet on the path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def test_the_engines_own_policies_have_names() -> None:
    """Built-in policies have the names of the server's flag."""
    context = PolicyContext(16, 100)
    assert type(load_policy("fcfs")(context)) is FcfsPolicy
    assert type(load_policy("priority")(context)) is PriorityPolicy


def test_a_policy_of_a_module_beside_the_user_is_found(here: Path) -> None:
    """A policy may be a class that takes a context, or a function that makes a policy from one."""
    (here / "own_policies.py").write_text(
        "from engine.core.policy import FcfsPolicy\n"
        "class Own(FcfsPolicy):\n"
        "    name = 'own'\n"
        "def own(context):\n"
        "    return Own(context)\n"
    )
    for attribute in ("Own", "own"):
        assert load_policy(f"own_policies:{attribute}")(PolicyContext(16, 100)).describe().name == "own"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("lru", "Unknown policy 'lru'; choose from fcfs, priority, MODULE:ATTRIBUTE"),
        ("os:", "Unknown policy 'os:'"),
        ("no_such_module:Policy", "'no_such_module:Policy' cannot be imported: No module named"),
        ("os:NoSuchPolicy", "module os has no class or function NoSuchPolicy"),
    ],
)
def test_a_name_that_leads_nowhere_is_refused(name: str, told: str, here: Path) -> None:
    """The sentence says what was not found."""
    with pytest.raises(ConfigError, match=told):
        load_policy(name)
