"""The safetensors of a model folder: first what the headers say, then the tensors one by one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from engine.errors import ModelLoadError
from engine.worker.tensor_part import TensorPart

_HEADER_LENGTH_BYTES = 8
_INDEX_NAME = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where a tensor lies and what it is."""

    file: Path
    shape: tuple[int, ...]


class Checkpoint:
    """The tensors of one folder by name. Raises ModelLoadError for a folder that is not whole."""

    def __init__(self, folder: Path) -> None:
        self.entries: dict[str, TensorEntry] = {}
        for file in _weight_files(folder):
            self.entries.update(_read_header(file))

    def fill(self, parts: Mapping[str, TensorPart]) -> None:
        """Put into the parts what they hold."""
        for part, tensor in self.read(parts):
            part.view.copy_(tensor)

    def read(self, parts: Mapping[str, TensorPart]) -> Iterator[tuple[TensorPart, torch.Tensor]]:
        """What each part holds, one at a time and file by file, on the host; nothing else is read."""
        for file in dict.fromkeys(self.entries[name].file for name in parts):
            with safe_open(file, framework="pt", device="cpu") as opened:
                for name in opened.keys():  # noqa: SIM118 -- not a mapping
                    if name in parts:
                        yield parts[name], _read(opened, name, parts[name])


def _read(opened: Any, name: str, part: TensorPart) -> torch.Tensor:
    tensor: torch.Tensor = opened.get_tensor(name) if part.count == 1 else opened.get_slice(name)[part.slices]
    return tensor


def _weight_files(folder: Path) -> list[Path]:
    """The folder's safetensors files: those of the index where there is one."""
    index = folder / _INDEX_NAME
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise ModelLoadError(f"The weight index {index} cannot be read.") from error
        for name in names:
            if not (folder / name).is_file():
                raise ModelLoadError(
                    f"The weight file {name} named by {_INDEX_NAME} is missing from {folder}."
                )
        return [folder / name for name in names]
    files = sorted(folder.glob("*.safetensors"))
    if not files and list(folder.glob("*.bin")):
        raise ModelLoadError(
            f"{folder} holds only pickled weights (.bin), which are not read; convert it to safetensors."
        )
    if not files:
        raise ModelLoadError(f"{folder} holds no weights: no .safetensors file.")
    return files


def _read_header(file: Path) -> dict[str, TensorEntry]:
    """Names and shapes of a file's tensors, after a check that the file is as long as they need."""
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(_HEADER_LENGTH_BYTES), "little")
            header: dict[str, Any] = json.loads(stream.read(min(length, file.stat().st_size)))
        header.pop("__metadata__", None)
        data_end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        entries = {name: TensorEntry(file, tuple(entry["shape"])) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"The weight file {file} has no valid safetensors header.") from error
    expected_bytes = _HEADER_LENGTH_BYTES + length + data_end
    if file.stat().st_size < expected_bytes:
        raise ModelLoadError(
            f"The weight file {file} is cut short: {file.stat().st_size} of {expected_bytes} bytes."
        )
    return entries
