"""``continuum fit``: sizes against transformers and the presets, agents at an SLO against ``simulate``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from continuum.cli.main import main
from continuum.cli.serve_flags import add_serve_arguments
from engine.worker.loading.tiny_models import make_model_folder
from eval.sim.hardware import GIB
from eval.sim.model_folder import shape_of_folder
from tests.readme_tables import block, commands
from tests.worker.conftest import VARIANTS

OF_FOLDERS = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "phi3", "dots1", "solar-open")
NEARLY = (
    *("glm4-moe-lite", "minimax-m2", "gpt-oss", "gemma3", "qwen3.5", "hy-v3", "olmo3", "granite3"),
    *("ministral3", "ernie4.5-moe", "mistral4", "olmo-hybrid-nope", "cohere2", "minicpm3"),
)
"""Models with parameters that the simulator leaves out: norms of heads and outputs, biases, sinks."""


NOT_KNOWN = (
    *("nemotron-h", "lfm2", "lfm3", "bamba", "kimi-linear", "arcee", "gemma4", "gemma4-small"),
    *("mimo-v2-flash", "deepseek-v3.2", "olmo-hybrid", "falcon-h1", "jamba", "apertus"),
)


def fit(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["fit", *arguments, "--json"]) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    return told


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The sentence with which the command rejects its arguments."""
    assert main(["fit", *arguments]) == 2
    *_, line = capsys.readouterr().err.splitlines()
    return line


def test_agents_are_what_the_pool_holds(capsys: pytest.CaptureFixture[str]) -> None:
    """For a model whose layers keep the KV of all tokens: the pool over the context."""
    memory = fit(capsys, "llama-3.1-8b", "--context", "16384")["memory"]
    assert memory["kv_bytes_per_token"] == 2 * 32 * 8 * 128 * 2
    assert memory["agent_bytes"] == 16384 * memory["kv_bytes_per_token"]
    assert memory["agents"] == memory["kv_tokens"] // 16384
    assert memory["weight_bytes"] == pytest.approx(8.03e9 * 2, rel=0.01)  # its model card: 8.03B parameters


def test_windows_and_states_take_less(capsys: pytest.CaptureFixture[str]) -> None:
    """Layers with a window or with states do not keep the KV of all tokens."""
    for model, most in (("gpt-oss-20b", 0.52), ("qwen3-next-80b-a3b", 1.2)):
        memory = fit(capsys, model, "--context", "131072")["memory"]
        assert memory["agent_bytes"] < most * 131072 * memory["kv_bytes_per_token"]


@pytest.mark.parametrize("name", OF_FOLDERS)
def test_a_folder_has_the_parameters_that_transformers_counts(name: str, tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / name, **VARIANTS[name])
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert shape_of_folder(folder).total_params == model.num_parameters()


@pytest.mark.parametrize("name", NEARLY)
def test_other_families_have_nearly_as_many(name: str, tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / name, **VARIANTS[name])
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert shape_of_folder(folder).total_params == pytest.approx(model.num_parameters(), rel=0.02)


def test_layers_that_the_simulator_does_not_know_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name in NOT_KNOWN:
        folder = make_model_folder(tmp_path / name, **VARIANTS[name], weights=False)
        assert f"{folder}: the simulator" in error_of(capsys, str(folder))


def test_a_folder_is_fitted_and_the_command_serves_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = make_model_folder(tmp_path / "tiny")
    told = fit(capsys, str(folder), "--context", "4096", "--tensor-parallel", "2")
    parser = argparse.ArgumentParser()
    add_serve_arguments(parser)
    words = told["command"].split()
    assert words[:2] == ["continuum", "serve"]
    served = parser.parse_args(words[2:])
    assert (served.model, served.max_model_len, served.tensor_parallel_size) == (str(folder), 4096, 2)


def test_more_agents_than_fit_need_host_memory(capsys: pytest.CaptureFixture[str]) -> None:
    told = fit(capsys, "llama-3.1-8b", "--agents", "20")
    memory = told["memory"]
    assert memory["host_bytes"] == (20 - memory["agents"]) * memory["agent_bytes"]
    assert f"--kv-offloading-size {memory['host_bytes'] / GIB:.0f}" in told["command"]
    assert fit(capsys, "llama-3.1-8b", "--agents", "2")["memory"]["host_bytes"] == 0


@pytest.mark.slow
def test_agents_at_the_slo_are_those_that_simulate_finds(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The number keeps the SLO and a tenth more breaks it, as ``continuum simulate`` says, too."""
    workload = ("--workload", "bfcl:tokens=0.3")
    given = ("llama-3.1-8b", "--context", "32768", "--jobs-per-agent", "2", *workload)
    at_slo = fit(capsys, *given, "--slo-return-s", "0.55")["at_slo"]
    waits = {tried["agents"]: tried["return_p95_s"] for tried in at_slo["tried"]}
    assert waits[at_slo["agents"]] <= 0.55
    above = min(agents for agents in waits if agents > at_slo["agents"])
    assert waits[above] > 0.55
    assert above - at_slo["agents"] <= max(1, at_slo["agents"] // 10)
    out = tmp_path / "out.json"
    simulated = ("--concurrency", str(above), "--jobs", str(2 * above), "--json", str(out))
    limits = ("--max-context-tokens", str(32768 - 16), "--gap-cap-s", "600")
    assert main(["simulate", *workload, *simulated, *limits, "--policies", "continuum"]) == 0
    [run] = json.loads(out.read_text())["runs"]
    assert run["returning_ttft_s"]["p95"] == pytest.approx(waits[above])


def test_a_preset_has_no_folder_to_name(capsys: pytest.CaptureFixture[str]) -> None:
    """Its place in the command is called MODEL; a policy that was simulated is served, too."""
    told = fit(capsys, "llama-3.1-8b", "--policy", "fcfs")
    assert told["command"] == "continuum serve MODEL --max-model-len 32768 --scheduling-policy fcfs"


@pytest.mark.slow
def test_jobs_without_returns_have_no_slo(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A number of agents that no wait bounds would be none."""
    turn = {"input_tokens": 50, "prefix_tokens": 0, "new_input_tokens": 50, "output_tokens": 5, "calls": []}
    turn |= {"tool": None, "tool_s": None, "gap_kind": "end"}
    job = {"job_id": "a", "source": "one", "arrival_s": None, "group": "a", "turns": [turn]}
    (tmp_path / "jobs.jsonl").write_text(json.dumps(job) + "\n")
    said = error_of(capsys, "llama-3.1-8b", "--workload", str(tmp_path / "jobs.jsonl"))
    assert "returns from a tool" in said


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("nope",), "Unknown model 'nope'; name a model folder, or one of llama-3.1-8b"),
        (("llama-3.1-8b", "--gpu", "b9"), "Unknown GPU 'b9'"),
        (("llama-3.1-8b", "--context", "2000000"), "An agent at 2,000,000 tokens needs"),
        (("FOLDER",), "has no readable config.json"),
    ],
)
def test_what_cannot_be_is_one_sentence(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: tuple[str, ...], why: str
) -> None:
    given = [str(tmp_path) if word == "FOLDER" else word for word in arguments]
    assert why in error_of(capsys, *given)


def test_other_architectures_of_folders_are_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba", "hidden_size": 8}))
    assert "model_type must be one of llama, mistral" in error_of(capsys, str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 1e9}))
    assert "must be a whole number above 0" in error_of(capsys, str(tmp_path))


def test_the_page_shows_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    shown = block("continuum fit")
    [arguments] = commands(shown["command"])
    assert main(arguments) == 0
    assert capsys.readouterr().out == shown["output"]
