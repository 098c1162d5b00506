"""A scheduling policy of your own: the shortest prompt goes first. Any method of FcfsPolicy may be replaced.

python examples/custom_policy.py MODEL_FOLDER
"""

import sys

from engine.llm import LLM
from engine.policy import FcfsPolicy, PolicyContext, SchedulingPolicy, WaitingKey
from engine.request import Request
from engine.request_output import RequestOutput
from engine.sampling_params import SamplingParams


class ShortestPromptFirst(FcfsPolicy):
    name = "shortest-prompt"

    def waiting_key(self, request: Request, now: float) -> WaitingKey:
        return (request.num_prompt_tokens, request.arrival_time)


def shortest_prompt_first(context: PolicyContext) -> SchedulingPolicy:
    """Called once in the engine core's process, so it has to be picklable: a function of a module."""
    return ShortestPromptFirst()


def main(model: str) -> None:
    prompts = ["A long prompt, which can wait. " * 20, "A short one."]
    # One seat in the batch, and the core in this process: its finish order is the policy's.
    with LLM(model, policy_factory=shortest_prompt_first, multiprocess=False, max_num_seqs=1) as llm:
        outputs = llm.generate(prompts, SamplingParams(max_tokens=4), use_tqdm=False)
    print(f"first to run: {min(outputs, key=first_token_s).prompt}")


def first_token_s(output: RequestOutput) -> float:
    assert output.metrics is not None
    return output.metrics.first_token_time or float("inf")


if __name__ == "__main__":
    main(sys.argv[1])
