"""A request with a known length only: what the real scheduler sees in a simulation."""

from __future__ import annotations

from typing import cast

from engine.core.kv_cache.block_hash import BlockHash
from engine.core.request import Request
from engine.records.messages import JobRef
from engine.records.sampling_params import SamplingParams

TOKEN_IDS = [0]
"""The sampled tokens of a request in every simulated step."""


class SimRequest(Request):
    """Counts tokens instead of holding them; its block hashes are given, not computed."""

    __slots__ = ("_block_size", "chain", "is_prefilled", "num_tokens")

    chain: list[BlockHash]
    """Hashes of all full blocks of prompt and output."""
    is_prefilled: bool
    """Whether the KV of its prompt is fetched from a replica that has computed it."""
    num_tokens: int
    """A slot instead of a property: it is read in every step."""

    def __init__(
        self,
        request_id: str,
        *,
        num_prompt_tokens: int,
        num_output_tokens: int,
        chain: list[BlockHash],
        block_size: int,
        arrival_time: float,
        job: JobRef | None,
        priority: int = 0,
    ) -> None:
        params = SamplingParams(max_tokens=num_output_tokens, ignore_eos=True)
        super().__init__(request_id, [], params, arrival_time, priority=priority, job=job)
        # As long as the request will get: slices of the prompt are taken from it, the rest is not read.
        self.all_token_ids = cast(list[int], range(num_prompt_tokens + num_output_tokens))
        self.num_prompt_tokens = num_prompt_tokens
        self.num_tokens = num_prompt_tokens
        self.is_prefilled = False
        self._block_size = block_size
        self.chain = chain
        self.block_hashes = chain[: num_prompt_tokens // block_size]

    def prompt_only(self) -> SimRequest:
        """Returns the same prompt with one token of output."""
        return SimRequest(
            self.request_id,
            num_prompt_tokens=self.num_prompt_tokens,
            num_output_tokens=1,
            chain=self.chain,
            block_size=self._block_size,
            arrival_time=self.arrival_time,
            job=self.job,
            priority=self.priority,
        )

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    def append_output_token(self, token_id: int) -> None:
        self.num_tokens += 1
        if not self.num_tokens % self._block_size:
            self.block_hashes.append(self.chain[self.num_tokens // self._block_size - 1])
