"""The flags of ``continuum serve`` stay readable: few, grouped, explained, and the usual ones first."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys

import pytest

from continuum.cli.main import main
from continuum.cli.serve_flags import EXPERIMENTAL, SHORT_HELP, add_serve_arguments

MAX_FLAGS = 94
"""A new flag replaces another one, or needs a line in ``REASONS``."""
REASONS: dict[str, str] = {
    "--api-key-file": "Quotas are the operator's; a file can change while the server runs.",
    "--access-log": "Who may read who asked what, only an operator knows.",
    "--kv-handover-path": "Which folder the servers share, and whether it has room, only an operator knows.",
    "--job-headers": "Gateways name sessions in headers of their own; which, only their operator knows.",
    "--max-first-wait-s": "Only an operator knows how long clients may wait before they ask elsewhere.",
    "--learn-order": "A trainer takes a core for seconds; whether one is to spare only its operator knows.",
    "--enable-expert-parallel": "V1's; which way is faster depends on the model and the devices.",
    "--enable-return-routed-experts": "V1's; what trainers that replay routers ask a server for.",
    "--disable-hybrid-kv-cache-manager": "V1's; without it nobody can compare, or go round a fault.",
    "--speculative-config": "V1's, one JSON for all methods; which pays depends on model, load and texts.",
    "--kv-events-config": "V1's, one JSON: routers read the events; ports and queues are theirs to choose.",
    "--distributed-executor-backend": "V1's; whether ranks are on one machine only its operator knows.",
    "--pipeline-parallel-size": "V1's; how fast the network between machines is only its operator knows.",
    "--stream-interval": "V1's; how smooth a stream is, or how cheap, is its readers' to say.",
    "--kv-transfer-config": "V1's, one JSON: which server computes prompts, and where it is.",
    "--num-state-slots": "How much memory states get beside KV blocks; which is best depends on the load.",
    "--data-parallel-size": "V1's; how many cores is a matter of money.",
    "--data-parallel-size-local": "V1's; what is on which machine only its operator knows, as with the next.",
    "--data-parallel-size-min": "Whether a server begins small or waits for all is its operator's choice.",
    "--data-parallel-start-rank": "V1's.",
    "--data-parallel-address": "V1's.",
    "--data-parallel-rpc-port": "V1's.",
    "--headless": "V1's.",
    "--data-parallel-backend": "V1's; who starts processes on other machines only their operator knows.",
    "--enable-lora": "V1's; what linears are wrapped in is settled before the first adapter comes.",
    "--lora-modules": "V1's; which adapters there are only the operator knows.",
    "--max-loras": "V1's; how many may share a step depends on the load.",
    "--max-lora-rank": "V1's; a limit on what operators of adapters may load.",
    "--kv-cache-metrics": "V1's; following blocks costs a little, and few look at it.",
    "--kv-cache-metrics-sample": "V1's; how exact that is to be depends on the pool and the load.",
    "--max-silent-wait-s": "How long clients wait for a whole answer only their operator knows.",
    "--max-cpu-loras": "V1's; how much memory adapters may take.",
    "--runner": "V1's; a folder of a generating model does not say that it is to pool.",
    "--pooler-config": "V1's; folders without sentence-transformers' files say nothing of pooling.",
    "--skip-tokenizer-init": "V1's; whether its clients send texts only the operator knows.",
    "--hf-overrides": "V1's; what operators type for rerankers whose folders do not say that they are.",
    "--allowed-media-domains": "V1's; which hosts a server may ask only its operator knows.",
    "--mm-processor-cache-gb": "V1's; how much memory pixels may take depends on machine and load.",
    "--limit-mm-per-prompt": "V1's; how many pictures fit depends on the model's context and the agents.",
    "--mm-processor-kwargs": "V1's; how fine pictures are read is a matter of tokens, thus of money.",
    "--language-model-only": "V1's; what operators type who serve such a model as text.",
    "--disable-chunked-mm-input": "V1's; whether pictures are cut between steps changes who waits for whom.",
    "--disable-cascade-attn": "V1's; whether many share a long prefix depends on the load.",
    "--router": "Whoever compares with V1's balancer needs both in one server.",
}
"""Flags beyond the cap, with the reason why neither a config default nor an existing flag would do."""
MAX_SHORT_HELP = 35
MAX_EXPERIMENTAL = 12
MAX_SECTION = 16


def flags() -> list[tuple[str | None, argparse.Action]]:
    """Every flag with the title of its section."""
    parser = argparse.ArgumentParser(add_help=False)
    add_serve_arguments(parser)
    return [(group.title, action) for group in parser._action_groups for action in group._group_actions]


def shown_by(word: str | None, capsys: pytest.CaptureFixture[str]) -> str:
    """The output of ``continuum serve --help[=WORD]``."""
    with pytest.raises(SystemExit) as exit_info:
        main(["serve", "--help" if word is None else f"--help={word}"])
    assert exit_info.value.code == 0
    return capsys.readouterr().out


def names_in(shown: str) -> set[str]:
    """The flags that a help text lists."""
    return set(re.findall(r"^  (?:-\w+ \w+, )?(--[a-z-]+)", shown, re.MULTILINE)) - {"--help"}


def test_there_are_no_more_flags_without_a_reason() -> None:
    names = {name for _, action in flags() for name in action.option_strings if name.startswith("--")}
    assert set(REASONS) <= names
    assert sum(bool(action.option_strings) for _, action in flags()) <= MAX_FLAGS + len(REASONS)


@pytest.mark.parametrize(("title", "action"), flags(), ids=lambda value: getattr(value, "dest", None))
def test_every_flag_has_a_section_and_a_text(title: str | None, action: argparse.Action) -> None:
    """A help text begins with a capital letter and has no full stop: the formatter adds the default."""
    assert title not in (None, "options", "positional arguments"), "give it a FlagGroup"
    text = action.help or ""
    assert re.match(r"[A-Z/]|median-horizon rule|fixed rule", text), text
    assert not text.endswith("."), text
    assert len(text) <= 220 or "deepseek" in text, "shorten it, or move the detail to the docs"


@pytest.mark.parametrize(("title", "action"), flags(), ids=lambda value: getattr(value, "dest", None))
def test_a_flag_says_its_unit(title: str | None, action: argparse.Action) -> None:
    """The help text names the unit, too: a metavar is easily overlooked."""
    unit = {"SECONDS": "second", "BYTES": "byte", "TOKENS": "token", "GIB": "GiB", "FRACTION": "raction"}
    if action.metavar in unit:
        assert unit[str(action.metavar)] in (action.help or "")


def test_a_flag_without_a_default_says_what_happens_without_it() -> None:
    """Exceptions are a path or a socket whose absence changes nothing."""
    nothing = {"uds", "tool_parser_plugin", "kv_offloading_disk_path", "ssl_ca_certs"}
    for _, action in flags():
        if action.default in (None, argparse.SUPPRESS) and action.dest not in nothing:
            assert "(default: " in (action.help or ""), action.dest


def test_the_lists_of_flags_name_flags() -> None:
    known = {action.dest for _, action in flags()}
    assert known >= SHORT_HELP
    assert known >= EXPERIMENTAL
    assert not SHORT_HELP & EXPERIMENTAL
    assert len(SHORT_HELP) <= MAX_SHORT_HELP
    assert len(EXPERIMENTAL) <= MAX_EXPERIMENTAL


def test_no_section_is_too_long_to_scan() -> None:
    titles = [title for title, _ in flags()]
    assert max(titles.count(title) for title in titles) <= MAX_SECTION


def test_the_default_help_is_short_and_names_the_full_one(capsys: pytest.CaptureFixture[str]) -> None:
    shown = shown_by(None, capsys)
    assert names_in(shown) == {"--" + name.replace("_", "-") for name in SHORT_HELP - {"model"}}
    assert "--help=all" in shown
    assert "[experimental]" not in shown


def test_the_full_help_has_every_flag_and_marks_the_experimental(capsys: pytest.CaptureFixture[str]) -> None:
    shown = shown_by("all", capsys)
    known = {
        next(name for name in action.option_strings if name.startswith("--"))
        for _, action in flags()
        if action.option_strings
    }
    assert names_in(shown) == known
    assert " ".join(shown.split()).count(" [experimental]") == len(EXPERIMENTAL) + 1  # one in the last line


@pytest.mark.parametrize(
    ("word", "found"),
    [
        ("offloading", "--kv-offloading-disk-min-tokens"),
        ("horizon_s", "--cold-horizon-s"),
        ("--trace", "--trace-max-files"),
        ("security", "--api-key"),
    ],
)
def test_a_word_finds_flags_and_sections(word: str, found: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = names_in(shown_by(word, capsys))
    assert found in shown
    assert "--port" not in shown


def test_a_word_that_finds_nothing_shows_the_short_help(capsys: pytest.CaptureFixture[str]) -> None:
    """A word that finds nothing, or a model's name after ``--help``, shows the short help."""
    assert shown_by("Qwen/Qwen3-0.6B", capsys) == shown_by(None, capsys)


def test_no_ablation_is_offered_to_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    """Neither serve's help nor its errors list ablations; the simulator lists and accepts them."""
    assert "without-" not in shown_by("all", capsys)
    assert main(["serve", "m", "--scheduling-policy", "lru"]) == 2
    assert "without-" not in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["simulate", "--help"])
    assert "without-order" in capsys.readouterr().out


def test_help_goes_to_stdout() -> None:
    """Help goes to stdout, so that a pager gets it."""
    command = [sys.executable, "-m", "continuum.cli.main", "serve", "--help=all"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--kv-cache-scale" in done.stdout
