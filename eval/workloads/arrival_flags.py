"""The flags that say how jobs arrive, for commands that send them. At which rate is theirs to ask."""

from __future__ import annotations

from argparse import _ActionsContainer

from eval.arguments import positive
from eval.workloads.arrivals import ARRIVALS


def add_arrivals(parser: _ActionsContainer) -> None:
    """``--arrivals`` and ``--burstiness``."""
    parser.add_argument(
        "--arrivals", choices=ARRIVALS, help="poisson with --rate, closed with --concurrency, else at-once"
    )
    parser.add_argument(
        "--burstiness",
        type=positive,
        default=1.0,
        metavar="CV",
        help="of bursty arrivals: sd / mean of the time between two",
    )
