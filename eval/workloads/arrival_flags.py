"""The flags of job arrivals, shared by the commands that send jobs. Each has a ``--rate`` of its own."""

from __future__ import annotations

from argparse import _ActionsContainer

from eval.arguments import positive
from eval.workloads.arrivals import ARRIVALS


def add_arrivals(parser: _ActionsContainer) -> None:
    """``--arrivals`` and ``--burstiness``."""
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
