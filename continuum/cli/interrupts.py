"""Handles Ctrl-C while the command is still loading: the process ends at once, by the signal's default
action, instead of with the traceback of an import."""

from __future__ import annotations

import signal
import threading

_usual = signal.default_int_handler
_is_ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is _usual

if _is_ours:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def back_to_usual() -> None:
    """Restore Python's handler once everything is loaded and KeyboardInterrupt is caught."""
    if _is_ours and signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, _usual)
