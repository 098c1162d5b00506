"""Recorded workloads are read unchanged; synthetic ones are equal for equal seeds."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval.errors import WorkloadError
from eval.workloads.catalog import load_jobs
from eval.workloads.synthetic import SyntheticConfig, make_jobs

RECORDED = {
    "job_id": "astropy-1",
    "source": "by hand",
    "turns": [{"input_tokens": 12, "prefix_tokens": 0, "output_tokens": 3, "gap_kind": "end"}],
}


def _written(path: Path, *lines: object) -> Path:
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("name", "num_jobs", "complaint"),
    [
        ("missing.jsonl", None, "Cannot read the workload .*missing.jsonl: No such file"),
        ("empty.jsonl", None, "holds no jobs"),
        ("one.jsonl", 2, "asks for 2 jobs, but .*one.jsonl holds 1"),
    ],
)
def test_an_unusable_workload_is_one_sentence(
    tmp_path: Path, name: str, num_jobs: int | None, complaint: str
) -> None:
    """A missing, empty or too short file is refused in one sentence."""
    _written(tmp_path / "empty.jsonl")
    _written(tmp_path / "one.jsonl", RECORDED)
    with pytest.raises(WorkloadError, match=complaint):
        load_jobs(str(tmp_path / name), num_jobs, None)


def test_a_seed_draws_jobs_and_no_seed_takes_the_first(tmp_path: Path) -> None:
    """Without a seed jobs keep the file's order; a seed draws without repetition, reproducibly."""
    path = str(_written(tmp_path / "jobs.jsonl", *(RECORDED | {"job_id": str(i)} for i in range(20))))
    assert [job.job_id for job in load_jobs(path, 3, None)] == ["0", "1", "2"]
    drawn = [job.job_id for job in load_jobs(path, 10, 7)]
    assert drawn == [job.job_id for job in load_jobs(path, 10, 7)]
    assert len(set(drawn)) == 10
    assert drawn != [job.job_id for job in load_jobs(path, 10, 8)]


@pytest.mark.slow
@given(seed=st.integers(0, 2**32), num_jobs=st.integers(1, 4), hermes=st.booleans())
def test_made_jobs_depend_on_their_seed_only(seed: int, num_jobs: int, hermes: bool) -> None:
    """Equal arguments give equal jobs, and more jobs do not change the first ones."""
    config = SyntheticConfig(num_jobs=num_jobs, seed=seed, hermes=hermes)
    jobs = make_jobs(config)
    assert jobs == make_jobs(config)
    assert make_jobs(SyntheticConfig(num_jobs=num_jobs + 1, seed=seed, hermes=hermes))[:num_jobs] == jobs
    assert make_jobs(SyntheticConfig(num_jobs=num_jobs, seed=seed + 1, hermes=hermes)) != jobs


@given(seed=st.integers(0, 2**32), hermes=st.booleans())
def test_made_jobs_look_like_an_agent(seed: int, hermes: bool) -> None:
    """Every turn but the last calls a tool in the requested form, and waits for it a bounded time."""
    config = SyntheticConfig(num_jobs=2, seed=seed, hermes=hermes)
    opening = "<tool_call>\n" if hermes else "```bash\n"
    jobs = make_jobs(config)
    assert jobs[0].system_text == jobs[1].system_text
    for job in jobs:
        assert config.min_turns <= len(job.turns) <= config.max_turns
        *calling, last = job.turns
        assert (last.tool, last.gap_s) == (None, None)
        for turn in calling:
            assert turn.gap_s is not None
            assert 0 <= turn.gap_s <= config.max_tool_s
            assert not turn.gap_measured
            assert turn.output_text is not None
            call = turn.output_text.partition(opening)[2].removesuffix("\n</tool_call>")
            command = json.loads(call)["arguments"]["command"] if hermes else call
            assert turn.command is not None
            assert command.startswith(turn.command + " ")


def test_made_tool_times_have_the_published_shape() -> None:
    """Most tools take a fraction of a second, a few many seconds: mean near 0.9 s, median far below."""
    jobs = make_jobs(SyntheticConfig(num_jobs=200, seed=1, system_words=1, task_words=1, result_words=1))
    gaps = [turn.gap_s for job in jobs for turn in job.turns if turn.gap_s is not None]
    assert 0.5 < statistics.mean(gaps) < 1.2
    assert statistics.median(gaps) < 0.2
    assert statistics.stdev(gaps) > 2 * statistics.mean(gaps)
