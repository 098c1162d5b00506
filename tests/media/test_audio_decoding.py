"""Audio files are decoded to what the models' processors are given: mono, at the model's rate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import soundfile
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy.signal import resample_poly

from engine.media.audio_decoding import decode, resampled
from engine.media.decoder import MediaDecoder
from engine.media.limits import MAX_FILE_BYTES, MediaFault
from engine.media.sources import InlineMedia, check_file, media_kind, media_source
from engine.records.media import AudioModel, ClipSize, MediaKind, TokenRule
from tests.audio.audio_folders import RATE, Clip, sound
from tests.audio.sounds import audio_url, base64_of, file_of, input_audio, wav

MODEL = AudioModel(5, RATE, 160, TokenRule.CHUNKS, 4 * RATE, 4)


def decoded(data: bytes, path: Path) -> Clip:
    size = decode(data, MODEL, str(path))
    samples: Clip = np.fromfile(path, np.float32)
    assert size == ClipSize(len(samples))
    path.unlink()
    return samples


def test_samples_of_the_models_rate_are_taken_as_they_are(tmp_path: Path) -> None:
    clip = sound(1.2, 1)
    assert np.array_equal(decoded(file_of(clip, subtype="FLOAT"), tmp_path / "x"), clip)
    for form in ("WAV", "FLAC"):
        data = file_of(clip, form)
        wanted, _ = soundfile.read(BytesIO(data), dtype="float32")
        assert np.array_equal(decoded(data, tmp_path / "x"), wanted)


@pytest.mark.parametrize("form", ["MP3", "OGG"])
def test_lossy_files_sound_alike(form: str, tmp_path: Path) -> None:
    clip = sound(2.0, 1)
    found = decoded(file_of(clip, form), tmp_path / "x")[: len(clip)]
    around = slice(RATE // 2, RATE)
    assert np.corrcoef(found[around], clip[around])[0, 1] > 0.9


def test_channels_are_averaged(tmp_path: Path) -> None:
    both = np.stack([sound(1.0, 1), sound(1.0, 2)], axis=1)
    found = decoded(file_of(both, subtype="FLOAT"), tmp_path / "x")
    assert np.array_equal(found, both.mean(axis=1))


@pytest.mark.parametrize("rate", [8000, 22_050, 44_100, 48_000])
def test_other_rates_are_resampled(rate: int, tmp_path: Path) -> None:
    """A tone keeps its pitch and its length, as scipy's resampler has them."""
    time = np.arange(2 * rate + 7) / rate
    tone = (0.5 * np.sin(2 * np.pi * 440 * time)).astype(np.float32)
    found = decoded(file_of(tone, rate=rate, subtype="FLOAT"), tmp_path / "x")
    assert len(found) == -(-len(tone) * RATE // rate)
    common = np.gcd(rate, RATE)
    wanted = resample_poly(tone, RATE // common, rate // common)
    inside = slice(500, 2 * RATE - 500)
    assert np.abs(found[inside] - wanted[inside]).max() < 2e-3


@given(st.integers(1, 5000), st.integers(4000, 192_000))
def test_the_length_is_rounded_up(num_samples: int, rate: int) -> None:
    made = resampled(np.zeros(num_samples, np.float32), rate, MODEL)
    assert len(made) == -(-num_samples * RATE // rate)


@pytest.fixture(scope="module")
def decoder() -> Iterator[MediaDecoder]:
    made = MediaDecoder(MODEL)
    yield made
    made.close()


Bad = Callable[[], bytes]
BAD: list[tuple[Bad, str]] = [
    (lambda: b"RIFF\x24\0\0\0WAVEfmt ", "is broken"),
    (lambda: wav()[:20] + bytes(1000), "is broken|has 0 s"),
    (lambda: b"not audio", "is broken"),
    (lambda: file_of(sound(1, 1), "AIFF"), "is no audio in WAV, FLAC, OGG or MP3"),
    (lambda: wav(0.05), r"has 0.05 s; this model reads clips of 0.1 s to 4 s"),
    (lambda: wav(4.5), r"has more than 4 s; this model reads clips of 0.1 s to 4 s"),
    (lambda: wav(60.0), r"has more than 4 s; this model reads"),
    (lambda: file_of(np.zeros((1600, 9), np.float32)), "has 9 channels of 16000 samples per second; at most"),
    (lambda: file_of(np.zeros(1600, np.float32), rate=400_000), "has 1 channels of 400000 samples"),
    (lambda: file_of(np.full(1600, np.nan, np.float32), subtype="FLOAT"), "no numbers up to 32768"),
    (lambda: file_of(np.full(1600, 1e20, np.float32), subtype="FLOAT"), "no numbers up to 32768"),
]


@pytest.mark.parametrize(("data", "fault"), BAD, ids=range(len(BAD)))
def test_a_bad_file_is_a_fault_of_its_own(
    decoder: MediaDecoder, data: Bad, fault: str, tmp_path: Path
) -> None:
    """A bad file leaves nothing behind, and the same process decodes the next clip."""
    decoder.decode(wav(), str(tmp_path / "before"))
    pid = decoder.pid
    with pytest.raises(MediaFault, match=fault):
        decoder.decode(data(), str(tmp_path / "bad"))
    assert decoder.decode(wav(), str(tmp_path / "good")) == ClipSize(11_200)
    assert decoder.pid == pid
    assert {file.name for file in tmp_path.iterdir()} == {"before", "good"}


FILES = {form: file_of(sound(1.0, 1), form) for form in ("WAV", "FLAC", "OGG", "MP3")}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(list(FILES)),
    spoiled=st.dictionaries(st.floats(0, 0.999), st.integers(0, 255), max_size=6),
    kept=st.floats(0.1, 1),
)
def test_a_spoiled_file_is_decoded_or_refused(
    decoder: MediaDecoder, tmp_path: Path, name: str, spoiled: dict[float, int], kept: float
) -> None:
    """The decoder process survives any bytes."""
    data = bytearray(FILES[name])
    for place, byte in spoiled.items():
        data[int(place * len(data))] = byte
    path = tmp_path / "samples"
    path.unlink(missing_ok=True)
    try:
        size = decoder.decode(bytes(data[: int(kept * len(data))]), str(path))
        assert path.stat().st_size == size.num_bytes
    except MediaFault:
        assert not path.exists()
    assert decoder.pid is not None


@pytest.mark.slow
def test_the_longest_clip_is_decoded(tmp_path: Path) -> None:
    """Half an hour of stereo at 44.1 kHz fits the process's limits of time and memory."""
    half_an_hour = AudioModel(5, RATE, 160, TokenRule.CHUNKS, 1800 * RATE, 4)
    quiet = np.zeros((1800 * 44_100, 2), np.int16)
    data = file_of(quiet, "FLAC", 44_100)  # type: ignore[arg-type]
    decoder = MediaDecoder(half_an_hour)
    try:
        assert decoder.decode(data, str(tmp_path / "long")) == ClipSize(1800 * RATE)
    finally:
        decoder.close()


@pytest.mark.parametrize(
    "part",
    [
        input_audio(wav()),
        audio_url(wav()),
        {"type": "audio", "data": base64_of(wav()), "mimeType": "audio/wav"},
        {"type": "resource", "resource": {"uri": "x:y", "mimeType": "audio/wav", "blob": base64_of(wav())}},
    ],
)
def test_clips_are_found_in_parts_of_any_api(part: dict[str, object]) -> None:
    assert media_kind(part) is MediaKind.AUDIO
    assert media_source(part) == InlineMedia(base64_of(wav()))


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b"", "is not audio in WAV, FLAC, OGG or MP3"),
        (b"\x89PNG\r\n\x1a\n" + bytes(50), "is not audio"),
        (wav() + bytes(MAX_FILE_BYTES[MediaKind.AUDIO]), "the limit for one clip is 25 MiB"),
    ],
)
def test_what_shows_without_decoding_is_refused_at_once(data: bytes, fault: str) -> None:
    with pytest.raises(MediaFault, match=fault):
        check_file(data, MediaKind.AUDIO)
