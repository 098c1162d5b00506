"""Recorded jobs as tokens: what each turn adds to the prompt, what the model says, and the kind of turn."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import tokenizers

from eval.errors import WorkloadError
from eval.workloads.job import Job

Encode = Callable[[str], list[int]]

_COMMAND = re.compile(r"```(?:bash|sh)\n(.*?)(?:```|\Z)", re.DOTALL)
_WRITES = re.compile(r"<<|\bsed -i|\btee\b|\bgit apply\b|\bpatch\b|\.write\(|\bcat >")
"""Matches a here document, an edit in place, or a script that writes."""


class TurnKind(StrEnum):
    """What the model did in a turn."""

    WRITE = "write or edit"
    COMMAND = "command"
    TEXT = "text"


@dataclass(frozen=True, slots=True)
class SpokenTurn:
    """One turn of a job, as tokens."""

    told: list[int]
    """Tokens of the prompt after the output of the turn before."""
    said: list[int]
    """Tokens that the model says, including the one that ends it."""
    kind: TurnKind


@dataclass(frozen=True, slots=True)
class SpokenJob:
    """All turns of a job, as tokens."""

    job_id: str
    turns: Sequence[SpokenTurn]


def kind_of(output_text: str) -> TurnKind:
    """Returns the kind of a turn, by the shell command in the model's output."""
    command = _COMMAND.search(output_text)
    if command is None:
        return TurnKind.TEXT
    return TurnKind.WRITE if _WRITES.search(command[1]) else TurnKind.COMMAND


def load_encode(name: str) -> tuple[Encode, int]:
    """Returns tokenizer and vocabulary size of a folder, a tokenizer.json or a tiktoken encoding.

    Raises WorkloadError if there is no such tokenizer.
    """
    path = Path(name)
    file = path / "tokenizer.json" if path.is_dir() else path
    if file.is_file():
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
        return (lambda text: tokenizer.encode(text, add_special_tokens=False).ids), tokenizer.get_vocab_size()
    import tiktoken

    try:
        encoding = tiktoken.get_encoding(name)
    except ValueError as error:
        raise WorkloadError(f"{name} is no folder of a tokenizer and no encoding of tiktoken.") from error
    return (lambda text: encoding.encode(text, disallowed_special=())), encoding.n_vocab


def spoken(jobs: Iterable[Job], encode: Encode, end_token: int) -> list[SpokenJob]:
    """Returns jobs with texts as tokens. ``end_token``, outside the vocabulary, ends each output."""
    return [
        SpokenJob(job.job_id, [_spoken_turn(job, i, encode, end_token) for i in range(len(job.turns))])
        for job in jobs
        if job.has_text
    ]


def _spoken_turn(job: Job, index: int, encode: Encode, end_token: int) -> SpokenTurn:
    turn = job.turns[index]
    assert turn.input_text is not None, "the job has texts"
    assert turn.output_text is not None, "the job has texts"
    system = f"<|system|>\n{job.system_text}\n" if index == 0 else ""
    told = encode(f"{system}\n<|user|>\n{turn.input_text}\n<|assistant|>\n")
    return SpokenTurn(told, [*encode(turn.output_text), end_token], kind_of(turn.output_text))
