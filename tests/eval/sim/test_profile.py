"""``continuum profile`` measures a real server, and the fit predicts its steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from continuum.cli.main import main
from engine.worker.loading.tiny_models import make_model_folder
from eval.errors import ServerError
from eval.profile.command import read_samples
from eval.profile.profile_load import ProfileLoad, ServerLimits
from eval.sim.fitted import read_profile
from tests.eval.other_server import Behaviour, OtherServer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("models") / "tiny", max_position_embeddings=2048)


@pytest.mark.slow
def test_a_profile_describes_the_server_it_was_measured_on(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One command runs and loads the server for some seconds; the fit predicts its steps, and fitting its
    trace again gives the same coefficients. Bounds are wide, as the machine may be busy."""
    trace, profile = tmp_path / "trace.jsonl", tmp_path / "profile.json"
    flags = ["--model", str(model), "--json", str(profile), "--date", "a Sunday"]
    pool = ["--num-gpu-blocks-override", "1200", "--max-num-batched-tokens", "512"]
    assert main(["profile", *flags, *pool, "--seconds", "5", "--trace", str(trace)]) == 0
    printed = capsys.readouterr()
    assert "MEASURED on a Sunday for tiny in float32" in printed.out
    assert "starting the server" in printed.err

    cost = read_profile(profile)
    assert (cost.profile.step_tokens, cost.kv_bytes_per_token) == (512, 2 * 2 * 2 * 16 * 4)
    assert 0 < cost.arrival_overhead_s < 0.3
    assert 0 <= cost.reply_overhead_s < 0.3
    assert cost.profile.max_decodes >= 8
    _, samples = read_samples(trace)
    timed = [(sample.seconds, cost.step_s(sample.work)) for sample in samples if sample.seconds is not None]
    assert len(timed) > 100
    near = sum(0.5 < computed / seconds < 2 for seconds, computed in timed)
    assert near > 0.6 * len(timed)

    again = tmp_path / "again.json"
    assert main(["profile", "--model", str(model), "--from-trace", str(trace), "--json", str(again)]) == 0
    refitted = read_profile(again).profile
    assert (refitted.step_s, refitted.pair_s) == (cost.profile.step_s, cost.profile.pair_s)
    assert refitted.arrival_s is None
    assert "before the first step   not measured" in capsys.readouterr().out


def test_what_cannot_be_profiled_is_one_sentence(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A missing model, an invalid trace or a bad server flag is reported at the latest at the start."""

    def complaint(*arguments: str, code: int = 1) -> str:
        assert main(["profile", "--json", str(tmp_path / "out.json"), *arguments]) == code
        return capsys.readouterr().err

    nowhere = tmp_path / "nowhere"
    assert f"Cannot read {nowhere / 'config.json'}: No such file" in complaint("--model", str(nowhere))
    no_trace = tmp_path / "no.jsonl"
    no_trace.write_text('{"type": "header"}\n')
    known = ("--model", str(model), "--from-trace")
    assert f"{no_trace}, line 1: not the header of a trace" in complaint(*known, str(no_trace))
    assert f"Cannot read the trace {nowhere}" in complaint(*known, str(nowhere))
    for flag, value in (("--seconds", "5"), ("--max-num-seqs", "4"), ("--trace", str(nowhere))):
        said = complaint(*known, str(no_trace), flag, value, code=2)
        assert f"{flag} has no effect with --from-trace: nothing is measured." in said
    assert "block_size must be at least 1" in complaint("--model", str(model), "--block-size", "0")
    assert not (tmp_path / "out.json").exists()
    assert main(["profile", "--model", str(model), "--json", str(no_trace / "out.json")]) == 1
    printed = capsys.readouterr().err
    assert "Cannot write the result" in printed
    assert "starting the server" not in printed


@pytest.mark.parametrize(
    "behaviour", [Behaviour(break_after=3), Behaviour(break_after=12), Behaviour(busy_times=99)]
)
async def test_a_server_that_fails_under_the_load_is_one_sentence(behaviour: Behaviour) -> None:
    """A server that fails in mid-answer, with one request or many, gives one sentence, not a list of
    exceptions."""
    limits = ServerLimits(max_model_len=4000, pool_tokens=100_000, max_num_seqs=8)
    with OtherServer(behaviour) as server:
        async with ProfileLoad(server.base_url, seed=0) as load:
            with pytest.raises(ServerError, match=r"The server under test (failed|refused a request): "):
                await load.run(limits, seconds=30)
