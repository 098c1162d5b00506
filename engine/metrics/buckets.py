"""Upper bounds of histograms. Those of V1's metrics are V1's."""

from __future__ import annotations

TTFT_BUCKETS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
ITL_BUCKETS_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
LATENCY_BUCKETS_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
GAP_BUCKETS_S = (
    *(0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0),
    *(20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0),
)
JOB_BUCKETS_S = (
    *(1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0),
    *(1200.0, 1800.0, 3600.0, 7200.0, 21600.0, 86400.0),
)
BLOCK_LIFE_BUCKETS_S = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0),
    *(60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0),
)
ITERATION_BUCKETS = tuple(float(2**power) for power in range(15))
TURN_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0)
N_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0)


def token_buckets(limit: int) -> tuple[float, ...]:
    """1-2-5 steps up to ``limit``."""
    steps = [float(digit * 10**power) for power in range(len(str(limit))) for digit in (1, 2, 5)]
    return tuple(step for step in steps if step <= limit)
