"""Which memory a model and its agents take on a GPU."""

from __future__ import annotations

import msgspec

from engine.records.kv_cache_groups import attention_groups, num_blocks_held
from eval.errors import UsageError
from eval.sim.hardware import parameter_bytes
from eval.sim.kv_sizes import KvSizes
from eval.sim.model_folder import find_model
from eval.sim.roofline import RooflineCost
from eval.sim.simulate import KV_BYTES, STATES_PER_SEQ, Hardware

BLOCK_SIZE = 16


class Memory(msgspec.Struct, kw_only=True):
    """Sizes in bytes unless stated."""

    hardware: str
    num_gpus: int
    weight_bytes: int
    kv_bytes_per_token: int
    """KV of all attention layers."""
    state_bytes: int
    """One state of all layers that have states; 0 without any."""
    kv_tokens: int
    """Tokens whose KV fits beside the weights, of a pool without states."""
    agent_bytes: int
    """KV and states that an agent holds at its full context."""
    agents: int
    """Agents at their full context that the pool holds."""
    host_bytes: int
    """Host memory for the KV of those agents beyond; 0 if all fit."""


def memory_of(hardware: Hardware, context: int, agents: int | None) -> Memory:
    """The memory of agents with this context in tokens. UsageError if not even one of them fits."""
    cost, kv_tokens = hardware.cost()
    assert isinstance(cost, RooflineCost)
    model = find_model(hardware.model)
    groups = hardware.kv_cache_groups(BLOCK_SIZE)
    attention = attention_groups(groups)
    sizes = KvSizes(BLOCK_SIZE, tuple(attention))
    held = num_blocks_held(attention, BLOCK_SIZE, -(-context // BLOCK_SIZE))
    state_bytes = model.state_bytes(KV_BYTES)
    agent_bytes = sizes.num_tokens(held) * cost.kv_bytes_per_token
    agent_bytes += state_bytes * STATES_PER_SEQ // 2  # what it may need while it runs
    fitting = kv_tokens * cost.kv_bytes_per_token // agent_bytes
    if not fitting:
        raise UsageError(
            f"An agent at {context:,} tokens needs {agent_bytes / 2**30:.1f} GiB of KV, and "
            f"{cost.describe()} has room for {kv_tokens:,} tokens: lower --context, or raise "
            "--tensor-parallel."
        )
    missing = 0 if agents is None else max(0, agents - fitting)
    return Memory(
        hardware=cost.describe(),
        num_gpus=cost.tensor_parallel,
        weight_bytes=model.total_params * parameter_bytes(hardware.dtype),
        kv_bytes_per_token=cost.kv_bytes_per_token,
        state_bytes=state_bytes,
        kv_tokens=kv_tokens,
        agent_bytes=agent_bytes,
        agents=fitting,
        host_bytes=missing * agent_bytes,
    )
