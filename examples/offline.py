"""Two turns of one job without a server: the second one finds the first one's KV in the prefix cache.

python examples/offline.py MODEL_FOLDER
"""

import sys

from continuum.policy import ContinuumPolicy
from engine import LLM, SamplingParams
from engine.records.messages import JobRef


def main(model: str) -> None:
    job, params = JobRef("issue-1234"), SamplingParams(temperature=0, max_tokens=32)
    with LLM(model, scheduling_policy=ContinuumPolicy) as llm:
        history = "The first turn of a job, long enough to fill some blocks of the KV cache. " * 4
        for said in ("", " What the tool returned."):
            history += said
            (output,) = llm.generate(history, params, jobs=job, use_tqdm=False)
            history += output.outputs[0].text
            print(f"{output.num_cached_tokens} of {len(output.prompt_token_ids)} prompt tokens were cached")


if __name__ == "__main__":
    main(sys.argv[1])
