"""Merges the cores' answers to a utility call into the group's answer, in msgpack's plain types."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from engine.core.scheduler_report import PauseState
from engine.records.capacity import Capacity
from engine.records.capacity import merged as merged_capacity
from engine.records.handed_over import END_HANDOVER, HAND_OVER
from engine.watch.merged_view import merge_views

Answers = Sequence[Any]
"""The cores' answers, in the order of their numbers; at least one."""

_SWITCHING = ("opening", "closing")


def merge_answers(method: str, answers: Answers, args: Sequence[Any]) -> Any:
    """The answer of the group to this call with these arguments."""
    if len(answers) == 1:
        return answers[0]
    return _MERGES[method](answers, args)


def _nothing(answers: Answers, args: Sequence[Any]) -> None:
    return None


def _whether_all(answers: Answers, args: Sequence[Any]) -> bool:
    return all(answers)


def _every(answers: Answers, args: Sequence[Any]) -> list[str]:
    return sorted({each for answer in answers for each in answer})


def _largest(answers: Answers, args: Sequence[Any]) -> Any:
    return max(answers)


def _statistics(answers: Answers, args: Sequence[Any]) -> dict[str, Any]:
    states = [answer.pop("pause_state") for answer in answers]
    paused = [state for state in states if state != PauseState.UNPAUSED.value]
    sums = {name: sum(answer[name] for answer in answers) for name in answers[0]}
    return {**sums, "pause_state": paused[0] if paused else states[0]}


def _capacity(answers: Answers, args: Sequence[Any]) -> dict[str, Any] | None:
    if any(answer is None for answer in answers):
        return None  # the policy knows no jobs
    merged: dict[str, Any] = msgspec.to_builtins(merged_capacity(msgspec.convert(answers, list[Capacity])))
    return merged


def _jobs(answers: Answers, args: Sequence[Any]) -> list[dict[str, Any]]:
    """All jobs, the most recently active first. For a job that moved, the core that saw it last answers."""
    latest: dict[str, dict[str, Any]] = {}
    for job in sorted((job for jobs in answers for job in jobs), key=_idle_s):
        latest.setdefault(job["id"], job)
    return list(latest.values())[: args[0]]


def _job(answers: Answers, args: Sequence[Any]) -> dict[str, Any] | None:
    return min((job for job in answers if job is not None), key=_idle_s, default=None)


def _idle_s(job: dict[str, Any]) -> float:
    return float(job["idle_s"])


def _past_turns(answers: Answers, args: Sequence[Any]) -> list[dict[str, Any]]:
    return sorted((turn for turns in answers for turn in turns), key=lambda turn: -turn["elapsed_s"])


def _trace_state(answers: Answers, args: Sequence[Any]) -> Any:
    """The first core's state; ``opening`` or ``closing`` while any is. A refusal is a text."""
    if (refusal := next((answer for answer in answers if isinstance(answer, str)), None)) is not None:
        return refusal
    merged = dict(answers[0])
    merged["state"] = next(
        (each["state"] for each in answers if each["state"] in _SWITCHING), merged["state"]
    )
    merged["error"] = next((each["error"] for each in answers if each["error"] is not None), None)
    merged["from_start"] = all(each["from_start"] for each in answers)
    for name in ("written", "dropped"):
        merged[name] = sum(each[name] for each in answers)
    return merged


def _handed_over(answers: Answers, args: Sequence[Any]) -> dict[str, int]:
    return {name: sum(answer[name] for answer in answers) for name in answers[0]}


def _watch(answers: Answers, args: Sequence[Any]) -> bytes:
    return merge_views(answers)


_MERGES: dict[str, Callable[[Answers, Sequence[Any]], Any]] = {
    "reset_prefix_cache": _whether_all,
    "reset_encoder_cache": _nothing,
    "statistics": _statistics,
    "check_invariants": _nothing,
    "pause": _nothing,
    "set_door": _nothing,
    "resume": _nothing,
    "capacity": _capacity,
    "jobs": _jobs,
    "job": _job,
    "past_turns": _past_turns,
    "step_age_s": _largest,
    HAND_OVER: _handed_over,
    END_HANDOVER: _nothing,
    "trace_state": _trace_state,
    "switch_trace": _trace_state,
    "watch": _watch,
    "unwatch": _nothing,
    "load_adapter": _nothing,
    "rest": _whether_all,
    "check_operation": _nothing,
    "why_paused": _every,
    "undo_weights": _nothing,
    "take_record": _nothing,
    "sleep": _whether_all,
    "wake_up": _nothing,
    "stop_resting": _nothing,
    "sleep_level": _largest,
    "update_weights": _whether_all,
    "unload_adapter": _nothing,
}
