"""Scores the bundled model on unseen tasks: ``python -m benchmarks.agent_model.evaluate``."""

from __future__ import annotations

import argparse
import sys
from itertools import islice

from engine.errors import EngineError
from eval.agent_model import folder
from eval.agent_model.drawing import draw_tasks
from eval.agents.evaluate import add_arguments, run
from eval.arguments import count

NUM_TASKS = 200


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.agent_model.evaluate", description=__doc__)
    add = parser.add_argument
    add("--tasks", type=count, default=NUM_TASKS, metavar="N", help="Number of tasks (default: %(default)s)")
    add("--seed", type=int, default=1, metavar="K", help="Random seed of the tasks (default: %(default)s)")
    add_arguments(parser)
    args = parser.parse_args(argv)
    try:
        return run(args, list(islice(draw_tasks(args.seed, held_out=True), args.tasks)), folder())
    except EngineError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
