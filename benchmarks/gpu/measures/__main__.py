"""``python -m benchmarks.gpu.measures SECTION``: runs one section; ``benchmarks.gpu`` reads its record."""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
import time
import traceback
from pathlib import Path

import msgspec

from benchmarks.gpu.floors import Rates
from benchmarks.gpu.measures.bench import Bench, first_lines
from benchmarks.gpu.measures.device import select_device
from benchmarks.gpu.record import DONE, FAILED, SectionRecord
from benchmarks.gpu.sections import NAMES
from benchmarks.gpu.sizes import FULL, TOY

_UNKNOWN = Rates(copy_bytes_s=1.0, matmul_flop_s=1.0, host_to_device_bytes_s=1.0, device_to_host_bytes_s=1.0)
"""Placeholder until the rates are measured."""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("section", choices=NAMES)
    parser.add_argument("--device", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--limit-s", type=float, required=True)
    parser.add_argument("--rates", default="")
    given = parser.parse_args()
    logging.basicConfig(format="  %(name)s: %(message)s")
    logging.getLogger("engine").setLevel(logging.INFO)  # it logs which kernels it found
    bench = Bench(
        device=select_device(given.device),
        sizes=TOY if given.device == "cpu" else FULL,
        rates=msgspec.json.decode(given.rates, type=Rates) if given.rates else _UNKNOWN,
        record=SectionRecord(name=given.section),
        out=given.out,
        models=given.models,
        ends_at_s=time.monotonic() + given.limit_s,
    )
    bench.save()
    try:
        importlib.import_module(f"benchmarks.gpu.measures.{given.section.replace('-', '_')}").run(bench)
        bench.record.status = DONE
    except Exception as error:  # any error is this section's result
        traceback.print_exc()
        bench.record.status, bench.record.reason = FAILED, first_lines(error)
    bench.save()
    return 0


if __name__ == "__main__":
    sys.exit(main())
