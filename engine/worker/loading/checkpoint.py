"""The safetensors of a model folder: reads first the headers, then the tensors one by one."""

from __future__ import annotations

import json
import logging
import sys
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from engine.errors import ModelLoadError
from engine.process.process_log import start_log
from engine.worker.loading.formats.stored_tensor import (
    PlainTensor,
    StoredTensor,
    TensorEntry,
    TensorFiles,
    region_of,
)
from engine.worker.loading.formats.weight_format import WeightFormat
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
"""The supported dtypes, by their safetensors name. Numbers of other dtypes, such as fp8, mean nothing without
scales."""


class Checkpoint:
    """The tensors of one folder by name. Raises ModelLoadError if a file is missing or cut short, or if a
    quantized weight lacks a tensor."""

    def __init__(
        self,
        folder: Path,
        weights_name: str | None = None,
        weight_format: WeightFormat | None = None,
        name_of: Callable[[str], str | None] | None = None,
    ) -> None:
        """``weights_name``: the file that the model's config names (``transformers_weights``);
        ``weight_format``: how weights are stored, if not plain; ``name_of``: maps a tensor's name in the
        files to the one here, None to leave it out."""
        entries: dict[str, TensorEntry] = {}
        for file in _weight_files(folder, weights_name):
            found = _read_header(file)
            for name in found.keys() & entries.keys():
                raise ModelLoadError(f"Tensor {name} is both in {entries[name].file} and in {file}.")
            entries.update(found)
        num_found = len(entries)
        if name_of is not None:
            entries = {here: entry for name, entry in entries.items() if (here := name_of(name)) is not None}
        self.num_left_out = num_found - len(entries)
        """The number of tensors in the files that are left out here."""
        self.tensors: dict[str, StoredTensor] = (
            {name: PlainTensor(entry) for name, entry in entries.items()}
            if weight_format is None
            else weight_format.tensors(entries)
        )

    def check_types(self, names: Collection[str], dtype: torch.dtype) -> None:
        """Raise ModelLoadError for a plain tensor that is not of a plain float type; log how many tensors
        will be cast to the model's dtype."""
        others: Counter[str] = Counter()
        for name in names:
            tensor = self.tensors.get(name)
            if not isinstance(tensor, PlainTensor):
                continue
            entry = tensor.entry
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

    def float_names(self) -> set[str]:
        """The plain tensors that hold floats of any kind."""
        return {
            name
            for name, tensor in self.tensors.items()
            if isinstance(tensor, PlainTensor) and tensor.entry.dtype.startswith(("BF", "F"))
        }

    def is_idle_bias(self, name: str) -> bool:
        """Whether it is an all-zero bias of a quantized weight, as some GPTQ writers add to every linear."""
        bias = self.tensors[name]
        weight = self.tensors.get(f"{name.removesuffix('bias')}weight")
        if not name.endswith(".bias") or weight is None or isinstance(weight, PlainTensor):
            return False
        with TensorFiles() as files:
            return not files.read(bias.entries[0]).any()

    def fill(self, parts: Mapping[str, TensorPart]) -> None:
        """Fill the parameters with their parts of the checkpoint, one at a time and file by file; reads
        nothing else."""
        files = list(dict.fromkeys(self._file_of(name) for name in parts))
        with _bar(files, len(parts)) as bar, TensorFiles() as opened:
            for name in sorted(parts, key=lambda name: files.index(self._file_of(name))):
                self._fill(name, parts[name], opened)
                bar.update()

    def _file_of(self, name: str) -> Path:
        return self.tensors[name].entries[0].file

    def _fill(self, name: str, part: TensorPart, files: TensorFiles) -> None:
        tensor = self.tensors[name]
        view = part.view
        for piece, slices in zip(part.views, part.slices, strict=True):
            tensor.fill(piece, files, region_of(tensor.shape, slices))
        if view.dtype == torch.float16 and tensor.entries[0].dtype != "F16":
            check_fits(view)


def _bar(files: list[Path], num_tensors: int) -> tqdm[Any]:
    """A progress bar for slow loads on a terminal; elsewhere, it logs large loads once."""
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


def check_fits(cast: torch.Tensor) -> None:
    """Raise ModelLoadError if a cast to float16 has overflowed; bfloat16 and float32 have the same range."""
    if not bool(torch.isfinite(cast).all()):
        raise ModelLoadError(
            "The weights hold numbers too large for float16: set dtype to bfloat16 or float32."
        )


def _weight_files(folder: Path, weights_name: str | None) -> list[Path]:
    """Choose the safetensors files like transformers: the one that the config names, else the one with the
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
    # The folder may also have other files, such as adapters and weights under another library's names.
    files = sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("*.safetensors"))
    if not files and list(folder.glob("*.bin")):
        raise ModelLoadError(
            f"{folder} holds only pickled weights (.bin), which are not supported; convert it to safetensors."
        )
    if not files:
        raise ModelLoadError(f"{folder} holds no weights: no .safetensors file.")
    return files


def stored_dtype(folder: Path) -> torch.dtype | None:
    """The type in which most bytes are stored, of bf16, fp16 and fp32; None if there are none."""
    num_bytes: Counter[torch.dtype] = Counter()
    for file in _weight_files(folder, None):
        for entry in _read_header(file).values():
            dtype = _FLOATS.get(entry.dtype, torch.float64)
            if dtype != torch.float64:
                num_bytes[dtype] += entry.num_bytes
    return max(num_bytes, key=lambda dtype: num_bytes[dtype], default=None)


def _files_of_index(folder: Path, index_name: str) -> list[Path]:
    index = folder / index_name
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        files = [folder / _in_folder(name, index_name) for name in names]
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
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
        entries = {name: _entry(name, file, entry) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelLoadError(f"The weight file {file} has no valid safetensors header.") from error
    expected_bytes = _HEADER_LENGTH_BYTES + length + data_end
    if file.stat().st_size < expected_bytes:
        raise ModelLoadError(
            f"The weight file {file} is cut short: {file.stat().st_size} of {expected_bytes} bytes."
        )
    return entries


def _entry(name: str, file: Path, header: dict[str, Any]) -> TensorEntry:
    begin, end = header["data_offsets"]
    return TensorEntry(name, file, tuple(header["shape"]), str(header["dtype"]), end - begin)
