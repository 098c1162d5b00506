"""Ctrl-C while the command is still being loaded, when there is nothing to end: the process ends at once, as
programs do that know nothing of it, instead of with the traceback of an import."""

from __future__ import annotations

import signal
import threading

_usual = signal.default_int_handler
_is_ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is _usual

if _is_ours:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def back_to_usual() -> None:
    """All is loaded: from now on somebody catches it."""
    if _is_ours and signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, _usual)
