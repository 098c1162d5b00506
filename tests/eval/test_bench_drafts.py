"""``continuum bench`` reports a server's drafts from its metrics, as in V1, and from receipts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from continuum.cli.main import main
from engine.records.messages import TurnReceipt
from engine.worker.loading.tiny_models import make_model_folder
from eval.load.records import EngineCounters, TurnRecord, VerifiedDrafts, read_records
from eval.load.server_metrics import ServerMetrics
from eval.load.server_process import ServerProcess
from eval.report.metrics import RunSetting, summarize
from eval.report.results import ResultFile, read_results
from eval.report.tables import render
from tests.eval.hand_made import job, run, turn

BEFORE = """
# TYPE vllm:generation_tokens counter
vllm:generation_tokens_total{model_name="m",engine="0"} 100
# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total{model_name="m",engine="0"} 10
# TYPE vllm:spec_decode_num_draft_tokens counter
vllm:spec_decode_num_draft_tokens_total{model_name="m",engine="0"} 20
# TYPE vllm:spec_decode_num_accepted_tokens counter
vllm:spec_decode_num_accepted_tokens_total{model_name="m",engine="0"} 5
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="m",engine="0",position="0"} 5
"""
AFTER = """
# TYPE vllm:generation_tokens counter
vllm:generation_tokens_total{model_name="m",engine="0"} 160
vllm:generation_tokens_total{model_name="m",engine="1"} 40
# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total{model_name="m",engine="0"} 40
vllm:spec_decode_num_drafts_total{model_name="m",engine="1"} 10
# TYPE vllm:spec_decode_num_draft_tokens counter
vllm:spec_decode_num_draft_tokens_total{model_name="m",engine="0"} 100
# TYPE vllm:spec_decode_num_accepted_tokens counter
vllm:spec_decode_num_accepted_tokens_total{model_name="m",engine="0"} 45
vllm:spec_decode_num_accepted_tokens_total{model_name="m",engine="1"} 10
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="m",engine="0",position="0"} 25
vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="m",engine="0",position="1"} 20
vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="m",engine="1",position="0"} 10
"""
COUNTS = VerifiedDrafts(
    num_drafts=40, drafted_tokens=80, accepted_tokens=50, accepted_by_place=[30, 20], output_tokens=100
)


def test_counts_of_a_server_are_differences_between_two_readings() -> None:
    """Counts are summed over engines; a position missing in the first reading starts at 0."""
    after, before = ServerMetrics.parse(AFTER), ServerMetrics.parse(BEFORE)
    assert after.counters_since(before).drafts == COUNTS
    assert COUNTS.tokens_per_step == 2
    assert COUNTS.tokens_per_draft == 2.25
    assert COUNTS.acceptance_rate == 50 / 80
    assert [COUNTS.acceptance_at(place) for place in range(3)] == [0.75, 0.5, 0]
    assert ServerMetrics.parse("").drafts is None


def test_a_server_that_has_drafted_nothing_has_no_rates() -> None:
    """A server without drafts gives one token per step, and has no rates."""
    none = VerifiedDrafts(
        num_drafts=0, drafted_tokens=0, accepted_tokens=0, accepted_by_place=[], output_tokens=9
    )
    assert none.tokens_per_step == 1
    assert none.tokens_per_draft is none.acceptance_rate is none.acceptance_at(0) is None


def test_tokens_per_step_of_a_job_are_those_of_all_its_turns() -> None:
    """Tokens per step come from all receipts of a job; without draft counts there is no figure."""

    def told(job_id: str, steps: int, accepted: int) -> TurnRecord:
        receipt = TurnReceipt(
            request_id="r",
            job_id=job_id,
            turn=1,
            output_steps=steps,
            drafted_tokens=accepted,
            accepted_tokens=accepted,
        )
        return turn(job_id, 1, 1.0, 2.0, receipt=receipt)

    setting, jobs = RunSetting(name="r", model="m"), [job("a", 0.0, 9.0), job("b", 0.0, 9.0)]
    result = summarize(setting, jobs, [told("a", 1, 3), told("a", 9, 0), told("b", 5, 5)], EngineCounters())
    assert result.job_tokens_per_step is not None
    assert (result.job_tokens_per_step.mean, result.job_tokens_per_step.max) == (1.65, 2)
    without = summarize(setting, jobs, [told("a", 4, 0)], EngineCounters())
    assert without.job_tokens_per_step is None


def test_a_report_shows_drafts_where_there_are_any() -> None:
    """A report without drafts does not mention them."""
    text = render([run("drafting", 10.0, counters=EngineCounters(drafts=COUNTS))])
    assert [line.split()[-1] for line in text.splitlines() if line.startswith("tokens per step")] == ["2.00"]
    assert "drafts accepted up to token 2, %" in text
    assert "tokens per step" not in render([run("fcfs", 10.0)])


@pytest.fixture(scope="module")
def drafting_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server that drafts from a job's own past."""
    folder = tmp_path_factory.mktemp("drafting")
    model = make_model_folder(folder / "model", vocab_size=1024, max_position_embeddings=4096)
    arguments = [
        *(str(model), "--port", "0", "--host", "127.0.0.1", "--served-model-name", "tiny"),
        *("--num-gpu-blocks-override", "300"),
        *("--speculative-config", '{"method": "suffix", "weigh_costs": false}'),
    ]
    with ServerProcess(arguments, folder / "server.log") as process:
        yield process.base_url


@pytest.mark.slow
def test_a_drafting_server_is_measured(
    drafting_server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Metrics and receipts agree to the token, as the server has no other users."""
    paths = [tmp_path / name for name in ("out.json", "records.jsonl", "out.html")]
    flags = zip(("--json", "--records", "--html"), map(str, paths), strict=True)
    command = ["bench", "--base-url", drafting_server, "--workload", "synthetic", "--jobs", "3"]
    command += ["--time-scale", "0", "--max-turns", "3", *(word for pair in flags for word in pair)]
    assert main(command) == 0
    file: ResultFile = read_results(paths[0])
    (result,) = file.runs
    receipts = [record.receipt for record in read_records(paths[1]).turns]
    assert result.drafts is not None
    assert result.drafts.accepted_tokens == sum(each.accepted_tokens for each in receipts if each) > 0
    assert result.drafts.drafted_tokens == sum(each.drafted_tokens for each in receipts if each)
    num_steps = sum(each.output_steps for each in receipts if each)
    assert result.drafts.tokens_per_step == result.output_tokens / num_steps
    assert result.job_tokens_per_step is not None
    assert result.job_tokens_per_step.count == 3
    told = f"{result.drafts.tokens_per_step:.2f}"
    assert [
        line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("tokens per")
    ] == [["tokens", "per", "step", told]]
    assert "draft tokens verified" in paths[2].read_text()
