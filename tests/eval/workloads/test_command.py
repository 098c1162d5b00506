"""``continuum workload``: a workload's figures, its assumptions, and conversion to our format."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from continuum.cli.main import main
from eval.workloads.catalog import load_jobs
from eval.workloads.job import GapKind
from eval.workloads.recorded import read_recorded, write_jobs
from tests.eval.workloads.jobs import SHARED, job, turn, written

CHAT = {"id": "c", "messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]}


def test_figures_and_assumptions_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """The output has counts, quantiles per tool, and ASSUMED where something is."""
    assert main(["workload", "swe-bench", "--jobs", "30", "--seed", "5"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("swe-bench: 30 jobs, ")
    for expected in (
        "turns per job",
        "context tokens per job",
        "  bash pytest",
        "p99",
        "ASSUMED of swe-bench: ",
    ):
        assert expected in told


def test_what_a_cache_finds_that_forgets_idle_jobs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A turn finds what it repeats if its job was idle for no longer than the timeout; a first turn finds
    nothing, and an unknown gap counts as none."""
    gaps_s = (None, 30.0, 400.0)
    turns = [
        turn(100 * number + 100, 100 * number + 10 * bool(number), gap_kind=GapKind.USER, gap_s=gap_s)
        for number, gap_s in enumerate(gaps_s)
    ]
    out = tmp_path / "jobs.jsonl"
    write_jobs(out, [job("one", *turns, turn(400, 310)), job("other", turn(1000))])
    assert main(["workload", str(out), "--json"]) == 0
    by_timeout = {each["timeout_s"]: each for each in json.loads(capsys.readouterr().out)["idle_timeouts"]}
    num_all = 100 + 200 + 300 + 400 + 1000
    num_new = num_all - 110 - 210 - 310
    for timeout_s, num_found in ((10.0, 110), (60.0, 320), (300.0, 320), (3600.0, 630)):
        assert by_timeout[timeout_s]["hit_rate"] == pytest.approx(num_found / num_all)
        assert by_timeout[timeout_s]["amplification"] == pytest.approx((num_all - num_found) / num_new)
    assert main(["workload", str(out)]) == 0
    assert "300 s                                 16.0%               1.2" in capsys.readouterr().out


def test_the_same_figures_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    """``--json`` has everything that is printed; the same seed gives the same bytes."""
    outputs = []
    for _ in range(2):
        assert main(["workload", "bfcl:turns=2", "--jobs", "20", "--seed", "5", "--json"]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]
    figures = json.loads(outputs[0])
    assert (figures["name"], figures["num_jobs"]) == ("bfcl:turns=2", 20)
    assert {"mean", "sd", "p50", "p90", "p99", "max", "count"} == set(figures["turns_per_job"])
    assert set(figures["tool_s"]) == {"fetch_url", "web_search"}


def test_any_file_becomes_one_of_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``--out`` writes a file that is read back to the same jobs."""
    out = tmp_path / "made" / "jobs.jsonl"
    source = written(tmp_path / "chats.json", [CHAT, CHAT | {"id": "d"}])
    assert main(["workload", str(source), "--out", str(out)]) == 0
    jobs, _ = read_recorded(out)
    assert [(job.job_id, job.turns[0].output_text, job.tokens_measured) for job in jobs] == [
        ("c", "!", False),
        ("d", "!", False),
    ]
    assert "ESTIMATED from the length of the text" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "magic"), [("jobs.jsonl.zst", b"\x28\xb5\x2f\xfd"), ("jobs.gz", b"\x1f\x8b")]
)
def test_jobs_are_packed_where_their_name_says_so(tmp_path: Path, name: str, magic: bytes) -> None:
    """Compressed files have the same jobs, and the same jobs give the same bytes."""
    plain, files = tmp_path / "jobs.jsonl", [tmp_path / "a" / name, tmp_path / "b" / name]
    for out in (plain, *files):
        assert main(["workload", "bfcl", "--jobs", "5", "--out", str(out)]) == 0
    packed = files[0].read_bytes()
    assert packed.startswith(magic)
    assert packed == files[1].read_bytes()
    assert load_jobs(str(files[0]), None, None) == load_jobs(str(plain), None, None)


def test_where_to_cut_must_be_said(capsys: pytest.CaptureFixture[str]) -> None:
    """An option without effect is refused."""
    assert main(["workload", "bfcl", "--cut-at-context"]) == 2
    assert "--cut-at-context needs --max-context-tokens" in capsys.readouterr().err


def test_a_limit_that_leaves_nothing_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No empty run is started, and the error names the limit."""
    source = written(tmp_path / "chats.json", [CHAT])
    assert main(["workload", str(source), "--max-context-tokens", "1"]) == 1
    why = "1 jobs were LEFT OUT: their context passes 1 tokens"
    assert capsys.readouterr().err == f"continuum: The limits leave no job of {source}; {why}.\n"


@pytest.mark.shared
@pytest.mark.skipif(not SHARED.exists(), reason="the recorded workloads are not beside the repository")
def test_what_was_left_out_and_capped_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """Contexts of 890k tokens and gaps of hours can be limited, and the output says by how much."""
    path = str(SHARED / "kv-cache-tester.jsonl")
    assert main(["workload", path, "--max-context-tokens", "131072", "--gap-cap-s", "600"]) == 0
    told = capsys.readouterr().out
    assert "167 jobs and 9 sub-agents" in told
    assert "note: 306 jobs were LEFT OUT: their context passes 131072 tokens" in told
    assert "gaps were CAPPED at 600 s" in told
    assert "an upper bound" in told
