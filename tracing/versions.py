"""Upgrades traces of older schema versions by renaming in the bytes of a line, before it is decoded.

Version 3 renamed fields and values and changed nothing else, so a trace of version 2 is read, analyzed and
replayed like a current one.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from tracing.events import SCHEMA_VERSION

READABLE_VERSIONS = (2, SCHEMA_VERSION)
"""Schema versions of traces that this program reads."""

Upgrade = Callable[[bytes], bytes]

_FIELDS_OF_2 = {
    b"little_share": b"small_job_share",
    b"look_again_s": b"search_backoff_s",
    b"telling": b"min_memoryfulness",
    b"telling_jobs": b"min_ended_jobs",
    b"told_remaining_s": b"reported_remaining_s",
    b"room_blocks": b"allowed_blocks",
}
"""Names of version 2 and their current ones: four options of the policy, and two fields of ``JobEvent``."""
_VALUES_OF_2 = {
    b"broken": b"revoked",
    b"told_started": b"reported_started",
    b"told_progress": b"reported_progress",
    b"told_finished": b"reported_finished",
    b"told_cancelled": b"reported_cancelled",
}
"""Old and current values of ``cause``, ``previous_pin`` and ``kind``."""
_VERSION_2 = re.compile(rb'("schema_version"\s*:\s*)2\b')
_FIELD_2 = re.compile(rb'"(%s)"(?=\s*:)' % b"|".join(_FIELDS_OF_2))
_VALUE_2 = re.compile(rb'("(?:cause|previous_pin|kind)"\s*:\s*)"(%s)"' % b"|".join(_VALUES_OF_2))
_MARKS = (b'"broken"', b'"told_', b'"room_blocks"', b'"schema_version"')
"""A line without any of them is the same in both versions."""


def upgrade_from(version: int) -> Upgrade | None:
    """The function that upgrades a line of this version to the current one; None if it is current."""
    return _upgrade_2 if version == 2 else None


def _upgrade_2(line: bytes) -> bytes:
    """Upgrades a line. Quotes within JSON strings are escaped, so no text of a client looks like a field."""
    if not any(mark in line for mark in _MARKS):
        return line
    line = _FIELD_2.sub(lambda found: b'"%s"' % _FIELDS_OF_2[found[1]], line)
    line = _VALUE_2.sub(lambda found: b'%s"%s"' % (found[1], _VALUES_OF_2[found[2]]), line)
    return _VERSION_2.sub(rb"\g<1>%d" % SCHEMA_VERSION, line, count=1)
