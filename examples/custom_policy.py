"""A scheduling policy of your own: the shortest prompt goes first, the longest is preempted.

python examples/custom_policy.py MODEL_FOLDER
"""

import sys
from collections.abc import Sequence

from engine import LLM, SamplingParams
from engine.core.policy import FcfsPolicy, WaitingKey
from engine.core.request import Request
from engine.frontend.request_output import RequestOutput


class ShortestPromptFirst(FcfsPolicy):
    name = "shortest-prompt"

    def waiting_key(self, request: Request, now: float) -> WaitingKey:
        return (request.num_prompt_tokens, request.arrival_time)

    def victim(self, running: Sequence[Request], requester: Request, now: float) -> Request:
        return max(reversed(running), key=lambda request: self.waiting_key(request, now))


def main(model: str) -> None:
    prompts = ["A long prompt, which can wait. " * 20, "A short one."]
    # One place in the batch, and both prompts are there before the first step: the order is the policy's.
    policy = "custom_policy:ShortestPromptFirst"
    with LLM(model, scheduling_policy=policy, multiprocess=False, max_num_seqs=1) as llm:
        outputs = llm.generate(prompts, SamplingParams(max_tokens=4), use_tqdm=False)
    print(f"first to run: {min(outputs, key=first_token_s).prompt}")


def first_token_s(output: RequestOutput) -> float:
    assert output.metrics is not None
    return output.metrics.first_token_time or float("inf")


if __name__ == "__main__":
    main(sys.argv[1])
