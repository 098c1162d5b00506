"""The pool and the queue over time, in a bounded number of buckets however long the trace is."""

from __future__ import annotations

from dataclasses import dataclass

from eval.trace.analysis.pool import PoolState, StepLife, stretches
from eval.trace.page.page_data import Series

MAX_BUCKETS = 2048
FIRST_BUCKET_S = 0.001


class OutOfOrderError(Exception):
    """The times of a trace run backwards."""

    def __init__(self, step: StepLife, what: str) -> None:
        super().__init__(
            f"step {step.step} {what}: continuum trace validate names the lines that are out of order"
        )


@dataclass(slots=True)
class _Bucket:
    """Sums over the known seconds of a bucket; each value except the peak is multiplied by its seconds."""

    seconds: float = 0.0
    running: float = 0.0
    pinned: float = 0.0
    cached: float = 0.0
    free: float = 0.0
    num_running: float = 0.0
    num_waiting: float = 0.0
    num_loading: float = 0.0
    peak_waiting: int = 0

    def add(self, state: PoolState, seconds: float) -> None:
        self.seconds += seconds
        self.running += state.running * seconds
        self.pinned += state.pinned * seconds
        self.cached += state.cached * seconds
        self.free += state.free * seconds
        self.num_running += state.num_running * seconds
        self.num_waiting += state.num_waiting * seconds
        self.num_loading += state.num_loading * seconds
        self.peak_waiting = max(self.peak_waiting, state.num_waiting)

    def merge(self, other: _Bucket) -> None:
        self.seconds += other.seconds
        self.running += other.running
        self.pinned += other.pinned
        self.cached += other.cached
        self.free += other.free
        self.num_running += other.num_running
        self.num_waiting += other.num_waiting
        self.num_loading += other.num_loading
        self.peak_waiting = max(self.peak_waiting, other.peak_waiting)


class PoolSeries:
    """Takes steps in order; merges neighboring buckets when there are too many."""

    def __init__(self) -> None:
        self.tells_cached = True
        """False: the trace does not report how much of the free memory is cached; all counts as cached."""
        self._bucket_s = FIRST_BUCKET_S
        self._began_s: float | None = None
        self._buckets: list[_Bucket] = []
        self._before: StepLife | None = None

    def add(self, step: StepLife) -> None:
        """Takes a step. OutOfOrderError if it begins before the previous one, or ends before it begins."""
        if self._before is not None and step.now < self._before.now:
            raise OutOfOrderError(step, f"begins earlier than step {self._before.step}")
        if step.ended_s is not None and step.ended_s < step.now:
            raise OutOfOrderError(step, "ends before it begins")
        if step.empty_blocks is None:
            self.tells_cached = False
        if self._began_s is None:
            self._began_s = step.now
        if self._before is not None:
            self._take(self._before, step)
        self._before = step

    def close(self) -> None:
        """Called after the last step. The state after the last one's result is unknown."""
        if self._before is not None:
            self._take(self._before, None)

    def _take(self, step: StepLife, following: StepLife | None) -> None:
        for state, from_s, until_s in stretches(step, following):
            self._spread(state, from_s, until_s)

    def _spread(self, state: PoolState, from_s: float, until_s: float) -> None:
        assert self._began_s is not None
        start_s = from_s - self._began_s
        end_s = until_s - self._began_s
        while end_s > self._bucket_s * MAX_BUCKETS:
            self._halve()
        index = int(start_s / self._bucket_s)
        self._reach(index)
        while end_s > (bucket_end_s := (index + 1) * self._bucket_s):
            self._buckets[index].add(state, bucket_end_s - start_s)
            start_s = bucket_end_s
            index += 1
            self._reach(index)
        self._buckets[index].add(state, max(0.0, end_s - start_s))

    def _reach(self, index: int) -> None:
        while len(self._buckets) <= index:
            self._buckets.append(_Bucket())

    def _halve(self) -> None:
        self._bucket_s *= 2
        pairs = self._buckets[::2]
        for bucket, following in zip(pairs, self._buckets[1::2], strict=False):
            bucket.merge(following)
        self._buckets = pairs

    def series(self, origin_s: float) -> Series:
        """Returns the series; times count from ``origin_s``."""
        began_s = (self._began_s or 0.0) - origin_s
        known = [(index, bucket) for index, bucket in enumerate(self._buckets) if bucket.seconds > 0]

        def means(name: str) -> list[float]:
            return [round(getattr(bucket, name) / bucket.seconds, 2) for _, bucket in known]

        return Series(
            bucket_s=self._bucket_s,
            t=[round(began_s + index * self._bucket_s, 4) for index, _ in known],
            running=means("running"),
            pinned=means("pinned"),
            cached=means("cached"),
            free=means("free"),
            num_running=means("num_running"),
            num_waiting=means("num_waiting"),
            num_loading=means("num_loading"),
            peak_waiting=[bucket.peak_waiting for _, bucket in known],
        )
