"""Finds the slow command of a shell text: in ``cd x && python -m pytest a.py`` it is pytest on a file.

It guesses rather than parses: it handles what agents write, and never raises on anything else.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

MAX_NESTING = 3
"""Maximum depth to which nested ``bash -c "bash -c ..."`` is followed."""

MAX_WORDS = 32
"""Maximum number of words of one command that are examined."""


@dataclass(frozen=True, slots=True)
class ShellCommand:
    """One command of a shell text."""

    what: tuple[str, ...] = ()
    """Program and, if it matters, its subcommand or target; empty if there is no command."""
    limit_s: float | None = None
    """Seconds after which ``timeout`` ends it; None without a limit."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# -- from shell text to commands -------------------------------------------------------------------------

_HEREDOC = re.compile(
    r"(?<!<)<<(?!<)-?[ \t]*(['\"]?)(\w+)\1([^\n]*)\n.*?(?:\n[ \t]*\2(?=\s|$)|\Z)", re.DOTALL
)
# Each alternative starts with different characters, so matching never backtracks.
_TOKEN = re.compile(
    r"""(?P<comment>\#[^\n]*)
      | (?P<redirect>\d*(?:&>>?|[<>]+\|?)&?[ \t]*[^\s;|&<>()]*)
      | (?P<operator>&&|\|\||[;|&\n()])
      | (?P<word>(?:[^\s;|&<>()'"\\]|\\.?|'[^']*'?|"(?:\\.|[^"\\])*"?)+)""",
    re.VERBOSE | re.DOTALL,
)
_QUOTED = re.compile(r"""'([^']*)'?|"((?:\\.|[^"\\])*)"?|\\(.?)""", re.DOTALL)
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)


def _commands(text: str) -> Iterator[list[str]]:
    """Yields the simple commands of a shell text as words, without redirections, comments, here-documents."""
    text = _HEREDOC.sub(r"\3", text.replace("\\\n", " "))
    words: list[str] = []
    for token in _TOKEN.finditer(text):
        if token.lastgroup == "word" and len(words) < MAX_WORDS:
            words.append(_QUOTED.sub(_unquoted, token.group()))
        elif token.lastgroup == "operator":
            if words:
                yield words
            words = []
    if words:
        yield words


def _unquoted(quoted: re.Match[str]) -> str:
    literal, in_double_quotes, escaped = quoted.groups(default="")
    return literal or _ESCAPED.sub(r"\1", in_double_quotes) or escaped


_KEYWORDS = _words("if then elif else while until do ! { }")
_NOT_COMMANDS = _words("for case select function done fi esac in")
_ASSIGNMENT = re.compile(r"\w+\+?=")
_PREFIXES: dict[str, tuple[frozenset[str], int]] = {
    # program: its options that take a value, and the number of its own arguments before the command
    "sudo": (_words("-u -g -h -p -C --user --group"), 0),
    "timeout": (_words("-k -s --signal --kill-after"), 1),
    "time": (_words("-f -o"), 0),
    "env": (_words("-u -C --unset --chdir"), 0),
    "nice": (_words("-n"), 0),
    "ionice": (_words("-c -n"), 0),
    "stdbuf": (_words("-i -o -e"), 0),
    "nohup": (frozenset(), 0),
    "command": (frozenset(), 0),
    "exec": (frozenset(), 0),
    "xvfb-run": (frozenset(), 0),
    "npx": (frozenset(), 0),
    "uv run": (_words("--with --python -p --extra --group"), 0),
    "poetry run": (frozenset(), 0),
    "pipenv run": (frozenset(), 0),
    "conda run": (_words("-n -p --name --prefix"), 0),
}


def _without_prefixes(words: list[str]) -> tuple[list[str], float | None]:
    """Returns the command without a shell keyword, ``X=y``, ``sudo``, ``timeout 60`` or ``uv run`` before it,
    and the seconds after which ``timeout`` ends it."""
    limit_s = None
    while words:
        first = words[0]
        if first in _KEYWORDS or _ASSIGNMENT.match(first):
            words = words[1:]
            continue
        program = _program(first)
        length = 1 if program in _PREFIXES else 2
        prefix = _PREFIXES.get(program) or _PREFIXES.get(" ".join([program, *words[1:2]]))
        if prefix is None:
            return ([] if first in _NOT_COMMANDS else words), limit_s
        words = _without_options(words[length:], prefix[0])
        if program == "timeout" and words:
            limit_s = _duration_s(words[0])
        words = words[prefix[1] :]
    return words, limit_s


_DURATION = re.compile(r"([0-9]{1,9}(?:\.[0-9]{0,9})?)([smhd]?)")
_UNIT_S = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


def _duration_s(word: str) -> float | None:
    """Parses a duration as coreutils' ``timeout`` does: ``90``, ``1.5m``; None for no limit, which includes
    0."""
    found = _DURATION.fullmatch(word)
    return float(found[1]) * _UNIT_S[found[2]] or None if found else None


def _without_options(words: list[str], takes_value: frozenset[str] = frozenset()) -> list[str]:
    index = 0
    while index < len(words) and words[index].startswith("-"):
        index += 2 if words[index] in takes_value else 1
    return words[index:]


_VERSION = re.compile(r"(?<=[a-z])[0-9][0-9.]*$")


def _program(word: str) -> str:
    """The name of a program: ``python`` for ``/usr/bin/python3.11``."""
    return _VERSION.sub("", word.rstrip("/").rsplit("/", 1)[-1])


# -- from commands to what they do -----------------------------------------------------------------------

_SILENT = _words("cd pushd popd export unset set source . : true umask trap alias shopt ulimit wait local")
"""Commands that take no time; they count only if there is nothing else."""
_LIGHT = _words("""
    ls cat head tail grep egrep fgrep sed awk wc sort uniq cut tr tee echo printf pwd mkdir touch rm cp mv
    ln chmod chown which type test [ [[ false date basename dirname realpath diff stat file xargs jq nl less
    more read column env whoami id uname hostname kill
""")
_LIGHT_WEIGHT = 1
_HEAVY = _words("""
    pytest unittest tox nox make cmake ninja bazel cargo go mvn gradle gradlew npm yarn pnpm bun pip uv
    conda mamba poetry apt-get apt apk yum dnf brew docker kubectl python node ruby java jest vitest mocha
    tsc gcc g++ cc c++ clang clang++ rustc javac wget curl sleep sh perl php dotnet mypy pylint pre-commit
    rspec bundle gem composer terraform helm configure
""")
_HAS_SUBCOMMAND = _words("""
    git hg gh pip uv conda mamba poetry apt-get apt apk yum dnf brew npm yarn pnpm bun cargo go docker
    kubectl make mvn gradle gradlew dotnet bazel terraform helm systemctl service bundle gem composer tox
    nox pre-commit
""")
_LOOPS = _words("for while until")
_SHELLS = _words("bash sh zsh dash")
_GIT_VALUES = _words("-C -c --git-dir --work-tree")
_PYTEST_VALUES = _words("-k -m -p -n -c -o -W -r --tb --maxfail --rootdir")


def dominant_command(text: str, depth: int = 0) -> ShellCommand:
    """Returns the command of a shell text that probably takes the time; the first among equals.

    Its limit applies to the whole text: None if another command may take time too, or if it is in a loop.
    """
    best = ShellCommand()
    best_weight = -1
    num_slow = 0
    for words in _commands(text):
        num_slow += words[0] in _LOOPS
        words, limit_s = _without_prefixes(words)
        command = _command(words, depth) if words else ShellCommand()
        if not command.what:
            continue
        if command.limit_s is None:
            command = replace(command, limit_s=limit_s)
        weight = _weight(command.what[0])
        num_slow += weight > _LIGHT_WEIGHT
        if weight > best_weight:
            best = command
            best_weight = weight
    return best if num_slow <= 1 else replace(best, limit_s=None)


def _weight(program: str) -> int:
    if program in _SILENT:
        return 0
    if program in _LIGHT:
        return _LIGHT_WEIGHT
    return 3 if program in _HEAVY else 2


def _command(words: list[str], depth: int) -> ShellCommand:
    """Returns one command; ``bash -lc TEXT`` is read as the command in TEXT."""
    if _program(words[0]) in _SHELLS and depth < MAX_NESTING:
        for option, text in pairwise(words[1:]):
            if option.startswith("-") and option.endswith("c"):
                return dominant_command(text, depth + 1)
    return ShellCommand(_what(words))


def _what(words: list[str]) -> tuple[str, ...]:
    """Program and, if it matters, its subcommand or target."""
    program = _program(words[0])
    arguments = words[1:]
    if program in _SHELLS:
        return ("sh", "script") if _without_options(arguments) else ("sh",)
    if program.endswith((".py", ".sh")):
        return ("python" if program.endswith(".py") else "sh", "script")
    if program in ("python", "pypy"):
        return _python(arguments)
    if program in ("pytest", "py.test"):
        return _pytest(arguments)
    if program in ("grep", "egrep", "fgrep"):
        return ("grep", "recursive") if _is_recursive(arguments) else ("grep",)
    if program == "sleep":
        return ("sleep", *arguments[:1])
    if program in _HAS_SUBCOMMAND:
        return _with_subcommand(program, arguments)
    return (program,)


def _python(arguments: list[str]) -> tuple[str, ...]:
    """What ``python`` runs: ``pytest`` for ``python -m pytest``; else a module, a one-liner, a script, or
    stdin."""
    rest = _without_options(arguments, _words("-W -X"))
    options = arguments[: len(arguments) - len(rest)]
    if "-m" in options and rest:
        module = rest[0]
        if module == "pytest":
            return _pytest(rest[1:])
        if module == "unittest":
            return ("unittest",)
        return _with_subcommand("pip", rest[1:]) if module == "pip" else ("python", f"-m_{module}")
    if any(option.startswith("-") and option.endswith("c") for option in options):
        return ("python", "-c")
    if rest:
        return ("python", "script")
    return ("python", "stdin") if "-" in options else ("python",)


def _pytest(arguments: list[str]) -> tuple[str, ...]:
    """What pytest runs: one file or test, a directory, or the whole suite."""
    targets = _without_options(arguments, _PYTEST_VALUES)
    if not targets:
        return ("pytest", "all")
    return ("pytest", "file" if ".py" in targets[0] or "::" in targets[0] else "dir")


def _is_recursive(arguments: list[str]) -> bool:
    return any(a == "--recursive" or re.match(r"-[a-zA-Z]*[rR]", a) for a in arguments)


def _with_subcommand(program: str, arguments: list[str]) -> tuple[str, ...]:
    rest = _without_options(arguments, _GIT_VALUES if program == "git" else frozenset())
    if not rest:
        return (program,)
    if rest[0] == "run" and len(rest) > 1:  # npm run build
        return program, f"run_{rest[1]}"
    return program, rest[0]
