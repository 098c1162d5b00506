"""The folder of a task: files with facts, settings and irrelevant lines."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence

from eval.agent_model.names import Names

_KEYS = (
    *("owner", "port", "limit", "code", "color", "region", "version", "level"),
    *("city", "batch", "mode", "timeout", "team", "host", "size", "rate"),
)

LONG_SHARE = 0.04
"""Share of the files with facts that also have a page of other lines."""


class World:
    """The folder of a task, while it is being filled."""

    def __init__(self, rng: random.Random, names: Names) -> None:
        self.rng = rng
        self.names = names
        self.files: dict[str, str] = {}

    def say(self, *phrases: str, **parts: object) -> str:
        """Returns one of the phrases, with the parts filled in."""
        return self.rng.choice(phrases).format(**parts)

    def key(self) -> str:
        return self.rng.choice(_KEYS) if self.rng.random() < 0.6 else self.names.word()

    def keys(self, count: int) -> list[str]:
        keys: list[str] = []
        while len(keys) < count:
            if (key := self.key()) not in keys:
                keys.append(key)
        return keys

    def rare_word(self) -> str:
        """Returns a word that is hardly part of another."""
        while len(word := self.names.word()) < 6:
            pass
        return word

    def prose(self) -> str:
        """Returns a line without relevant content."""
        words = [self.names.word() for _ in range(self.rng.randint(2, 4))]
        return " ".join(words) + self.rng.choice(("", ".", ""))

    def prose_lines(self, low: int, high: int) -> list[str]:
        return [self.prose() for _ in range(self.rng.randint(low, high))]

    def filler(self) -> list[str]:
        """Returns irrelevant lines for a file: a few, sometimes a page."""
        return self.prose_lines(10, 60) if self.rng.random() < LONG_SHARE else self.prose_lines(0, 3)

    def add(self, path: str, lines: Sequence[str]) -> str:
        self.files[path] = "\n".join(lines) + "\n"
        return path

    def note(self, facts: Mapping[str, str], path: str | None = None) -> str:
        """Adds a file that holds the facts, a line each, among other lines."""
        form = self.rng.choice(("{}: {}", "{} = {}", "{}: {}"))
        lines = [form.format(key, value) for key, value in facts.items()]
        lines += self.filler()
        self.rng.shuffle(lines)
        return self.add(path if path is not None else self.names.path(), lines)

    def decoys(self, low: int = 0, high: int = 2) -> None:
        """Adds files that the question does not concern."""
        for _ in range(self.rng.randint(low, high)):
            self.note({self.key(): self.names.value()})

    def config(self, values: Mapping[str, str], path: str | None = None) -> str:
        """Adds a configuration file; ``values`` maps section.key to its value."""
        suffix = self.rng.choice((".toml", ".json", ".ini"))
        path = path if path is not None else self.names.path(suffix)
        sections: dict[str, dict[str, str]] = {}
        for name, value in values.items():
            section, key = name.split(".")
            sections.setdefault(section, {})[key] = value
        self.files[path] = _configuration(sections, path)
        return path

    def settings(
        self, wanted: Mapping[str, str], spare: int = 2, apart: bool = False
    ) -> tuple[str, list[str]]:
        """Adds a configuration with the wanted values among others; returns its path, and their names in it.

        They are in one section; if ``apart``, each in a separate one.
        """
        section = self.names.word()
        values = {}
        for key, value in wanted.items():
            values[f"{section}.{key}"] = value
            section = self.names.word() if apart else section
        names = list(values)
        others = [key for key in self.keys(spare + len(wanted)) if key not in wanted][:spare]
        for key in others:
            place = section if self.rng.random() < 0.5 else self.names.word()
            values[f"{place}.{key}"] = self.names.value()
        items = list(values.items())
        self.rng.shuffle(items)
        return self.config(dict(items)), names


def _configuration(sections: Mapping[str, Mapping[str, str]], path: str) -> str:
    if path.endswith(".json"):
        return json.dumps(sections, indent=1) + "\n"
    quote = '"' if path.endswith(".toml") else ""
    lines: list[str] = []
    for section, values in sections.items():
        lines.append(f"[{section}]")
        lines += [f"{key} = {quote}{value}{quote}" for key, value in values.items()]
    return "\n".join(lines) + "\n"
