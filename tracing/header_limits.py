"""Limits of the numbers in a trace's header, which other modules divide by and size an engine by."""

from __future__ import annotations

from tracing.events import TraceHeader

MAX_BLOCKS = 10_000_000
"""Maximum number of blocks of a pool, as in a simulation: a replay tracks each."""
MAX_COPIES = 100_000_000
"""Maximum number of blocks of host memory or disk."""
MAX_COUNT = 2**31 - 1
MAX_GROUPS = 1000
"""Maximum number of KV cache groups."""
MIN_STATES = 3
"""Minimum number of usable state slots of a model with states."""
MAX_SECONDS = 1e11
"""More seconds than any calendar date needs."""

LIMITS: dict[str, tuple[float, float]] = {
    "wall_time_s": (0, MAX_SECONDS),
    "monotonic_s": (-MAX_SECONDS, MAX_SECONDS),
    "block_size": (0, 1 << 20),
    "num_blocks": (0, MAX_BLOCKS),
    "num_states": (0, MAX_BLOCKS),
    "state_blocks": (0, MAX_BLOCKS),
    "num_host_blocks": (0, MAX_COPIES),
    "min_load_tokens": (0, MAX_COUNT),
    "num_disk_blocks": (0, MAX_COPIES),
    "max_disk_writes": (0, MAX_COUNT),
    "disk_fixed_tokens": (0, MAX_COUNT),
    "disk_read_share": (0, MAX_COUNT),
    "max_model_len": (0, MAX_COUNT),
    "max_num_seqs": (0, MAX_COUNT),
    "max_loras": (0, MAX_COUNT),
    "encoder_cache_size": (0, MAX_COUNT),
    "max_encoder_input_tokens": (0, MAX_COUNT),
    "max_num_batched_tokens": (0, MAX_COUNT),
    "long_prefill_token_threshold": (0, MAX_COUNT),
    "part": (1, MAX_COUNT),
    "num_events_before": (0, 2**53),
}
"""Smallest and largest value by field; 0, where allowed, means not recorded."""


def beyond_limits(header: TraceHeader) -> str | None:
    """A sentence that names an impossible field and its limits; None if all fields are possible."""
    for name, (least, most) in LIMITS.items():
        value = getattr(header, name)
        if not least <= value <= most:
            return f"the header's {name} is {value:,}, but must be {least:,.0f} to {most:,.0f}"
    return _groups_beyond_limits(header)


def _groups_beyond_limits(header: TraceHeader) -> str | None:
    windows = header.kv_group_windows
    chunks = header.kv_group_chunks
    if len(windows) > MAX_GROUPS:
        return f"the header's kv_group_windows are {len(windows):,}, but must be at most {MAX_GROUPS:,}"
    if chunks and len(chunks) != len(windows):
        return f"the header's kv_group_chunks are {len(chunks):,}, but must be {len(windows):,}"
    for name, sizes in (("kv_group_windows", windows), ("kv_group_chunks", chunks)):
        for size in sizes:
            if not 0 <= size <= MAX_COUNT:
                return f"the header's {name} have {size:,}, but must be 0 to {MAX_COUNT:,}"
    if any(window and chunk for window, chunk in zip(windows, chunks, strict=False)):
        return "a group in the header has both a window and chunks"
    if header.num_states and not (header.state_blocks and header.num_states >= MIN_STATES):
        return (
            f"the header's num_states are {header.num_states:,} of {header.state_blocks:,} blocks each, "
            f"but must be at least {MIN_STATES:,} of at least 1"
        )
    return None


def not_told(header: TraceHeader, *names: str) -> str | None:
    """A sentence that names the first of these fields that is missing or 0; None if there is none."""
    for name in names:
        if not getattr(header, name):
            return f"the header's {name} is 0, but must be at least 1"
    return None
