"""``python -m benchmarks.drafts``: measures the gain of drafts on recorded texts, without a model.

Replays the turns of recorded jobs with the recorded text as the model's output, and counts how many tokens
each step would have generated. Prints a table per drafter and kind of turn, and the time of drafting. With
``--model`` a model generates the turns that write or edit files, and tokens per second are compared.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.drafts import speed
from benchmarks.drafts.contenders import contenders
from benchmarks.drafts.replay import replay
from benchmarks.drafts.table import as_json, goals, table
from benchmarks.drafts.texts import SpokenJob, load_encode, spoken
from engine.config.speculative import MAX_SPECULATIVE_TOKENS, SpeculativeConfig
from engine.errors import EngineError
from eval import agent_model
from eval.arguments import count
from eval.workloads.recorded import read_recorded

NUM_JOBS = 6
"""Jobs of a sample: about half a minute."""
AT_ONCE = 8
BATCHES = (1, 8, 32)


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        jobs = _read(args)
    except EngineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.model is not None:
        print(speed.table([*speed.measure(args.model, jobs, args.batches, args.rounds, args.context)]))
        return 0
    replayed = []
    for contender in contenders(args.drafts):
        print(f"replaying {len(jobs)} jobs: {contender.name}", file=sys.stderr, flush=True)
        replayed.append(replay(jobs, contender, args.drafts, args.at_once))
    print(table(replayed), goals(replayed), sep="\n\n")
    if args.json is not None:
        args.json.write_text(json.dumps(as_json(replayed), indent=1) + "\n")
    return 0


def _read(args: argparse.Namespace) -> list[SpokenJob]:
    """Returns jobs that have texts, all or an even sample. WorkloadError without jobs or tokenizer."""
    encode, vocab_size = load_encode(args.tokenizer)
    jobs, _ = read_recorded(args.recording)
    jobs = [job for job in jobs if job.has_text]
    if not args.all and len(jobs) > args.jobs:
        jobs = [jobs[i * len(jobs) // args.jobs] for i in range(args.jobs)]
    return spoken(jobs, encode, vocab_size)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.drafts", description=__doc__)
    parser.add_argument("recording", type=Path, help="file of recorded jobs with texts")
    parser.add_argument(
        "--tokenizer",
        default=str(agent_model.folder()),
        help="folder with a tokenizer.json, or the name of one of tiktoken's encodings, which it downloads "
        "(default: the bundled agent model's, whose tokens are short)",
    )
    parser.add_argument("--jobs", type=count, default=NUM_JOBS, help="jobs to replay (default: %(default)s)")
    parser.add_argument("--all", action="store_true", help="replay all jobs (minutes)")
    parser.add_argument(
        "--at-once", type=count, default=AT_ONCE, help="jobs that take turns (default: %(default)s)"
    )
    parser.add_argument(
        "--drafts",
        type=count,
        default=SpeculativeConfig().num_speculative_tokens,
        choices=range(1, MAX_SPECULATIVE_TOKENS + 1),
        metavar="N",
        help="most drafts in a step (default: %(default)s)",
    )
    parser.add_argument(
        "--model",
        type=Path,
        help="measure decode speed with this folder instead (minutes), whatever it knows",
    )
    parser.add_argument(
        "--batches", type=count, nargs="+", default=BATCHES, help="requests at a time (default: 1 8 32)"
    )
    parser.add_argument("--rounds", type=count, default=3, help="batches of each size (default: %(default)s)")
    parser.add_argument(
        "--context", type=count, default=2048, help="tokens of a prompt, at most (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, help="write the counts to this file")
    return parser
