"""What was learned survives a restart; a file that is not whole or not ours is refused in one sentence."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from estimator.durations import DurationEstimator
from estimator.state import (
    STATE_VERSION,
    EstimatorStateError,
    load_estimator,
    restore,
    save_estimator,
    snapshot,
    write_state,
)
from estimator.tool_key import ToolKey, tool_key

KEYS = [tool_key("bash", "pytest"), tool_key("bash", "ls"), ToolKey(("(answer)",)), ToolKey(())]


@given(
    seen=st.lists(st.tuples(st.sampled_from(KEYS), st.floats(0, 1e5), st.booleans()), max_size=20),
    later=st.lists(st.tuples(st.sampled_from(KEYS), st.floats(0, 1e5), st.booleans()), max_size=5),
)
def test_restart(seen: list[tuple[ToolKey, float, bool]], later: list[tuple[ToolKey, float, bool]]) -> None:
    """After a restart the estimator answers, and learns on, exactly as the one that went on running."""
    running = DurationEstimator(half_life=5.0, max_keys=8, num_bins=30)
    for observation in seen:
        running.observe(*observation)
    restarted = restore(snapshot(running))
    for observation in later:
        running.observe(*observation)
        restarted.observe(*observation)
    assert restarted.get_params() == running.get_params()
    for key in KEYS:
        ours, theirs = running.survival(key), restarted.survival(key)
        assert (ours.probabilities, ours.num_observations) == (theirs.probabilities, theirs.num_observations)
    assert snapshot(restarted) == snapshot(running)


def test_file(tmp_path: Path) -> None:
    """The file is read back as it was saved; none at all means a fresh start; nothing else is left behind."""
    path = tmp_path / "tools.json"
    assert load_estimator(path).survival(KEYS[0]).num_observations == 0
    estimator = DurationEstimator().fit(KEYS, [1.0, 2.0, 3.0, 4.0])
    save_estimator(estimator, path)
    save_estimator(estimator, path)
    assert snapshot(load_estimator(path)) == snapshot(estimator)
    assert [file.name for file in tmp_path.iterdir()] == ["tools.json"]


def test_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    """A write that fails raises, keeps what was there and leaves no debris."""
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    with pytest.raises(OSError, match="taken"):
        write_state(b"x", tmp_path / "taken")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
    with pytest.raises(FileNotFoundError):
        write_state(b"x", tmp_path / "missing" / "file")


@given(data=st.data())
def test_cut_file(data: st.DataObject) -> None:
    """A file cut at any byte is refused."""
    whole = snapshot(DurationEstimator().fit(KEYS, [1.0, 2.0, 3.0, 4.0]))
    with pytest.raises(EstimatorStateError):
        restore(whole[: data.draw(st.integers(0, len(whole) - 1))])


@given(data=st.data())
def test_damaged_file(data: st.DataObject) -> None:
    """A file with a byte changed is refused or read as some estimator that answers; nothing else happens."""
    damaged = bytearray(snapshot(DurationEstimator().fit(KEYS, [1.0, 2.0, 3.0, 4.0])))
    damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        estimator = restore(bytes(damaged))
    except EstimatorStateError:
        return
    for key in KEYS:
        probabilities = list(estimator.survival(key).probabilities)
        assert probabilities == sorted(probabilities)


def test_other_files_are_refused(tmp_path: Path) -> None:
    """Another version, another program's file and a folder are each refused in one sentence with the path."""
    path = tmp_path / "tools.json"
    save_estimator(DurationEstimator().fit(KEYS, [1.0, 2.0, 3.0, 4.0]), path)
    ours = msgspec.json.decode(path.read_bytes())
    for other, reason in [
        ({**ours, "version": 99}, f"version 99, this program reads version {STATE_VERSION}"),
        ({**ours, "format": "weights"}, "another program"),
        ({**ours, "keys": [[[], [500], [1.0], [0.0]]]}, "damaged"),
        ({**ours, "keys": [[[], [5], [1.0], []]]}, "do not match"),
        ({**ours, "keys": [[["bash"], [5], [1.0], [0.0]]]}, "key of all calls"),
        ({**ours, "half_life": 0}, "half_life must be"),
        ([], "another program"),
    ]:
        path.write_bytes(msgspec.json.encode(other))
        with pytest.raises(EstimatorStateError, match=rf"^The estimator state .*tools.json .*{reason}.*\.$"):
            load_estimator(path)
    with pytest.raises(EstimatorStateError, match="cannot be read: Is a directory"):
        load_estimator(tmp_path)
