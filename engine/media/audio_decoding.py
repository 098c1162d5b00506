"""Decodes the bytes of an audio file to samples at the model's rate, as librosa and so transformers do: the
mean of all channels, resampled by soxr's high quality. The only module that uses soundfile and soxr; files of
clients are decoded in a separate process."""

from __future__ import annotations

from io import BytesIO

import numpy as np
import numpy.typing as npt
import soundfile
import soxr

from engine.media.file import write_new
from engine.media.limits import MAX_CHANNELS, MAX_SAMPLING_RATE, MediaFault
from engine.records.media import AudioModel, ClipSize, MediaModel

FORMATS = ("WAV", "WAVEX", "FLAC", "OGG", "MP3")
"""The allowed formats."""

MAX_AMPLITUDE = 2**15
"""Larger samples, which no recording has, would overflow in a model's features."""
Samples = npt.NDArray[np.float32]
"""[num_samples], between -1 and 1."""


def decode(data: bytes, model: MediaModel, path: str) -> ClipSize:
    """Writes the samples of a file at the model's rate; returns their number.

    MediaFault if it is no audio or too long. An OSError concerns the file at ``path``.
    """
    assert isinstance(model, AudioModel)
    try:
        samples = _decoded(data, model)
    except soundfile.LibsndfileError as error:
        raise MediaFault("is broken: it cannot be decoded") from error
    except MemoryError as error:
        raise MediaFault("needs more memory to decode than a clip may") from error
    return write_samples(samples, model, path)


def write_samples(samples: Samples, model: AudioModel, path: str) -> ClipSize:
    """Writes samples at the model's rate; MediaFault if they are too few, too many, or not numbers."""
    size = ClipSize(len(samples))
    if fault := model.fault_of(size):
        raise MediaFault(fault)
    if not (np.abs(samples) <= MAX_AMPLITUDE).all():  # false for NaN, too
        raise MediaFault(f"has samples that are no numbers up to {MAX_AMPLITUDE}; sound is between -1 and 1")
    write_new(np.ascontiguousarray(samples, np.float32).data.cast("B"), path)
    return size


def resampled(samples: Samples, rate: int, model: AudioModel) -> Samples:
    """The same sound at the model's rate. librosa's length: the fraction of a sample at the end is heard."""
    if rate == model.sampling_rate:
        return samples
    made: Samples = soxr.resample(samples, rate, model.sampling_rate, quality="HQ")
    num_samples = -(-len(samples) * model.sampling_rate // rate)
    return np.pad(made[:num_samples], (0, max(0, num_samples - len(made))))


def _decoded(data: bytes, model: AudioModel) -> Samples:
    with soundfile.SoundFile(BytesIO(data)) as file:
        if file.format not in FORMATS:
            raise MediaFault("is no audio in WAV, FLAC, OGG or MP3")
        if file.channels > MAX_CHANNELS or file.samplerate > MAX_SAMPLING_RATE:
            raise MediaFault(
                f"has {file.channels} channels of {file.samplerate} samples per second; at most "
                f"{MAX_CHANNELS} of {MAX_SAMPLING_RATE} are decoded"
            )
        # One second more than allowed, whatever the header says of the length.
        most = (model.max_samples // model.sampling_rate + 1) * file.samplerate
        samples = file.read(min(most, file.frames), dtype="float32", always_2d=True)
        rate = file.samplerate
    mono: Samples = samples[:, 0] if samples.shape[1] == 1 else samples.mean(axis=1)
    return resampled(mono, rate, model)
