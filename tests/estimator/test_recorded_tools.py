"""The estimator on a real coding agent's tool calls: better than one distribution for all, and calibrated."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from estimator.durations import DurationEstimator
from estimator.tool_key import ToolKey, tool_key

RECORDED = Path(__file__).resolve().parents[3] / "shared" / "workloads" / "agentcgroup-claude.jsonl"
QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)

pytestmark = [
    pytest.mark.shared,
    pytest.mark.skipif(not RECORDED.exists(), reason="the recorded workloads are not beside the repository"),
]
FloatArray = NDArray[np.float64]


class Call(msgspec.Struct):
    tool: str
    s: float | None
    cmd: str | None = None

    @property
    def key(self) -> ToolKey:
        """Returns the key of a recorded call; the recording has the program of a shell call, not its text."""
        return tool_key(self.tool, json.dumps({"command": f"cd /testbed && {self.cmd}"} if self.cmd else {}))


class Turn(msgspec.Struct):
    calls: list[Call] = []


class Job(msgspec.Struct):
    group: str
    turns: list[Turn]

    def durations(self) -> Iterator[tuple[ToolKey, float]]:
        for turn in self.turns:
            for call in turn.calls:
                if call.s is not None:
                    yield call.key, call.s


@pytest.fixture(scope="module")
def halves() -> tuple[list[tuple[ToolKey, float]], list[tuple[ToolKey, float]]]:
    """Calls to learn from and calls to predict; runs of the same task are on the same side."""
    jobs = [msgspec.json.decode(line, type=Job) for line in RECORDED.read_bytes().splitlines()]
    learned = set(sorted({job.group for job in jobs})[::2])
    split: tuple[list[tuple[ToolKey, float]], list[tuple[ToolKey, float]]] = [], []
    for job in jobs:
        split[job.group not in learned].extend(job.durations())
    return split


def pinball(actual: FloatArray, predicted: FloatArray | float, q: float) -> float:
    """The pinball loss, whose expectation is smallest at the q-quantile."""
    above = actual - predicted
    return float(np.maximum(q * above, (q - 1) * above).mean())


def test_beats_one_distribution_for_all(
    halves: tuple[list[tuple[ToolKey, float]], list[tuple[ToolKey, float]]],
) -> None:
    """On unseen tasks its quantiles lose less than the quantiles of all calls, in seconds and in log seconds,
    and are calibrated."""
    learn, test = halves
    estimator = DurationEstimator().fit([key for key, _ in learn], [s for _, s in learn])
    keys, actual = [key for key, _ in test], np.array([s for _, s in test])
    everything = np.array([s for _, s in learn])
    ratios = []
    print(f"\n{len(learn)} calls learnt, {len(test)} predicted; loss: per key / one for all")
    for q in QUANTILES:
        ours, baseline = estimator.predict_quantile(keys, q), float(np.quantile(everything, q))
        in_seconds = pinball(actual, ours, q), pinball(actual, baseline, q)
        log_actual = np.log(actual + 1e-3)
        in_log = (
            pinball(log_actual, np.log(ours + 1e-3), q),
            pinball(log_actual, float(np.log(baseline + 1e-3)), q),
        )
        share = float((actual <= ours).mean())
        ratios.append((in_seconds[0] / in_seconds[1], in_log[0] / in_log[1]))
        print(
            f"q {q:4}: {in_seconds[0]:.3f} / {in_seconds[1]:.3f} s, {in_log[0]:.3f} / {in_log[1]:.3f} log s, "
            f"{share:.1%} ended by then"
        )
        assert share == pytest.approx(q, abs=0.08)
    assert max(seconds for seconds, _ in ratios) < 1
    assert np.mean([seconds for seconds, _ in ratios]) < 0.9
    assert np.mean([log for _, log in ratios]) < 0.6


def test_pytest_is_not_cd(halves: tuple[list[tuple[ToolKey, float]], list[tuple[ToolKey, float]]]) -> None:
    """With a ``cd`` before each recorded command, tests, searches and edits are still distinguished."""
    learn, _ = halves
    estimator = DurationEstimator().fit([key for key, _ in learn], [s for _, s in learn])
    tests_s, list_s, edit_s = estimator.predict(
        [
            tool_key("Bash", "cd /testbed && python -m pytest"),
            tool_key("Bash", "cd x && ls"),
            ToolKey(("edit",)),
        ]
    )
    print(f"\nmedian: pytest {tests_s:.3f} s, ls {list_s:.3f} s, edit {edit_s:.3f} s")
    assert tests_s > 5 * list_s
    assert tests_s > 10 * edit_s
