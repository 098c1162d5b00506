"""The errors of the measuring tools, each a sentence for the user (exit code 1; 2 where an option is wrong).

EngineError
└── EvalError
    ├── UsageError      an option is wrong, has no effect, or contradicts another one; names it (exit code 2)
    ├── WorkloadError   a workload cannot be read; names file and line
    ├── ResultError     a result cannot be read, written or drawn; names the file
    ├── PolicyError     a policy or its parameter is unknown or wrong; lists the choices (exit code 2)
    ├── TraceFileError  a trace cannot be read; names file and line
    ├── PeersFileError  a description of other servers cannot be read; names file and field
    ├── CostModelError  a profile of step costs cannot be read or made; says why
    │   └── HardwareError   a model or GPU to simulate is unknown or does not fit; lists the choices (2)
    └── ServerError     the server cannot be reached, started or understood
        └── ServerGoneError   the server was reachable before, or nothing listens at its address
"""

from __future__ import annotations

import msgspec

from engine.errors import ConfigError, EngineError

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Exceptions of decoding malformed content; RecursionError comes from deeply nested brackets."""


class EvalError(EngineError):
    """Base of the errors of the measuring tools."""


class UsageError(EvalError, ConfigError):
    """An option of a command is wrong, has no effect, or contradicts another one."""


class WorkloadError(EvalError):
    """A workload file is missing or malformed."""


class ResultError(EvalError):
    """A result file is missing, cut or of another version, or a report of it cannot be made."""


class PolicyError(EvalError, ConfigError):
    """The named policy cannot be made."""


class TraceFileError(EvalError):
    """A trace is missing, malformed or of another version."""


class PeersFileError(EvalError):
    """A file that describes other servers is missing or malformed."""


class CostModelError(EvalError):
    """No cost model can be made from a profile, a trace or a name."""


class HardwareError(CostModelError, UsageError):
    """A model, GPU, data type or number of GPUs to simulate is unknown, or they do not fit each other."""


class ServerError(EvalError):
    """The server under test is gone, refuses, or does not speak the protocol."""


class ServerGoneError(ServerError):
    """Nothing answers at the server's address, or the server reports that its engine is dead."""
