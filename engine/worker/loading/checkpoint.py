"""The safetensors of a model folder: first what the headers say, then the tensors one by one."""

from __future__ import annotations

import json
import logging
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from tqdm import tqdm

from engine.errors import ModelLoadError
from engine.process.process_log import start_log
from engine.worker.loading.tensor_part import TensorPart

logger = logging.getLogger(__name__)

BAR_AFTER_S = 1.0
ANNOUNCED_BYTES = 1 << 30
_HEADER_LENGTH_BYTES = 8
_SINGLE_NAME = "model.safetensors"
_INDEX_NAME = "model.safetensors.index.json"
_FLOATS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
}
"""The supported dtypes, by their safetensors name. In others, such as fp8, numbers need scales to mean
anything."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor's place in its file, dtype and shape."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    """The dtype by its safetensors name."""


class Checkpoint:
    """The tensors of one folder by name. Raises ModelLoadError if a file is missing or cut short."""

    def __init__(self, folder: Path, weights_name: str | None = None) -> None:
        """``weights_name``: the file that the model's config names (``transformers_weights``)."""
        self.entries: dict[str, TensorEntry] = {}
        for file in _weight_files(folder, weights_name):
            entries = _read_header(file)
            for name in entries.keys() & self.entries.keys():
                raise ModelLoadError(f"Tensor {name} is both in {self.entries[name].file} and in {file}.")
            self.entries.update(entries)

    def check_types(self, names: Collection[str], dtype: torch.dtype) -> None:
        """Raise ModelLoadError for a tensor that is not of a plain float type; log how many will be cast to
        the model's dtype."""
        others: Counter[str] = Counter()
        for name in names:
            entry = self.entries.get(name)
            if entry is None:
                continue
            stored = _FLOATS.get(entry.dtype)
            if stored is None:
                raise ModelLoadError(
                    f"Tensor {name} in {entry.file} is stored as {entry.dtype}, which is not supported: "
                    f"choose from {', '.join(_FLOATS)}."
                )
            if stored != dtype:
                others[str(stored).removeprefix("torch.")] += 1
        for stored_as, count in sorted(others.items()):
            wanted = str(dtype).removeprefix("torch.")
            logger.info("Casting %d tensors from %s to %s.", count, stored_as, wanted)

    def fill(self, parts: Mapping[str, TensorPart]) -> None:
        """Fill the parameters with their parts of the checkpoint."""
        for part, tensor in self.read(parts):
            part.view.copy_(tensor)
            if part.view.dtype == torch.float16 and tensor.dtype != torch.float16:
                check_fits(part.view)

    def read(self, parts: Mapping[str, TensorPart]) -> Iterator[tuple[TensorPart, torch.Tensor]]:
        """Read each part, one at a time and file by file, into host memory; nothing else is read."""
        files = list(dict.fromkeys(self.entries[name].file for name in parts))
        with _bar(files, len(parts)) as bar:
            for file in files:
                with safe_open(file, framework="pt", device="cpu") as opened:
                    for name in opened.keys():  # noqa: SIM118 -- not a mapping
                        if name in parts:
                            yield parts[name], _read(opened, name, parts[name])
                            bar.update()


def _bar(files: list[Path], num_tensors: int) -> tqdm[Any]:
    """A progress bar for slow loads on a terminal; elsewhere, large loads are logged once."""
    num_bytes = sum(file.stat().st_size for file in files)
    tells = start_log.isEnabledFor(logging.INFO)
    if tells and num_bytes >= ANNOUNCED_BYTES and not sys.stderr.isatty():
        start_log.info("Loading %.1f GB of weights.", num_bytes / 1e9)
    return tqdm(
        desc=f"Loading {num_bytes / 1e9:.1f} GB of weights",
        total=num_tensors,
        unit=" tensors",
        delay=BAR_AFTER_S,
        leave=False,
        disable=None if tells else True,
        file=sys.stderr,
    )


def _read(opened: Any, name: str, part: TensorPart) -> torch.Tensor:
    tensor: torch.Tensor = opened.get_tensor(name) if part.count == 1 else opened.get_slice(name)[part.slices]
    return tensor


def check_fits(cast: torch.Tensor) -> None:
    """Raise ModelLoadError if a cast to float16 has overflowed; bfloat16 and float32 have the same range."""
    if not bool(torch.isfinite(cast).all()):
        raise ModelLoadError(
            "The weights hold numbers that float16 cannot: set dtype to bfloat16 or float32."
        )


def _weight_files(folder: Path, weights_name: str | None) -> list[Path]:
    """Choose the safetensors files as transformers does: the one that the config names, else the one with the
    usual name, else those of the index. Without any of them: all safetensors files."""
    if weights_name is not None:
        if not (folder / _in_folder(weights_name, "config.json")).is_file():
            raise ModelLoadError(
                f"The weight file {weights_name} named by config.json is missing from {folder}."
            )
        if not weights_name.endswith(".index.json"):
            return [folder / weights_name]
        return _files_of_index(folder, weights_name)
    if (folder / _SINGLE_NAME).is_file():
        return [folder / _SINGLE_NAME]
    if (folder / _INDEX_NAME).exists():
        return _files_of_index(folder, _INDEX_NAME)
    # Other files, such as adapters and weights under another library's names, may be in the folder too.
    files = sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("*.safetensors"))
    if not files and list(folder.glob("*.bin")):
        raise ModelLoadError(
            f"{folder} holds only pickled weights (.bin), which are not supported; convert it to safetensors."
        )
    if not files:
        raise ModelLoadError(f"{folder} holds no weights: no .safetensors file.")
    return files


def _files_of_index(folder: Path, index_name: str) -> list[Path]:
    index = folder / index_name
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        files = [folder / _in_folder(name, index_name) for name in names]
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelLoadError(f"The weight index {index} cannot be read.") from error
    for file in files:
        if not file.is_file():
            raise ModelLoadError(
                f"The weight file {file.name} named by {index_name} is missing from {folder}."
            )
    return files


def _in_folder(name: str, named_by: str) -> str:
    """Return the name of a file, after checking that it is inside the model's folder."""
    if Path(name).name != name:
        raise ModelLoadError(f"{named_by} names the weight file {name[:100]!r}, which is not in its folder.")
    return name


def _read_header(file: Path) -> dict[str, TensorEntry]:
    """Read the names and shapes of a file's tensors, and check that the file is as long as they need."""
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(_HEADER_LENGTH_BYTES), "little")
            header: dict[str, Any] = json.loads(stream.read(min(length, file.stat().st_size)))
        header.pop("__metadata__", None)
        data_end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        entries = {
            name: TensorEntry(file, tuple(entry["shape"]), str(entry["dtype"]))
            for name, entry in header.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"The weight file {file} has no valid safetensors header.") from error
    expected_bytes = _HEADER_LENGTH_BYTES + length + data_end
    if file.stat().st_size < expected_bytes:
        raise ModelLoadError(
            f"The weight file {file} is cut short: {file.stat().st_size} of {expected_bytes} bytes."
        )
    return entries
