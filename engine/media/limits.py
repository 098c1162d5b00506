"""Limits on the files of pictures and clips, and the errors for those that exceed them."""

from __future__ import annotations

from engine.records.media import MediaKind

MAX_FILE_BYTES = {MediaKind.IMAGE: 20 * 2**20, MediaKind.AUDIO: 25 * 2**20}
"""Maximum size of a file."""
MAX_PIXELS = 64_000_000
"""Maximum number of pixels of a file: 8000x8000, Anthropic's limit. Pillow's own limit is 179 million."""
MAX_CLIP_S = 1800
"""Maximum length of a clip, in seconds: Voxtral's limit for transcription. Models may have lower ones."""
MAX_CHANNELS = 8
"""Maximum number of channels of a clip's file, which are averaged."""
MAX_SAMPLING_RATE = 192_000
"""Maximum number of samples for each second of a clip's file."""


class MediaFault(Exception):
    """The picture or clip cannot be used. The message follows its name, as in "is broken"."""


class MediaFailure(Exception):
    """The pixels or samples of a file could not be stored; the file itself is not at fault."""


def too_many_bytes(num_bytes: int, kind: MediaKind) -> MediaFault:
    """Returns the fault of a file of this size."""
    limit = f"{MAX_FILE_BYTES[kind] // 2**20} MiB"
    return MediaFault(f"has {num_bytes / 2**20:.1f} MiB; the limit for one {kind.noun} is {limit}")


def too_many_pixels(width: int, height: int) -> MediaFault:
    """Returns the fault of a picture of this size."""
    return MediaFault(f"has {width}x{height} pixels; at most {MAX_PIXELS} are decoded")
