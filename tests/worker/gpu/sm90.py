"""The resources of a kernel on a Hopper GPU, found by compiling it; no GPU is needed.

Runs in a separate process, because this one's kernels use the interpreter.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

_POINTERS = {
    torch.float32: "*fp32:16",
    torch.bfloat16: "*bf16:16",
    torch.float16: "*fp16:16",
    torch.float8_e4m3fn: "*fp8e4nv:16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
Constant = int | float | bool | str | None

_SHOWN = ("HEAD_DIM", "PAGE", "BLOCK")
"""Constants that distinguish builds of one kernel."""
MAX_SHARED_BYTES = 227 * 1024
"""Shared memory of one thread block on sm_90 (CUDA C++ Programming Guide, table of compute capabilities)."""


@dataclass(frozen=True, slots=True)
class KernelBuild:
    """One specialization of a kernel."""

    kernel: Any
    """A function decorated with ``triton.jit``, at the top level of its module."""
    signature: Mapping[str, str]
    """Types of the non-constant arguments: ``*bf16``, ``i32``, ``fp32``; the suffix ``:16`` marks one that 16
    divides, as addresses of tensors and most strides are."""
    constexprs: Mapping[str, Constant] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 3
    maxnreg: int | None = None


@dataclass(frozen=True, slots=True)
class KernelResources:
    """Resources of one thread block; registers of one thread."""

    registers: int
    spill_bytes: int
    shared_bytes: int


class LaunchRecorder:
    """Replaces a kernel where it is launched, and records the builds that would have been compiled.

    Tensors may be on the device ``meta``. As in real launches, addresses of floats and strides that 16
    divides are marked so; other numbers are not.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self.builds: list[KernelBuild] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._launch

    def _launch(
        self,
        *args: torch.Tensor | int | float,
        num_warps: int = 4,
        num_stages: int = 3,
        maxnreg: int | None = None,
        enable_fp_fusion: bool = True,
        **constexprs: Constant,
    ) -> None:
        signature = {
            name: _type_of(name, value)
            for name, value in zip(self._kernel.arg_names[: len(args)], args, strict=True)
        }
        build = KernelBuild(self._kernel, signature, constexprs, num_warps, num_stages, maxnreg)
        self.builds.append(build)


def _type_of(name: str, value: torch.Tensor | int | float) -> str:
    if isinstance(value, torch.Tensor):
        return _POINTERS[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32:16" if name.endswith("_stride") and value % 16 == 0 else "i32"


def compile_for_sm90(
    kernel: Any,
    signature: Mapping[str, str],
    constexprs: Mapping[str, Constant] | None = None,
    *,
    num_warps: int = 4,
    num_stages: int = 3,
) -> KernelResources:
    """Compiles a KernelBuild. Raises CalledProcessError, with the compiler's message, if it fails."""
    [resources] = compile_all_for_sm90(
        [KernelBuild(kernel, signature, constexprs or {}, num_warps, num_stages)]
    )
    return resources


def compile_all_for_sm90(builds: Sequence[KernelBuild]) -> list[KernelResources]:
    """Compiles all in one process, because its start takes longer than a kernel."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.worker.gpu.sm90"],
        input=json.dumps([_as_json(build) for build in builds]),
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
        check=True,
    )
    found = [KernelResources(**resources) for resources in json.loads(done.stdout)]
    for build, resources in zip(builds, found, strict=True):
        print(_line(build, resources))  # seen with pytest -s
    return found


def _line(build: KernelBuild, found: KernelResources) -> str:
    """A line with the kernel, its types and sizes, and its resources."""
    types = sorted({type_.strip("*").partition(":")[0] for type_ in build.signature.values() if "*" in type_})
    sizes = [f"{name} {build.constexprs[name]}" for name in _SHOWN if name in build.constexprs]
    return (
        f"{build.kernel.fn.__name__:<16} {found.registers:>3} registers, {found.spill_bytes} bytes spilled, "
        f"{found.shared_bytes:>6} bytes shared, {build.num_warps} warps; {', '.join(types + sizes)}"
    )


def _as_json(build: KernelBuild) -> dict[str, object]:
    function = build.kernel.fn
    return {
        "kernel": (function.__module__, function.__name__),
        "signature": dict(build.signature),
        "constexprs": dict(build.constexprs),
        "num_warps": build.num_warps,
        "num_stages": build.num_stages,
        "maxnreg": build.maxnreg,
    }


def _from_json(fields: dict[str, Any]) -> KernelBuild:
    module, name = fields.pop("kernel")
    return KernelBuild(getattr(import_module(module), name), **fields)


def _compile(build: KernelBuild) -> KernelResources:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names: list[str] = build.kernel.arg_names
    types = {name: build.signature.get(name, "constexpr") for name in names}
    source = ASTSource(
        fn=build.kernel,
        signature={name: type_.removesuffix(":16") for name, type_ in types.items()},
        constexprs=dict(build.constexprs),
        attrs={
            (names.index(name),): [["tt.divisibility", 16]]
            for name, type_ in types.items()
            if type_.endswith(":16")
        },
    )
    options = {
        "num_warps": build.num_warps,
        "num_stages": build.num_stages,
        "maxnreg": build.maxnreg,
        "enable_fp_fusion": True,
    }
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return _resources(compiled.asm["cubin"], compiled.metadata.shared)


def _resources(cubin: bytes, shared_bytes: int) -> KernelResources:
    """Combines the kernel's shared memory, which only the launch requests, with registers and spilled bytes:
    what does not fit into registers is on the stack, which holds nothing else."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        report = subprocess.run(
            [str(tool), "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    used = {name: int(number) for name, number in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", report)}
    return KernelResources(used["REG"], used["STACK"] + used["LOCAL"], shared_bytes)


if __name__ == "__main__":
    wanted = json.load(sys.stdin)
    json.dump([asdict(_compile(_from_json(fields))) for fields in wanted], sys.stdout)
