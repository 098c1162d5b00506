"""Audio files in several formats, and the parts of requests that hold them."""

from __future__ import annotations

from base64 import b64encode
from io import BytesIO
from typing import Any

import numpy as np
import soundfile

from tests.audio.audio_folders import RATE, Clip, sound


def file_of(clip: Clip, form: str = "WAV", rate: int = RATE, **options: Any) -> bytes:
    """The bytes of an audio file; ``clip``: [num_samples] or [num_samples, num_channels]"""
    out = BytesIO()
    soundfile.write(out, clip, rate, format=form, **options)
    return out.getvalue()


def wav(seconds: float = 0.7, seed: int = 0) -> bytes:
    """A WAV file with different content for each seed."""
    return file_of(sound(seconds, seed))


def base64_of(data: bytes) -> str:
    return b64encode(data).decode()


def input_audio(data: bytes, form: str = "wav") -> dict[str, Any]:
    """An audio part of OpenAI's chat completions and Responses."""
    return {"type": "input_audio", "input_audio": {"data": base64_of(data), "format": form}}


def audio_url(data: bytes) -> dict[str, Any]:
    """An audio part as vLLM and Qwen have it."""
    return {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{base64_of(data)}"}}


def heard(data: bytes) -> Clip:
    """The samples of a mono file at the models' rate."""
    samples, rate = soundfile.read(BytesIO(data), dtype="float32")
    assert rate == RATE
    return np.asarray(samples)
