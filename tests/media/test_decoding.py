"""Pixels equal those of transformers' processor bit for bit; a bad picture fails only its own request."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps
from transformers.image_utils import SizeDict
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

from engine.media import decoder_process
from engine.media.decoder import MediaDecoder
from engine.media.decoding import decode
from engine.media.limits import MediaFailure, MediaFault
from engine.media.resizing import MAX_ASPECT_RATIO, fitted_size
from engine.records.media import PictureModel, PictureSize
from tests.media.pictures import QWEN, SMALL, file_of, flat_png, noise, png

Array = npt.NDArray[np.uint8]


def expected(data: bytes, model: PictureModel) -> Array:
    """Pixels [height, width, 3] that transformers reads from a picture's file, before rescaling them."""
    processor = Qwen2VLImageProcessorPil()
    upright = ImageOps.exif_transpose(Image.open(BytesIO(data)))
    image = processor.process_image(upright, do_convert_rgb=True)
    size = SizeDict(shortest_edge=model.min_pixels, longest_edge=model.max_pixels)
    resized = processor.resize(image, size, processor.resample, factor=model.factor)
    return np.moveaxis(resized, 0, -1)


def decoded(data: bytes, model: PictureModel, path: Path) -> Array:
    size = decode(data, model, str(path))
    return np.frombuffer(path.read_bytes(), np.uint8).reshape(size.height, size.width, 3)


def with_orientation(turn: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = turn
    return file_of(noise(60, 40), "JPEG", exif=exif)


def animation(form: str) -> bytes:
    frames = [noise(50, 40, seed=seed) for seed in range(3)]
    return file_of(frames[0], form, save_all=True, append_images=frames[1:])


def palette_with_hole() -> bytes:
    picture = noise(40, 40).quantize(16)
    return file_of(picture, "PNG", transparency=3)


FILES = {
    "rgb": file_of(noise(300, 200)),
    "alpha": file_of(noise(70, 90, "RGBA")),
    "gray": file_of(noise(64, 65, "L")),
    "gray and alpha": file_of(noise(64, 65, "LA")),
    "bits": file_of(noise(64, 65, "L").convert("1")),
    "palette": file_of(noise(90, 50).quantize(32)),
    "palette with a hole": palette_with_hole(),
    "jpeg": file_of(noise(130, 77), "JPEG"),
    "gray jpeg": file_of(noise(130, 77, "L"), "JPEG"),
    "cmyk jpeg": file_of(noise(130, 77, "CMYK"), "JPEG"),
    "webp": file_of(noise(120, 60), "WEBP"),
    "webp with alpha": file_of(noise(120, 60, "RGBA"), "WEBP", lossless=True),
    "gif": animation("GIF"),
    "moving webp": animation("WEBP"),
    "moving png": animation("PNG"),
    "bmp": file_of(noise(33, 44), "BMP"),
    "tiny": file_of(noise(1, 3)),
    "wide": file_of(noise(400, 3)),
} | {f"orientation {turn}": with_orientation(turn) for turn in range(10)}


@pytest.mark.parametrize("model", [QWEN, SMALL], ids=["qwen", "small"])
@pytest.mark.parametrize("data", FILES.values(), ids=FILES)
def test_pixels_are_those_of_transformers(data: bytes, model: PictureModel, tmp_path: Path) -> None:
    np.testing.assert_array_equal(decoded(data, model, tmp_path / "pixels"), expected(data, model))


def test_gray_of_16_bits_is_scaled_to_8(tmp_path: Path) -> None:
    """Values are scaled by 256; Pillow, and so transformers, turns all above 255 of 65535 white."""
    ramp = np.arange(6400, dtype=np.uint16).reshape(80, 80) * 10
    in_8_bits = file_of(Image.fromarray((ramp >> 8).astype(np.uint8)))
    np.testing.assert_allclose(
        decoded(file_of(Image.fromarray(ramp)), SMALL, tmp_path / "pixels"),
        decoded(in_8_bits, SMALL, tmp_path / "others"),
        atol=1,
    )


@given(
    height=st.integers(1, 9000),
    width=st.integers(1, 9000),
    factor=st.sampled_from((4, 14, 16)),
    min_pixels=st.integers(1, 60_000),
    more=st.integers(200_000, 20_000_000),
)
def test_sizes_are_those_of_transformers(
    height: int, width: int, factor: int, min_pixels: int, more: int
) -> None:
    """Sizes equal those of transformers, and no picture has more tokens than the model allows."""
    model = PictureModel(0, factor, 2, min_pixels, min_pixels + more, 1)
    if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
        with pytest.raises(MediaFault, match="more than 200 times"):
            fitted_size(height, width, model)
        return
    fitted = fitted_size(height, width, model)
    wanted = smart_resize(height, width, 2 * factor, min_pixels, min_pixels + more)
    assert (fitted.height, fitted.width) == wanted
    assert model.num_tokens(fitted) <= model.max_tokens


def test_what_cannot_fit_is_refused() -> None:
    """A side is at least one token: a long, narrow picture may exceed the model's pixels."""
    model = PictureModel(0, 14, 2, 784, 7840, 1)
    with pytest.raises(MediaFault, match="too narrow to fit into the model's 7840 pixels"):
        fitted_size(10, 2000, model)


@pytest.fixture(scope="module")
def decoder() -> Iterator[MediaDecoder]:
    made = MediaDecoder(QWEN)
    yield made
    made.close()


Bad = Callable[[], bytes]
BAD: list[tuple[Bad, str]] = [
    (lambda: png()[:-30], "is broken"),
    (lambda: png()[:40] + bytes(1000), "is broken"),
    (lambda: b"\x89PNG\r\n\x1a\n", "is broken"),
    (lambda: b"not a picture", "is broken"),
    (lambda: file_of(noise(20, 20), "TIFF"), "is broken"),
    (lambda: file_of(noise(20, 20), "PPM"), "is broken"),
    (lambda: file_of(noise(20, 20), "JPEG")[:300], "is broken"),
    (lambda: flat_png(8001, 8000), "has 8001x8000 pixels; at most 64000000 are decoded"),
    (lambda: flat_png(16001, 8001, "1"), "has more than 64000000 pixels"),
    (lambda: flat_png(1000, 4), "more than 200 times"),
]


@pytest.mark.parametrize(("data", "fault"), BAD, ids=range(len(BAD)))
def test_a_bad_file_is_a_fault_of_its_own(
    decoder: MediaDecoder, data: Bad, fault: str, tmp_path: Path
) -> None:
    """A bad file leaves nothing behind, and the same process decodes the next picture."""
    decoder.decode(png(), str(tmp_path / "before"))
    pid = decoder.pid
    with pytest.raises(MediaFault, match=fault):
        decoder.decode(data(), str(tmp_path / "bad"))
    assert decoder.decode(png(), str(tmp_path / "good")) == PictureSize(56, 84)
    assert decoder.pid == pid
    assert {file.name for file in tmp_path.iterdir()} == {"before", "good"}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(
        ("rgb", "palette with a hole", "jpeg", "webp with alpha", "gif", "bmp", "moving png")
    ),
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
    path = tmp_path / "pixels"
    path.unlink(missing_ok=True)
    pid = decoder.pid
    try:
        size = decoder.decode(bytes(data[: int(kept * len(data))]), str(path))
        assert path.stat().st_size == size.num_bytes
    except MediaFault:
        assert not path.exists()
    assert pid in (None, decoder.pid)


@pytest.mark.slow
def test_the_largest_picture_is_decoded(decoder: MediaDecoder, tmp_path: Path) -> None:
    """The largest picture, in the mode that takes most memory, fits the process's limit."""
    assert decoder.decode(flat_png(8000, 8000, "RGBA"), str(tmp_path / "large")) == PictureSize(980, 980)


def test_a_picture_that_takes_too_long_ends_the_process_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The time limit, shortened here, ends the decoder process alone; the next picture is decoded."""
    impatient = (
        "import pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer)\n"
        "import engine.media.decoder_process as process; process.TIME_LIMIT_S = 0.02; process.main()"
    )
    command = [sys.executable, "-P", "-c", impatient]
    monkeypatch.setattr("engine.media.decoder.spawn_command", lambda module: command)
    decoder = MediaDecoder(QWEN)
    large = file_of(Image.effect_mandelbrot((2500, 2500), (-3, -2.5, 2, 2.5), 50))
    try:
        with pytest.raises(MediaFault, match=f"takes more than {decoder_process.TIME_LIMIT_S:g} s"):
            decoder.decode(large, str(tmp_path / "large"))
        assert decoder.pid is None
        assert decoder.decode(png(), str(tmp_path / "small")) == PictureSize(56, 84)
    finally:
        decoder.close()


def test_a_process_that_was_killed_costs_no_picture(tmp_path: Path) -> None:
    decoder = MediaDecoder(QWEN)
    try:
        decoder.decode(png(), str(tmp_path / "one"))
        assert decoder._process is not None
        decoder._process.kill()
        assert decoder.decode(png(), str(tmp_path / "two")) == PictureSize(56, 84)
    finally:
        decoder.close()


@pytest.mark.parametrize(
    ("end", "error", "message"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", MediaFault, "it crashes the decoder"),
        ("os.kill(os.getpid(), signal.SIGKILL)", MediaFailure, "ended with exit code -9"),
        ("sys.exit(3)", MediaFailure, "ended with exit code 3"),
    ],
)
def test_a_picture_that_ends_each_process_is_given_up(
    end: str, error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A crash counts as the picture's fault; another exit of the decoder does not."""
    mortal = f"import os, signal, sys; sys.stdin.buffer.read(20000); {end}"
    command = [sys.executable, "-P", "-c", mortal]
    monkeypatch.setattr("engine.media.decoder.spawn_command", lambda module: command)
    decoder = MediaDecoder(QWEN)
    try:
        with pytest.raises(error, match=message):
            decoder.decode(png(100, 100), str(tmp_path / "pixels"))
        assert not list(tmp_path.iterdir())
    finally:
        decoder.close()


def test_a_place_that_cannot_be_written_to_is_no_fault_of_the_picture(decoder: MediaDecoder) -> None:
    with pytest.raises(MediaFailure, match="No such file or directory"):
        decoder.decode(png(), "/nowhere/pixels")


def test_a_closed_decoder_starts_no_process(tmp_path: Path) -> None:
    decoder = MediaDecoder(QWEN)
    decoder.close()
    with pytest.raises(MediaFailure, match="shutting down"):
        decoder.decode(png(), str(tmp_path / "pixels"))
    assert decoder.pid is None
