"""The kinds of tasks: each is a function that adds to a ``World`` and returns a question and its solution.

Each is written once; training and evaluation draw different names, numbers and contents for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from eval.agent_model.tasks import Call
from eval.agent_model.world import World


def call(name: str, **arguments: str) -> Call:
    return Call(name, arguments)


@dataclass(frozen=True, slots=True)
class Plan:
    """A kind of task in a world: its question and solution."""

    prompt: str
    rounds: Sequence[Sequence[Call]]
    answer: str
    expected: str
    written: Mapping[str, str] = field(default_factory=dict)


# Questions in the same words about things that exist and things that do not.
_WHERE = (
    "Which file mentions {w}?",
    "Find the file that contains the word {w}.",
    "In which file is {w} mentioned?",
    "where is {w} mentioned",
)
_SETTING = (
    "What is {k} in {p}?",
    "Look up {k} in {p}.",
    "Which value does {k} have in the config file {p}?",
    "tell me the setting {k} of {p}",
)
_FACT = (
    "What is the {k} in {p}?",
    "Read {p} and tell me the {k}.",
    "Which {k} does {p} name?",
    "Look into {p}: what is the {k}?",
)


def count(w: World) -> Plan:
    lines = w.prose_lines(2, 9)
    path = w.add(w.names.path(), lines)
    w.decoys()
    return Plan(
        w.say(
            "How many lines does {p} have?",
            "Count the lines of {p}.",
            "how many lines are in {p}",
            "Tell me the number of lines in the file {p}.",
            p=path,
        ),
        [[call("count_lines", path=path)]],
        f"The number of lines is {len(lines)}.",
        str(len(lines)),
    )


def config_value(w: World) -> Plan:
    value = w.names.value()
    path, (name,) = w.settings({w.key(): value})
    w.decoys()
    return Plan(
        w.say(
            *_SETTING,
            k=name,
            p=path,
        ),
        [[call("config_get", path=path, key=name)]],
        f"{name} is {value}.",
        value,
    )


def which_file(w: World) -> Plan:
    word = w.rare_word()
    w.decoys(1, 3)
    lines = w.prose_lines(1, 3)
    lines.insert(w.rng.randrange(len(lines) + 1), f"{w.names.word()} {word} {w.names.word()}")
    path = w.add(w.names.path(), lines)
    w.decoys(0, 1)
    return Plan(
        w.say(
            *_WHERE,
            w=word,
        ),
        [[call("search", text=word)]],
        f"It is mentioned in {path}.",
        path,
    )


def no_such_word(w: World) -> Plan:
    word = w.rare_word()
    w.decoys(1, 3)
    return Plan(
        w.say(
            *_WHERE,
            w=word,
        ),
        [[call("search", text=word)]],
        f"No file mentions {word}.",
        f"No file mentions {word}",
    )


def list_folder(w: World) -> Plan:
    folder = w.names.folder()
    files = sorted(w.names.file() for _ in range(w.rng.randint(1, 4)))
    for name in files:
        w.add(f"{folder}/{name}", w.prose_lines(1, 2))
    w.decoys()
    said = ", ".join(files)
    return Plan(
        w.say(
            "Which files are in {f}?",
            "List the folder {f}.",
            "What is in the folder {f}?",
            "show me the files of {f}",
            f=folder,
        ),
        [[call("list_files", path=folder)]],
        f"The folder holds {said}.",
        said,
    )


def fact(w: World) -> Plan:
    keys = w.keys(w.rng.randint(2, 4))
    facts = {key: w.names.value() for key in keys}
    path = w.note(facts)
    w.decoys()
    return Plan(
        w.say(
            *_FACT,
            k=keys[0],
            p=path,
        ),
        [[call("read_file", path=path)]],
        f"The {keys[0]} is {facts[keys[0]]}.",
        facts[keys[0]],
    )


def expression(w: World) -> Plan:
    numbers = [w.names.number(2, 9999) for _ in range(w.rng.randint(2, 4))]
    text = str(numbers[0])
    for number in numbers[1:]:
        text += f" {w.rng.choice('+-*')} {number}"
    result = str(eval(text))
    return Plan(
        w.say("What is {e}?", "Compute {e}.", "calculate {e}", "How much is {e}?", e=text),
        [[call("python", expression=text)]],
        f"The result is {result}.",
        result,
    )


def follow(w: World) -> Plan:
    """A chain of files, each naming the next: up to eleven calls that depend on each other."""
    length = w.rng.choice((2, 3, 3, 4, 4, 5, 6, 7, 8, 9, 10, 11))
    paths = [w.names.path() for _ in range(length)]
    key = w.key()
    value = w.names.value()
    for path, following in pairwise(paths):
        _chain_link(w, path, f"next: {following}")
    _chain_link(w, paths[-1], f"{key}: {value}")
    return Plan(
        w.say(
            "Start with {p}. Each file names the next one. What is the {k} in the last one?",
            "Follow the files from {p} on: each says which is next. What {k} does the last one name?",
            "{p} names the next file, and so on. Find the {k} at the end.",
            "Read {p} and go on to the next file until one names the {k}. What is it?",
            p=paths[0],
            k=key,
        ),
        [[call("read_file", path=path)] for path in paths],
        f"The {key} is {value}.",
        value,
    )


def _chain_link(w: World, path: str, line: str) -> None:
    lines = w.filler()
    lines.insert(w.rng.randrange(len(lines) + 1), line)
    w.add(path, lines)


def config_names_file(w: World) -> Plan:
    keys = w.keys(2)
    facts = {key: w.names.value() for key in keys}
    note = w.note(facts)
    path, (name,) = w.settings({w.rng.choice(("file", "path", "source", w.names.word())): note})
    w.decoys(0, 1)
    return Plan(
        w.say(
            "{c} in {p} names a file. What is the {k} in that file?",
            "Look up {c} in {p}; it is a file. Which {k} does it name?",
            "The setting {c} of {p} is the path of a file. Tell me the {k} in it.",
            c=name,
            p=path,
            k=keys[0],
        ),
        [[call("config_get", path=path, key=name)], [call("read_file", path=note)]],
        f"The {keys[0]} is {facts[keys[0]]}.",
        facts[keys[0]],
    )


def search_and_read(w: World) -> Plan:
    word = w.rare_word()
    key = w.key()
    value = w.names.value()
    w.decoys(1, 2)
    note = w.note({w.rng.choice(("about", "name", "topic")): word, key: value})
    w.decoys(0, 1)
    return Plan(
        w.say(
            "Find the file about {w} and tell me the {k} it names.",
            "One file mentions {w}. What is the {k} in it?",
            "What is the {k} in the file that mentions {w}?",
            w=word,
            k=key,
        ),
        [[call("search", text=word)], [call("read_file", path=note)]],
        f"The {key} is {value}.",
        value,
    )


def add_numbers(w: World) -> Plan:
    """Reads two to four files at once, then adds."""
    key = w.key()
    numbers = [w.names.number(2, 999) for _ in range(w.rng.randint(2, 4))]
    paths = [w.add(w.names.path(), [f"{key}: {number}"]) for number in numbers]
    w.decoys(0, 1)
    total = str(sum(numbers))
    return Plan(
        w.say(
            "Add the {k} of {ps}.",
            "What is the sum of the {k} in {ps}?",
            "Each of {ps} names a {k}. What are they together?",
            k=key,
            ps=_joined(paths),
        ),
        [
            [call("read_file", path=path) for path in paths],
            [call("python", expression=" + ".join(map(str, numbers)))],
        ],
        f"The sum is {total}.",
        total,
    )


def _joined(items: Sequence[str]) -> str:
    return f"{', '.join(items[:-1])} and {items[-1]}"


def more_lines(w: World) -> Plan:
    counts = w.rng.sample(range(1, 10), w.rng.randint(2, 3))
    paths = [w.add(w.names.path(), [w.names.word() for _ in range(n)]) for n in counts]
    most = str(max(counts))
    listed = ", ".join(map(str, counts))
    return Plan(
        w.say(
            "How many lines does the longest of {ps} have?",
            "Count the lines of {ps}. What is the largest count?",
            "Of {ps}, how many lines has the longest?",
            ps=_joined(paths),
        ),
        [[call("count_lines", path=path) for path in paths], [call("python", expression=f"max({listed})")]],
        f"The longest has {most} lines.",
        f"{most} lines",
    )


def lines_of_folder(w: World) -> Plan:
    folder = w.names.folder()
    paths = sorted(f"{folder}/{w.names.file()}" for _ in range(w.rng.randint(2, 4)))
    counts = [w.rng.randint(1, 6) for _ in paths]
    for path, lines in zip(paths, counts, strict=True):
        w.add(path, [w.names.word() for _ in range(lines)])
    w.decoys(0, 1)
    total = str(sum(counts))
    return Plan(
        w.say(
            "How many lines do the files in {f} have together?",
            "Count all lines of the files in the folder {f}.",
            "What is the total number of lines in {f}?",
            f=folder,
        ),
        [
            [call("list_files", path=folder)],
            [call("count_lines", path=path) for path in paths],
            [call("python", expression=" + ".join(map(str, counts)))],
        ],
        f"Together they have {total}.",
        total,
    )


def misnamed(w: World) -> Plan:
    """The named file does not exist; the folder has one with the same name and another suffix."""
    folder = w.names.folder()
    stem = w.names.word()
    key = w.key()
    value = w.names.value()
    asked, real = w.rng.sample((".txt", ".md", ".log", ".csv", ".dat"), 2)
    w.note({key: value}, path=f"{folder}/{stem}{real}")
    for _ in range(w.rng.randint(0, 2)):
        w.add(f"{folder}/{w.names.file()}", w.prose_lines(1, 1))
    wrong = f"{folder}/{stem}{asked}"
    right = f"{folder}/{stem}{real}"
    return Plan(
        w.say(
            *_FACT,
            k=key,
            p=wrong,
        ),
        [
            [call("read_file", path=wrong)],
            [call("list_files", path=folder)],
            [call("read_file", path=right)],
        ],
        f"{wrong} is not there. In {right} the {key} is {value}.",
        value,
    )


def misplaced_key(w: World) -> Plan:
    """The configuration has no such key; reading it shows the key in another section."""
    key = w.key()
    value = w.names.value()
    section = w.names.word()
    path, _ = w.settings({key: value})
    asked = f"{section}.{key}"
    return Plan(
        w.say(
            *_SETTING,
            k=asked,
            p=path,
        ),
        [[call("config_get", path=path, key=asked)], [call("read_file", path=path)]],
        f"{asked} is not there. In {path} the {key} is {value}.",
        value,
    )


def outside(w: World) -> Plan:
    path = w.rng.choice(("../{}", "/{}", "../../{}")).format(w.names.path())
    w.decoys()
    return Plan(
        w.say(
            "What is the {k} in {p}?",
            "Read {p} and tell me the {k}.",
            "Look into {p}: what is the {k}?",
            k=w.key(),
            p=path,
        ),
        [[call("read_file", path=path)]],
        f"I may not read {path}: it is outside the folder.",
        "outside the folder",
    )


def write_setting(w: World) -> Plan:
    value = w.names.value()
    path, (name,) = w.settings({w.key(): value})
    out = w.names.path(".txt")
    return Plan(
        w.say(
            "Write the value of {k} in {p} to {o}.",
            "Look up {k} in {p} and save it as {o}.",
            "Put the setting {k} of {p} into the file {o}.",
            k=name,
            p=path,
            o=out,
        ),
        [[call("config_get", path=path, key=name)], [call("write_file", path=out, content=value)]],
        f"I wrote {value} to {out}.",
        out,
        {out: value},
    )


def write_word(w: World) -> Plan:
    value = w.names.value()
    out = w.names.path(".txt")
    w.decoys()
    return Plan(
        w.say(
            "Write {v} to {o}.",
            "Make a file {o} that says {v}.",
            "Save {v} as {o}.",
            v=value,
            o=out,
        ),
        [[call("write_file", path=out, content=value)]],
        f"I wrote {value} to {out}.",
        out,
        {out: value},
    )


def long_errand(w: World) -> Plan:
    """Search, read, two settings at once, a sum, a file: six calls in five rounds, and the answer."""
    word = w.rare_word()
    first, second = w.keys(2)
    out = w.names.path(".txt")
    numbers = [w.names.number(2, 999), w.names.number(2, 999)]
    path, names = w.settings({first: str(numbers[0]), second: str(numbers[1])}, spare=1, apart=True)
    note = w.note({"about": word, "config": path})
    w.decoys(0, 1)
    total = str(sum(numbers))
    return Plan(
        w.say(
            "Find the file about {w}. It names a config file. Write the sum of its {a} and {b} to {o}.",
            "One file mentions {w} and names a config file. Write the sum of its {a} and {b} to {o}.",
            w=word,
            a=names[0],
            b=names[1],
            o=out,
        ),
        [
            [call("search", text=word)],
            [call("read_file", path=note)],
            [call("config_get", path=path, key=name) for name in names],
            [call("python", expression=f"{numbers[0]} + {numbers[1]}")],
            [call("write_file", path=out, content=total)],
        ],
        f"I wrote {total} to {out}.",
        out,
        {out: total},
    )


Kind = Callable[[World], Plan]

KINDS: Mapping[Kind, float] = {
    count: 0.4,
    config_value: 0.6,
    which_file: 0.6,
    no_such_word: 0.4,
    list_folder: 0.6,
    fact: 0.8,
    expression: 0.6,
    follow: 3.0,
    config_names_file: 1.6,
    search_and_read: 1.2,
    add_numbers: 3.0,
    more_lines: 1.2,
    lines_of_folder: 1.6,
    misnamed: 2.0,
    misplaced_key: 3.0,
    outside: 0.8,
    write_setting: 0.8,
    write_word: 0.8,
    long_errand: 3.0,
}
"""Weight of each kind: kinds with more turns are drawn more often."""
