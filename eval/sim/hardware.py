"""The peak rates of GPUs and disks: the ceilings of the roofline. Knows no models."""

from __future__ import annotations

from dataclasses import dataclass

from eval.errors import HardwareError

GIB = 2**30

H200_BANDWIDTH = 4.3e12
"""Bytes per second, measured: a large copy, counting bytes read and bytes written."""
H200_FLOPS = 790e12
"""FLOP/s, measured: large bf16 GEMMs."""
BANDWIDTH_SHARE = H200_BANDWIDTH / 4.8e12
"""Share of the published peak; also used for GPUs that were not measured."""
FLOPS_SHARE = H200_FLOPS / 989e12
"""Share of the published dense bf16 peak, likewise."""


PARAMETER_BYTES = {"bf16": 2, "fp8": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One accelerator of the SXM form, with NVLink to its peers in the machine."""

    name: str
    memory_bytes: float
    """Memory as CUDA reports it."""
    bandwidth: float
    """Memory bandwidth in bytes/s, as large kernels reach it."""
    flops: float
    """FLOP/s of large dense bf16 GEMMs."""
    fp8_speedup: float
    """Speed of GEMMs with fp8 weights relative to bf16; 1 where the hardware has no fp8."""
    host_link: float
    """Host memory to GPU, bytes/s in one direction, with blocks of 2 MiB."""
    peer_link: float
    """NVLink, bytes/s in one direction, published."""
    measured: bool = False
    """Whether bandwidth and flops were measured; otherwise a share of the published peak."""


# Published peaks: data sheets; B200's bandwidth as its driver reports it (pytorch/ao #4002: 7680 bits at 3996
# MHz). Memory: as CUDA reports it (79.1 of 80 "GB", 139.8 of 141, 178.4 of 180). fp8: 2 by the data sheets,
# of which 1.5 is assumed to be reached. Host link: 50 GB/s was measured over PCIe 5 with block-major KV (vLLM
# blog, 8 January 2026); PCIe 4 is half as fast.
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu(
            name="a100-80",
            memory_bytes=79.1 * GIB,
            bandwidth=BANDWIDTH_SHARE * 2.039e12,
            flops=FLOPS_SHARE * 312e12,
            fp8_speedup=1.0,
            host_link=25e9,
            peer_link=300e9,
        ),
        Gpu(
            name="h100",
            memory_bytes=79.1 * GIB,
            bandwidth=BANDWIDTH_SHARE * 3.35e12,
            flops=FLOPS_SHARE * 989e12,
            fp8_speedup=1.5,
            host_link=50e9,
            peer_link=450e9,
        ),
        Gpu(
            name="h200",
            memory_bytes=139.8 * GIB,
            bandwidth=H200_BANDWIDTH,
            flops=H200_FLOPS,
            fp8_speedup=1.5,
            host_link=50e9,
            peer_link=450e9,
            measured=True,
        ),
        Gpu(
            name="b200",
            memory_bytes=178.4 * GIB,
            bandwidth=BANDWIDTH_SHARE * 7.672e12,
            flops=FLOPS_SHARE * 2250e12,
            fp8_speedup=1.5,
            host_link=50e9,
            peer_link=900e9,
        ),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """One drive, used by one replica."""

    name: str
    read_bandwidth: float
    """Bytes per second of sequential reads, published like ``write_bandwidth``: a KV block of an 8B model is
    2 MiB."""
    write_bandwidth: float
    latency_s: float
    """Time until the first byte arrives. ASSUMED."""


NVME = Disk(name="NVMe drive (PCIe 4)", read_bandwidth=6.5e9, write_bandwidth=3.5e9, latency_s=100e-6)
"""Samsung PM9A3, U.2: 6.5 GB/s read and 3.5 GB/s written (its maker's figures, heise.de, May 2020)."""


def find_gpu(name: str) -> Gpu:
    """Returns a preset by its name, in any case; HardwareError names the known ones."""
    gpu = GPUS.get(name.lower())
    if gpu is None:
        raise HardwareError(f"Unknown GPU {name!r}; choose from {', '.join(GPUS)}.")
    return gpu


def parameter_bytes(dtype: str, option: str = "dtype") -> int:
    """Bytes of a value; HardwareError for an unknown type."""
    size = PARAMETER_BYTES.get(dtype)
    if size is None:
        raise HardwareError(f"{option} must be one of {', '.join(PARAMETER_BYTES)}, got {dtype!r}.")
    return size
