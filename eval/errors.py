"""What can go wrong while measuring, each a sentence for the user (exit code 1).

EngineError
└── EvalError
    ├── WorkloadError   a workload cannot be read; names file and line
    └── ServerError     the server cannot be reached, started or understood
"""

from __future__ import annotations

from engine.errors import EngineError


class EvalError(EngineError):
    """Base of the errors of the measuring tools."""


class WorkloadError(EvalError):
    """A workload file is missing or malformed."""


class ServerError(EvalError):
    """The server under test is gone, refuses, or does not speak the protocol."""
