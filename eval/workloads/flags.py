"""The flags for the choice and the arrivals of jobs, for the commands that run jobs."""

from __future__ import annotations

from argparse import _ActionsContainer

from eval.arguments import count, positive
from eval.workloads.arrivals import ARRIVALS


def add_jobs(parser: _ActionsContainer) -> None:
    """Adds ``--workload``, ``--jobs`` and ``--max-turns``."""
    parser.add_argument(
        "--workload",
        required=True,
        metavar="FILE",
        help="Jobs to run: a file, a synthetic workload, or a mix A+B; see continuum workload --help",
    )
    parser.add_argument("--jobs", type=count, metavar="N", help="Number of jobs to run (default: all)")
    add_max_turns(parser)


def add_max_turns(parser: _ActionsContainer) -> None:
    """Adds ``--max-turns``."""
    parser.add_argument("--max-turns", type=count, metavar="N", help="Cut jobs after N turns (default: all)")


def add_arrivals(parser: _ActionsContainer) -> None:
    """Adds ``--arrivals`` and ``--burstiness``."""
    parser.add_argument(
        "--arrivals",
        choices=ARRIVALS,
        help="Job arrival process (default: poisson with --rate, closed with --concurrency, or at-once)",
    )
    parser.add_argument(
        "--burstiness",
        type=positive,
        default=1.0,
        metavar="CV",
        help="Coefficient of variation of inter-arrival times, with --arrivals bursty",
    )
