"""The device under test. All CUDA-only code is here; the host stands in for the GPU where the command itself
is checked."""

from __future__ import annotations

import gc
import platform
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Protocol

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.record import Machine
from benchmarks.gpu.timeline import DEVICE_WORK, HOST_WORK, Span, read_spans


class Device(Protocol):
    """A device for tensors, and how to know when its work is done."""

    where: torch.device

    @property
    def name(self) -> str: ...

    def synchronize(self) -> None:
        """Waits for all work that was begun."""

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """Allocates [num_bytes] uint8 of pinned host memory, which the device copies from by itself."""

    def give_back(self) -> None:
        """Frees cached memory that is not in use."""

    def recorded(self, action: Callable[[], object]) -> Callable[[], object]:
        """Returns a replay of the launches of ``action``, which has run before, without host work."""

    def spans(self, action: Callable[[], object]) -> list[Span]:
        """Returns when the device worked while ``action`` ran."""


class CudaDevice:
    """The first GPU."""

    def __init__(self) -> None:
        self.where = torch.device("cuda", 0)

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.where)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.where)

    def pinned(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def give_back(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()

    def recorded(self, action: Callable[[], object]) -> Callable[[], object]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            action()
        return graph.replay

    def spans(self, action: Callable[[], object]) -> list[Span]:
        return _profiled(action, ProfilerActivity.CUDA, DEVICE_WORK, self.synchronize)


class HostDevice:
    """The CPU."""

    def __init__(self) -> None:
        self.where = torch.device("cpu")

    @property
    def name(self) -> str:
        return f"CPU ({platform.machine()})"

    def synchronize(self) -> None:
        """Does nothing: the host's work is synchronous."""

    def pinned(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def give_back(self) -> None:
        gc.collect()

    def recorded(self, action: Callable[[], object]) -> Callable[[], object]:
        return action

    def spans(self, action: Callable[[], object]) -> list[Span]:
        return _profiled(action, ProfilerActivity.CPU, HOST_WORK, self.synchronize)


def has_gpu() -> bool:
    return torch.cuda.is_available()


def select_device(name: str) -> Device:
    return HostDevice() if name == "cpu" else CudaDevice()


def describe(device: Device, toy_sizes: bool) -> Machine:
    return Machine(
        device=device.name,
        toy_sizes=toy_sizes,
        python=platform.python_version(),
        torch=str(torch.__version__),
        triton=_version_of("triton"),
        transformers=_version_of("transformers"),
    )


def _version_of(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return "not installed"


def seconds_of(device: Device, action: Callable[[], object]) -> float:
    """Returns the seconds of ``action``, from an idle device to an idle device."""
    device.synchronize()
    began_s = time.perf_counter()
    action()
    device.synchronize()
    return time.perf_counter() - began_s


def _profiled(
    action: Callable[[], object],
    activity: ProfilerActivity,
    kinds: frozenset[str],
    synchronize: Callable[[], None],
) -> list[Span]:
    with profile(activities=[activity]) as profiler:
        action()
        synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return read_spans(path, kinds)
