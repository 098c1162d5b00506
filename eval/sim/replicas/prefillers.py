"""The prefill side of a split fleet: replicas that compute prompts, whose KV decoding replicas then fetch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from engine.records.messages import EngineCoreOutput
from eval.sim.event_heap import EventHeap
from eval.sim.replicas.replica import ReplicaCounts, SimReplica
from eval.sim.replicas.router import Router
from eval.sim.sim_request import SimRequest


@dataclass(frozen=True, slots=True)
class _Prefill:
    """A prompt that is being prefilled."""

    prompt: SimRequest
    request: SimRequest
    decode: Callable[[], None]


class Prefillers:
    """Like V1's proxies: sends the prompt with one token of output, then the request with that answer to the
    other side, which samples the first token again."""

    def __init__(self, router: Router, events: EventHeap, hop_s: float) -> None:
        """``hop_s``: time from the end of a prefill until the other side has the request."""
        self._router = router
        self._events = events
        self._hop_s = hop_s
        self._open: dict[str, _Prefill] = {}
        self.replicas: Sequence[SimReplica] = ()

    def send(
        self, request: SimRequest, job_id: str, queued_s: float, home: SimReplica, *, above: int
    ) -> None:
        """``home`` decodes the request. It computes the prompt itself if at most ``above`` tokens of it are
        new there."""
        decode = partial(home.add_request, request)
        if above and home.num_new_tokens(request) <= above:
            self._events.at(queued_s, decode)
            return
        prompt = request.prompt_only()
        replica = self.replicas[self._router.choose(prompt, job_id, self.replicas, self._events.now)]
        self._open[request.request_id] = _Prefill(prompt, request, decode)
        self._events.at(queued_s, lambda: replica.add_request(prompt))

    def on_outputs(self, outputs: Iterable[EngineCoreOutput]) -> None:
        """Sends requests with finished prefills on to their decoding replicas."""
        for output in outputs:
            done = self._open.pop(output.request_id)
            done.request.is_prefilled = True
            done.request.first_scheduled_time = done.prompt.first_scheduled_time
            done.request.num_cached_tokens = done.prompt.num_cached_tokens
            self._events.at(self._events.now + self._hop_s, done.decode)

    def close(self) -> list[ReplicaCounts]:
        return [replica.close() for replica in self.replicas]
