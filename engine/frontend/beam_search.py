"""Beam search over ``LLM.generate``, as in V1: a step of all beams is a batch of requests for one token,
whose prompts are in the prefix cache."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

from engine.errors import RequestError
from engine.frontend.request_output import PositionLogprobs, RequestOutput
from engine.records.sampling_params import MAX_LOGPROBS, SamplingParams

MAX_BEAMS = MAX_LOGPROBS // 2
"""Maximum number of beams. Twice as many candidates are considered per beam, because some of them may end
it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """V1's names and defaults. ``verify()`` raises RequestError naming field and limit."""

    beam_width: int
    """Number of beams that are kept at each step, and of sequences that are returned."""
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    """Has no effect: candidates are the most probable tokens of the model's own distribution."""
    length_penalty: float = 1.0
    """A sequence's score is the sum of its log-probabilities / (its tokens ** length_penalty)."""

    def verify(self) -> None:
        if not 1 <= self.beam_width <= MAX_BEAMS:
            raise RequestError(
                f"beam_width must be in [1, {MAX_BEAMS}], got {self.beam_width}.", "beam_width"
            )
        if self.max_tokens < 1:
            raise RequestError(f"max_tokens must be at least 1, got {self.max_tokens}.", "max_tokens")


@dataclass(slots=True)
class BeamSearchSequence:
    """One of the best sequences of a prompt."""

    tokens: list[int]
    """The tokens of the prompt and the generated ones."""
    logprobs: list[PositionLogprobs]
    """The candidates of each step."""
    cum_logprob: float = 0.0
    """Sum over the generated tokens."""
    text: str = ""
    """The text of all tokens."""
    finish_reason: str | None = None
    """``stop`` (at EOS) | ``length``."""


@dataclass(slots=True)
class BeamSearchOutput:
    """The sequences of one prompt, the best first."""

    sequences: list[BeamSearchSequence]


@dataclass(slots=True)
class _Search:
    """The search from one prompt."""

    params: BeamSearchParams
    eos_token_ids: Collection[int]
    beams: list[BeamSearchSequence]
    ended: list[BeamSearchSequence] = field(default_factory=list)

    def advance(self, outputs: list[RequestOutput]) -> None:
        """Takes the best continuations of all beams; ``outputs`` has one per beam."""
        going_on: list[BeamSearchSequence] = []
        for beam, output in zip(self.beams, outputs, strict=True):
            for longer in _continued(beam, output):
                ends = longer.tokens[-1] in self.eos_token_ids and not self.params.ignore_eos
                longer.finish_reason = "stop" if ends else None
                (self.ended if ends else going_on).append(longer)
        self.beams = self._best(going_on)

    def finish(self) -> list[BeamSearchSequence]:
        for beam in self.beams:
            beam.finish_reason = "length"
        return self._best([*self.ended, *self.beams])

    def _best(self, sequences: list[BeamSearchSequence]) -> list[BeamSearchSequence]:
        return sorted(sequences, key=self._score, reverse=True)[: self.params.beam_width]

    def _score(self, sequence: BeamSearchSequence) -> float:
        """The score of a sequence. EOS does not count as a token, as in V1."""
        num_tokens = len(sequence.tokens) - (sequence.finish_reason == "stop")
        return sequence.cum_logprob / float(max(1, num_tokens) ** self.params.length_penalty)


def search_beams(
    generate: Callable[[list[list[int]], SamplingParams], list[RequestOutput]],
    prompts: list[list[int]],
    params: BeamSearchParams,
    eos_token_ids: Collection[int],
) -> list[list[BeamSearchSequence]]:
    """Returns the best sequences of each prompt. ``generate``: returns finished outputs in the order of the
    prompts."""
    one_token = SamplingParams(
        max_tokens=1, temperature=0.0, logprobs=2 * params.beam_width, ignore_eos=True, detokenize=False
    )
    searches = [_Search(params, eos_token_ids, [BeamSearchSequence(prompt, [])]) for prompt in prompts]
    for _ in range(params.max_tokens):
        beams = [beam.tokens for search in searches for beam in search.beams]
        if not beams:
            break
        outputs = iter(generate(beams, one_token))
        for search in searches:
            search.advance([next(outputs) for _ in search.beams])
    return [search.finish() for search in searches]


def _continued(beam: BeamSearchSequence, output: RequestOutput) -> Iterator[BeamSearchSequence]:
    """Yields the beam extended by each of the most probable next tokens."""
    answer = output.outputs[0]
    if not answer.logprobs:
        raise RequestError(f"A beam could not be continued: {answer.stop_reason or answer.finish_reason}.")
    [position] = answer.logprobs
    for candidate in position.top:
        tokens, logprobs = [*beam.tokens, candidate.token_id], [*beam.logprobs, position]
        yield BeamSearchSequence(tokens, logprobs, beam.cum_logprob + candidate.logprob)
