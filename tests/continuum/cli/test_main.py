"""Promises of the command line: V1's flags, clear errors, and useful help."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from continuum.cli.main import COMMANDS, SERVE, main
from continuum.cli.serve_args import continuum_config, engine_config, server_config
from continuum.cli.serve_flags import add_serve_arguments
from continuum.config import ContinuumConfig
from engine.api.config import ServerConfig
from engine.config.engine_config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    TelemetryConfig,
    TraceConfig,
)
from engine.errors import ConfigError
from engine.version import package_version


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_serve_arguments(parser)
    return parser.parse_args(arguments)


def test_without_flags_every_record_has_its_defaults() -> None:
    """Flags take their defaults from the config records."""
    args = parse("m")
    assert engine_config(args) == EngineConfig(
        model=ModelConfig(model="m"), telemetry=TelemetryConfig(model_name="m")
    )
    assert server_config(args) == ServerConfig(served_model_names=("m",))
    assert continuum_config(args) == ContinuumConfig()


def test_flags_reach_their_records() -> None:
    """V1's flag names, their negations and human-readable numbers reach the config."""
    args = parse(
        *(
            "m",
            "--dtype",
            "float32",
            "--max-model-len",
            "32k",
            "--block-size",
            "32",
            "--no-enable-prefix-caching",
        ),
        *(
            "--kv-cache-memory-bytes",
            "2G",
            "--max-num-seqs",
            "4",
            "--no-enable-chunked-prefill",
            "--seed",
            "7",
        ),
        *("--trace", "t.jsonl", "--trace-max-bytes", "256M", "--trace-max-files", "4"),
        *("--disable-log-stats", "--served-model-name", "a", "b"),
    )
    assert engine_config(args) == EngineConfig(
        model=ModelConfig(model="m", dtype="float32", max_model_len=32_000, seed=7),
        cache=CacheConfig(block_size=32, enable_prefix_caching=False, kv_cache_memory_bytes=2 * 2**30),
        scheduler=SchedulerConfig(max_num_seqs=4, enable_chunked_prefill=False),
        trace=TraceConfig(trace_path="t.jsonl", trace_max_bytes=2**28, trace_max_files=4),
        telemetry=TelemetryConfig(model_name="a"),
        log_stats=False,
    )
    assert server_config(args).served_model_names == ("a", "b")


def test_a_policy_flag_without_its_policy_is_an_error() -> None:
    """An option without effect is refused."""
    assert continuum_config(parse("m", "--ttl-rule", "paper")).ttl_rule == "paper"
    with pytest.raises(ConfigError, match="--ttl-rule needs --scheduling-policy continuum"):
        continuum_config(parse("m", "--ttl-rule", "paper", "--scheduling-policy", "fcfs"))


def test_a_chat_template_is_a_file_or_a_text(tmp_path: Path) -> None:
    """As in V1, ``--chat-template`` is a file or a text."""
    path = tmp_path / "t.jinja"
    path.write_text("{{ messages }}")
    assert server_config(parse("m", "--chat-template", str(path))).chat_template == "{{ messages }}"
    assert server_config(parse("m", "--chat-template", "{{ x }}")).chat_template == "{{ x }}"
    with pytest.raises(ConfigError, match="chat_template"):
        server_config(parse("m", "--chat-template", str(tmp_path / "none")))


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["fly"],
        ["serve", "m", "--no-such-flag"],
        ["serve", "m", "--dtype", "int3"],
        ["serve", "m", "--max-num", "4"],
        ["serve", "m", "--max-model-len", "many"],
    ],
)
def test_a_wrong_command_line_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """argparse writes one sentence to stderr."""
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    assert exit_info.value.code == 2
    assert "error:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--max-num-seqs", "0"], "max_num_seqs must be at least 1, got 0."),
        (["--pin-budget", "2"], "pin_budget must be in [0, 1], got 2.0."),
        (["--horizon-s", "nan"], "horizon_s must not be negative, got nan."),
        (["--port", "70000"], "port must be in [0, 65535], got 70000."),
        (["--trace", "t.gz"], "a trace is compressed with zstd only"),
        (["--scheduling-policy", "lru"], "Unknown policy 'lru'; choose from fcfs, priority, program-fcfs"),
    ],
)
def test_a_value_out_of_range_exits_with_2(
    flags: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The sentence names the option and its limit."""
    assert main(["serve", "m", *flags]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"continuum: argument {flags[0]}: ")
    assert told in line


@pytest.mark.parametrize("flags", [["--max_num_seqs", "0"], ["--max_num-seqs=0"]])
def test_a_flag_may_be_written_with_underscores(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Underscores are accepted, as in many commands for V1; the value keeps its own."""
    assert main(["serve", "a_model", *flags, "--served_model_name", "x_y"]) == 2
    assert "argument --max-num-seqs: max_num_seqs must be at least 1" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["serve", "m", "--no_such_flag=a_b"])
    assert "unrecognized arguments: --no-such-flag=a_b" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["serve", "m", "--prot", "1"])
    told = capsys.readouterr().err
    assert told.startswith("usage: continuum serve")
    assert "did you mean --port?" in told


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--decode-context-parallel-size", "2"], "use tensor_parallel_size or pipeline_parallel_size"),
        (["-dcp", "2"], "use tensor_parallel_size"),
        (["--prefill-context-parallel-size=2"], "use tensor_parallel_size"),
        (["--logits-processors", "a.B"], "use logit_bias, allowed_token_ids, bad_words"),
        (["--io-processor-plugin", "a"], "in the client, or in a proxy"),
        (["--enable-prompt-embeds"], "prompts are texts, token ids, pictures or audio"),
        (["--ec-transfer-config", "{}"], "pictures and audio are encoded by the engine that answers"),
    ],
)
def test_an_option_of_v1_that_is_not_here_says_what_to_use(
    flags: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "m", *flags]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"continuum: {flags[0].partition('=')[0]} is V1's, and not supported: ")
    assert told in line


@pytest.mark.parametrize(
    "command",
    ["", "serve", *(command.name for command in COMMANDS)],
)
def test_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every command has a help text."""
    with pytest.raises(SystemExit) as exit_info:
        main([*command.split(), "--help"])
    assert exit_info.value.code == 0
    assert f"usage: continuum {command}" in capsys.readouterr().out


@pytest.mark.parametrize("flags", [[], ["--max-num-seqs", "0"]])
def test_the_bundled_model_is_named_once_the_options_are_right(
    flags: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a wrong option nothing is printed on stdout."""
    monkeypatch.setattr("engine.api.processes.server.serve", lambda *_: 0)
    assert main(["serve", *flags]) == (2 if flags else 0)
    told = "No MODEL given; serving the bundled demo model as 'box'.\n"
    assert capsys.readouterr().out == ("" if flags else told)


def test_every_command_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Each command's line fits a terminal of 80 columns, next to its name."""
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    for name, summary in [("serve", SERVE), *((one.name, one.summary) for one in COMMANDS)]:
        assert re.search(rf"^ +{name} +{re.escape(summary)}$", shown, re.MULTILINE), name


def test_the_help_of_serve_shows_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    """Defaults are shown, and only for flags that have one."""
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "(default: 8000)" in text
    assert "(default: None)" not in text
    assert "(default: continuum)" in text


def test_a_reader_may_leave_early() -> None:
    """If the reader of a pipe ends early, as ``| head`` does, there is no traceback, and the shells' exit
    code."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "continuum.cli", "workload", "synthetic"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        ["workload", "bfcl", "--jobs", "3"],
        ["workload", "bfcl", "--jobs", "300", "--json"],
        ["simulate", "--workload", "bfcl", "--jobs", "2", "--processes", "1"],
        ["trace", "schema"],
    ],
)
@pytest.mark.parametrize(
    ("output", "told"), [(">/dev/full", "No space left on device"), (">&-", "standard output is closed")]
)
def test_an_answer_that_cannot_be_written_is_one_sentence(command: list[str], output: str, told: str) -> None:
    """A failed write to stdout is an error without a traceback, never silent."""
    shell = f'exec "$@" {output}'
    line = ["sh", "-c", shell, "sh", sys.executable, "-m", "continuum.cli", *command]
    done = subprocess.run(line, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, f"continuum: Cannot write the output: {told}.\n")


@pytest.mark.parametrize("command", [["--help"], ["--version"], ["serve", "--help"]])
def test_help_that_cannot_be_written_is_one_sentence(command: list[str]) -> None:
    line = ["sh", "-c", 'exec "$@" >/dev/full', "sh", sys.executable, "-m", "continuum.cli", *command]
    done = subprocess.run(line, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "continuum: Cannot write the output: No space left on device.\n"


def test_help_and_version_are_light() -> None:
    """Help and version load neither torch nor the web server."""
    code = (
        "import sys\nfrom continuum.cli.main import main\n"
        "try: main(['--version'])\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'sklearn', 'uvicorn', 'fastapi', 'zmq'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()[0]) == (0, "continuum"), done.stderr


def test_what_a_fault_report_needs_names_versions_but_no_secrets(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CONTINUUM_API_KEY", "top-secret")
    assert main(["collect-env"]) == 0
    told = capsys.readouterr().out
    assert f"continuum-engine: {package_version()}" in told
    assert re.search(r"^msgspec: \d", told, re.MULTILINE)
    assert "CONTINUUM_API_KEY" in told
    assert "top-secret" not in told
