"""Every error a user can meet, in one tree.

EngineError
├── ConfigError            an option is wrong; names the option            (exit code 2 at start-up)
├── ModelLoadError         the model folder cannot be served; says why     (exit code 1 at start-up)
├── RequestError           a request is wrong; names the field and limit   (HTTP 400)
│   └── ContextLengthError the prompt does not fit the model               (HTTP 400)
├── EngineGenerateError    one request failed inside the engine            (HTTP 500)
├── TryAgainError          what the request needs was interrupted          (HTTP 503)
├── TooLateError           a job would begin too late; says when to ask    (HTTP 429)
└── EngineDeadError        the engine core process is gone                 (HTTP 503)
"""

from __future__ import annotations


class EngineError(Exception):
    """Base of all errors raised on purpose; its text is one sentence for the user."""


class ConfigError(EngineError):
    """An option is unknown, out of range or contradicts another one."""


class ModelLoadError(EngineError):
    """A model folder is missing, incomplete, of an unknown architecture or too large."""


class RequestError(EngineError):
    """A request is malformed. ``field`` names the offending parameter where one is to blame."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class ContextLengthError(RequestError):
    """The prompt, or prompt plus requested output, exceeds the maximum context length."""


class EngineGenerateError(EngineError):
    """One request failed; the engine lives on."""


class TryAgainError(EngineError):
    """What the request needs was interrupted; the request is not to blame (HTTP 503)."""


class TooLateError(EngineError):
    """A new job is expected to begin later than it may."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        """``retry_after_s``: seconds after which it is expected to be in time."""
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineDeadError(EngineError):
    """The engine core process died; nothing can be generated any more."""

    def __init__(self, message: str = "The engine core process has died; see its log for the cause.") -> None:
        super().__init__(message)
