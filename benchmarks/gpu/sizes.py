"""The size of each section's work: for a GPU, or small enough for Triton's interpreter."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.gpu.shapes import LLAMA_8B, QWEN_06B, TOY_LLAMA, TOY_QWEN, TimedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of everything that is checked and timed."""

    toy: bool
    slack: float
    """Factor on the limits of errors: where a GPU rounds to fewer bits, Triton's interpreter truncates."""
    large: TimedModel
    small: TimedModel
    block_size: int = 16

    copy_bytes: int
    """Bytes of one copy inside the device."""
    host_copy_bytes: int
    matmul_size: int
    num_repeats: int

    decode_batches: tuple[int, ...]
    decode_context: int
    """Tokens of the longest sequence; the others have as many or, in checks, fewer."""
    num_warm_up_steps: int
    steps_per_repeat: int
    prompt_lengths: tuple[tuple[int, int], ...]
    """Pairs (new, cached) of the tokens of prompts whose attention is checked."""
    window: int
    fused_tokens: int
    """Rows of the element-wise kernels."""
    num_draws: int
    """Tokens drawn from one distribution."""
    num_copied_blocks: int

    prefill: int
    turn: tuple[int, int]
    """The pair (new, cached) of the tokens of an agent's turn."""
    history: int
    """Tokens that are loaded back or recomputed."""

    equality_prompts: tuple[int, ...]
    """Lengths of the prompts whose output is compared."""
    equality_tokens: int
    """Tokens generated for each prompt."""
    verified_tokens: int
    """Tokens generated with drafts for each prompt."""
    chunk: int
    """Token budget of a step in ``equality``: splits long prompts into several chunks."""

    idle_sequences: int
    idle_prompt: int
    idle_steps: int

    num_requests: int
    shortest: int
    longest: int
    """Most tokens in, and most tokens out, of the requests for throughput."""
    num_peer_requests: int
    step_tokens: int
    """Token budget of a step where throughput is measured."""


FULL = Sizes(
    toy=False,
    slack=1.0,
    large=LLAMA_8B,
    small=QWEN_06B,
    copy_bytes=2 * 2**30,
    host_copy_bytes=2**30,
    matmul_size=8192,
    num_repeats=5,
    decode_batches=(1, 32, 128),
    decode_context=4096,
    num_warm_up_steps=4,
    steps_per_repeat=32,
    prompt_lengths=((2048, 0), (1000, 3000), (2048, 32_768)),
    window=512,
    fused_tokens=2048,
    num_draws=65_536,
    num_copied_blocks=512,
    prefill=8192,
    turn=(2048, 32_768),
    history=32_768,
    equality_prompts=(1, 17, 100, 513, 1500, 1500, 64, 700),
    equality_tokens=48,
    verified_tokens=32,
    chunk=512,
    idle_sequences=64,
    idle_prompt=1024,
    idle_steps=48,
    num_requests=256,
    shortest=100,
    longest=1024,
    num_peer_requests=64,
    step_tokens=16_384,
)
TOY = Sizes(
    toy=True,
    slack=5.0,
    large=TOY_LLAMA,
    small=TOY_QWEN,
    copy_bytes=2**20,
    host_copy_bytes=2**20,
    matmul_size=64,
    num_repeats=1,
    decode_batches=(1, 2),
    decode_context=24,
    num_warm_up_steps=1,
    steps_per_repeat=1,
    prompt_lengths=((9, 0), (5, 17)),
    window=8,
    fused_tokens=3,
    num_draws=64,
    num_copied_blocks=4,
    prefill=16,
    turn=(4, 16),
    history=32,
    equality_prompts=(1, 34),
    equality_tokens=2,
    verified_tokens=8,
    chunk=16,
    idle_sequences=2,
    idle_prompt=4,
    idle_steps=1,
    num_requests=3,
    shortest=2,
    longest=4,
    num_peer_requests=2,
    step_tokens=64,
)
