"""The real scheduler driving the real executor, and transformers' own ``generate`` to compare with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM

from engine.clock import ManualClock
from engine.config.engine_config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from engine.core.policy import FcfsPolicy
from engine.core.request import Request, RequestStatus
from engine.core.scheduler import Scheduler
from engine.model_executor import model_executor
from engine.records.messages import TokenLogprobs
from engine.records.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


def random_tokens(count: int, seed: int, vocab_size: int = 500) -> list[int]:
    """A random prompt."""
    tokens: list[int] = torch.randint(
        0, vocab_size, (count,), generator=torch.Generator().manual_seed(seed)
    ).tolist()
    return tokens


def continued(model: Any, prompt: list[int], max_tokens: int, **inputs: torch.Tensor) -> list[int]:
    """The tokens with which a model of transformers continues a prompt, each the most likely."""
    input_ids = torch.tensor([prompt], device=model.device)
    output = model.generate(
        input_ids=input_ids,
        attention_mask=torch.ones_like(input_ids),
        **inputs,
        max_new_tokens=max_tokens,
        do_sample=False,
        eos_token_id=None,
    )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


class Reference:
    """transformers' own model of a folder, in the folder's type."""

    def __init__(self, folder: Path, device: str = "cpu", code: Any = AutoModelForCausalLM) -> None:
        """``code``: the class of transformers that reads the folder."""
        self.model = code.from_pretrained(folder).to(device)

    def greedy(self, prompt: list[int], max_tokens: int) -> list[int]:
        return continued(self.model, prompt, max_tokens)

    def routed_experts(self, token_ids: list[int]) -> npt.NDArray[np.uint8]:
        """The routers' choices for all tokens but the last: [num_tokens - 1, num_layers, per token], 0 in
        layers without experts."""
        layers = self.model.model.layers
        chosen: dict[int, npt.NDArray[np.int64]] = {}
        for index, layer in enumerate(layers):
            mlp = layer.feed_forward if hasattr(layer, "feed_forward") else layer.mlp
            router = getattr(mlp, "gate", getattr(mlp, "router", None))
            if router is not None:
                router.register_forward_hook(
                    lambda router, _given, made, index=index: chosen.update(
                        {index: _chosen(made[-1], router.top_k).numpy()}
                    )
                )
        with torch.inference_mode():
            self.model(torch.tensor([token_ids[:-1]]))
        per_token = next(iter(chosen.values())).shape[1]
        experts = np.zeros((len(token_ids) - 1, len(layers), per_token), np.uint8)
        for index, numbers in chosen.items():
            experts[:, index] = numbers
        return experts


def _chosen(told: torch.Tensor, per_token: int) -> torch.Tensor:
    """The experts [num_tokens, per_token] that a router chooses, returned as such or as logits."""
    return told if told.dtype == torch.long else told.topk(per_token).indices


def _cache(block_size: int, num_blocks: int, num_state_slots: int | None) -> CacheConfig:
    return CacheConfig(
        block_size=block_size, num_gpu_blocks_override=num_blocks, num_state_slots=num_state_slots
    )


class SmallEngine:
    """Takes requests and returns tokens; counts the scheduler's actions."""

    def __init__(
        self,
        folder: Path,
        *,
        num_blocks: int = 64,
        num_state_slots: int | None = None,
        block_size: int = 8,
        max_model_len: int = 128,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 256,
        device: str = "cpu",
        dtype: str = "auto",
        model_impl: str = "auto",
        enforce_eager: bool = False,
        disable_cascade_attn: bool = True,
        tensor_parallel_size: int = 1,
        enable_expert_parallel: bool = False,
    ) -> None:
        self._clock = ManualClock()
        limits = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
        self.executor = model_executor(
            EngineConfig(
                model=ModelConfig(
                    model=str(folder),
                    device=device,
                    dtype=dtype,
                    max_model_len=max_model_len,
                    model_impl=model_impl,
                    enforce_eager=enforce_eager,
                    disable_cascade_attn=disable_cascade_attn,
                    tensor_parallel_size=tensor_parallel_size,
                    enable_expert_parallel=enable_expert_parallel,
                ),
                cache=_cache(block_size, num_blocks, num_state_slots),
                scheduler=limits,
            )
        )
        self.scheduler = Scheduler(
            limits,
            block_size=block_size,
            num_blocks=self.executor.info.num_gpu_blocks,
            num_states=self.executor.info.num_states,
            max_model_len=max_model_len,
            policy=FcfsPolicy(),
            kv_cache_groups=self.executor.info.kv_cache_groups,
        )
        self.requests: dict[str, Request] = {}
        self.logprobs: dict[str, list[TokenLogprobs]] = {}
        self.num_chunked_steps = 0

    def add(self, request_id: str, prompt: list[int], params: SamplingParams = GREEDY) -> None:
        request = Request(
            request_id,
            prompt,
            params,
            self._clock.now(),
            block_hasher=self.scheduler.request_block_hasher,
        )
        self.requests[request_id] = request
        self.scheduler.add_request(request, self._clock.now())

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests([request_id], RequestStatus.FINISHED_ABORTED, self._clock.now())

    def step(self) -> None:
        plan = self.scheduler.schedule(self._clock.now())
        output = self.executor.submit(plan).result()
        self.num_chunked_steps += sum(
            not tokens and plan.num_scheduled_tokens[req_id] > 1
            for req_id, tokens in zip(output.req_ids, output.sampled_token_ids, strict=True)
        )
        self._clock.advance(0.01)
        for core_output in self.scheduler.update_from_output(plan, output, self._clock.now()):
            if core_output.new_logprobs:
                self.logprobs.setdefault(core_output.request_id, []).extend(core_output.new_logprobs)

    def run(self, max_steps: int = 2000) -> dict[str, list[int]]:
        """Runs steps until no request is left; returns the output tokens of every request so far."""
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished_requests():
                return {request_id: request.output_token_ids for request_id, request in self.requests.items()}
            self.step()
        raise AssertionError(f"no end after {max_steps} steps")

    def generate(self, prompt: list[int], params: SamplingParams = GREEDY) -> list[int]:
        """Runs one request alone."""
        request_id = f"alone-{len(self.requests)}"
        self.add(request_id, prompt, params)
        return self.run()[request_id]

    @property
    def num_preemptions(self) -> int:
        return sum(request.num_preemptions for request in self.requests.values())

    @property
    def num_cached_tokens(self) -> int:
        return sum(request.num_cached_tokens or 0 for request in self.requests.values())
