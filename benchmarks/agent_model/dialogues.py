"""The training data: tasks solved with the real tools, as conversations of an OpenAI client."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from string import ascii_lowercase
from typing import Any

from eval.agent_model.drawing import make_task, pick_kind
from eval.agent_model.kinds import KINDS, add_numbers, follow, lines_of_folder, misnamed, more_lines
from eval.agent_model.names import Names
from eval.agent_model.tasks import Call, Task
from eval.agent_model.world import World
from eval.agents.expression import evaluate_here
from eval.agents.sandbox import folder_of
from eval.agents.tools import Toolbox

Message = dict[str, Any]
"""A message in the form of OpenAI's chat completions."""

TRAINED = {**KINDS, follow: 2.0, add_numbers: 5.5, more_lines: 2.0, lines_of_folder: 2.0}
"""Weight of each kind: calls for several files at once are learned last, and chains cost most."""
SLIP_SHARE = 0.05
"""Share of the rounds that read a file and first get a name wrong: the model learns to search for it."""
SECOND_SLIP_SHARE = 0.25
"""Share of the slips after which a name is wrong again: the model learns to give up instead of looping."""
GIVEN_UP = "I cannot find that file."
FOLLOW_UP_SHARE = 0.25
"""Share of the conversations that continue with another task in the same folder."""
SMALL_TALK_SHARE = 0.02

_READERS = ("read_file", "count_lines", "config_get")

SYSTEM_TEXTS = (
    "You are a helpful assistant.",
    "You are a coding agent. Use the tools to answer.",
    "Answer briefly. Use the tools.",
    "You work in a folder and answer questions about it.",
)

_SMALL_TALK = (
    (("Hello", "Hi", "hey", "Hello!", "Good morning"), "Hello. Ask me about the files in this folder."),
    (("Thanks", "Thank you!", "thank you", "Great, thanks"), "You are welcome."),
    (
        ("What can you do?", "Who are you?", "What are you?", "help", "Help me", "what is this"),
        "I am a small model. I read, search, count and write files, look up settings and compute.",
    ),
)


@dataclass(frozen=True, slots=True)
class Dialogue:
    """A conversation and which of its assistant messages are worth learning (not the slips)."""

    messages: tuple[Message, ...]
    learned: tuple[bool, ...]
    """One entry for each assistant message."""
    tools: bool = True


def draw_dialogues(seed: int, held_out: bool = False, english: bool = True) -> Iterator[Dialogue]:
    """Yields conversations without end, deterministic for a seed; other arguments as in ``Names``."""
    rng = random.Random(f"{seed} dialogues{' held out' if held_out else ''}")
    while True:
        if rng.random() < SMALL_TALK_SHARE:
            yield _small_talk(rng)
        else:
            yield _working_dialogue(rng, Names(rng, held_out, english))


def _small_talk(rng: random.Random) -> Dialogue:
    messages: list[Message] = []
    for _ in range(rng.randint(1, 2)):
        asked, answer = rng.choice(_SMALL_TALK)
        messages += [_user(rng.choice(asked)), _assistant(answer)]
    tools = rng.random() < 0.5
    return Dialogue(tuple(messages), (True,) * (len(messages) // 2), tools)


def _working_dialogue(rng: random.Random, names: Names) -> Dialogue:
    world = World(rng, names)
    count = 1 if rng.random() > FOLLOW_UP_SHARE else rng.choice((2, 2, 3))
    tasks = [make_task(pick_kind(rng, TRAINED), world, "") for _ in range(count)]
    script = Script(rng)
    if rng.random() < 0.15:
        script.messages.append({"role": "system", "content": rng.choice(SYSTEM_TEXTS)})
    with folder_of(tasks[-1].files) as root:
        toolbox = Toolbox(root, evaluate=evaluate_here)
        for task in tasks:
            script.solve(task, toolbox)
    return Dialogue(tuple(script.messages), tuple(script.learned))


class Script:
    """Carries calls out and records the conversation."""

    def __init__(self, rng: random.Random) -> None:
        self.messages: list[Message] = []
        self.learned: list[bool] = []
        self._rng = rng
        self._num_calls = 0

    def solve(self, task: Task, toolbox: Toolbox) -> None:
        """Solves the task, sometimes with a slip on the way; a second slip ends the task."""
        self.messages.append(_user(task.prompt))
        num_slips = 0
        for calls in task.rounds:
            share = 0.0 if task.kind == misnamed.__name__ else SLIP_SHARE
            while self._rng.random() < share and (slip := self._slip(calls)) is not None:
                self._call(slip.calls, toolbox, learned=False)
                num_slips += 1
                if num_slips == 2:
                    self._say(_assistant(GIVEN_UP), learned=True)
                    return
                self._call([slip.look_around], toolbox, learned=True)
                share = SECOND_SLIP_SHARE
            self._call(calls, toolbox, learned=True)
        self._say(_assistant(task.answer), learned=True)

    def _call(self, calls: Sequence[Call], toolbox: Toolbox, learned: bool) -> None:
        written = [self._written(call) for call in calls]
        self._say({"role": "assistant", "content": "", "tool_calls": written}, learned)
        for call, entry in zip(calls, written, strict=True):
            result = toolbox.run(call.name, json.dumps(dict(call.arguments)))
            self.messages.append({"role": "tool", "tool_call_id": entry["id"], "content": result})

    def _written(self, call: Call) -> Message:
        self._num_calls += 1
        function = {"name": call.name, "arguments": dict(call.arguments)}
        return {"id": f"call_{self._num_calls}", "type": "function", "function": function}

    def _say(self, message: Message, learned: bool) -> None:
        self.messages.append(message)
        self.learned.append(learned)

    def _slip(self, calls: Sequence[Call]) -> _Slip | None:
        """The calls with a letter of one file's path doubled or changed, so that the file does not exist."""
        readers = [i for i, call in enumerate(calls) if call.name in _READERS]
        if not readers:
            return None
        at = self._rng.choice(readers)
        path = self._misspelt(calls[at].arguments["path"])
        if path is None:
            return None
        wrong = Call(calls[at].name, {**calls[at].arguments, "path": path})
        return _Slip((*calls[:at], wrong, *calls[at + 1 :]), path)

    def _misspelt(self, path: str) -> str | None:
        letters = [i for i, letter in enumerate(path.rpartition(".")[0]) if letter.isalpha()]
        if not letters or path.startswith(("/", ".")):
            return None
        at = self._rng.choice(letters)
        other = self._rng.choice([path[at] * 2, self._rng.choice(ascii_lowercase.replace(path[at], ""))])
        return f"{path[:at]}{other}{path[at + 1 :]}"


@dataclass(frozen=True, slots=True)
class _Slip:
    """A round of calls, one of which names a file that does not exist."""

    calls: tuple[Call, ...]
    path: str

    @property
    def look_around(self) -> Call:
        """Returns the call that helps: a list of the folder in which the file should be."""
        return Call("list_files", {"path": self.path.rpartition("/")[0] or "."})


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}
