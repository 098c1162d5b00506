"""``make gpu-check``: proves and times the whole GPU path, on a machine with a GPU, in nine minutes.

Compares every kernel with a reference in fp32 or fp64, and whole models of random weights in real shapes with
transformers; then times steps, requests and the host tier, each next to the floor that follows from the copy
and matmul rates of the same run. Without a GPU, --device cpu does the same at toy sizes in Triton's
interpreter, which checks the command itself and says nothing about speed.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.record import DONE, Report, write_report
from benchmarks.gpu.run import Run
from benchmarks.gpu.sections import NAMES, RATES, SECTIONS, Section
from benchmarks.gpu.table import report_text
from engine.errors import EngineError
from eval.arguments import positive
from eval.load.server_process import unwound_by_sigterm
from eval.report.results import require_writable

BUDGET_S = 540.0
NO_GPU = 3
"""Exit code without a GPU."""
TOY_NOTE = "cpu, toy sizes, says nothing of speed"
EPILOG = "sections:\n" + "\n".join(f"  {each.name:<12}{each.shows}" for each in SECTIONS)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command. Exit code 0 if correctness was shown, goals met or not; 1 if not; 3 without a GPU."""
    given = _parser().parse_args(argv)
    arguments = sys.argv[1:] if argv is None else argv
    try:
        require_writable(given.json)
        with unwound_by_sigterm():
            return _run(given, shlex.join(["python", "-m", "benchmarks.gpu", *arguments]))
    except EngineError as error:
        print(error, file=sys.stderr)
        return 1


def _run(given: argparse.Namespace, command: str) -> int:
    # Imported here: reading the command's --help needs no torch.
    from benchmarks.gpu.measures.device import describe, has_gpu, select_device

    toy = given.device == "cpu"
    if not toy and not has_gpu():
        print("There is no GPU that torch can see; --device cpu checks the command itself.", file=sys.stderr)
        return NO_GPU
    if toy:
        os.environ["TRITON_INTERPRET"] = "1"
    report = Report(
        note=TOY_NOTE if toy else "",
        command=command,
        machine=describe(select_device(given.device), toy),
        budget_s=given.budget_s,
    )
    sections = _chosen(given.sections)
    with tempfile.TemporaryDirectory() as folder:
        Run(report, given.device, Path(folder), lambda grown: _save(given.json, grown)).play(sections)
    print(report_text(report))
    return 0 if _proved(report, sections) else 1


def _chosen(names: Sequence[str]) -> list[Section]:
    """Returns the named sections in run order; always includes the rates, which floors need."""
    return [section for section in SECTIONS if section is RATES or section.name in names]


def _save(path: Path | None, report: Report) -> None:
    if path is not None:
        write_report(path, report)


def _proved(report: Report, sections: Sequence[Section]) -> bool:
    """Returns whether no section found a fault and each that shows correctness is complete."""
    missing_ones_matter = {section.name: section.must_be_done for section in sections}
    return all(
        record.all_right and (record.status == DONE or not missing_ones_matter[record.name])
        for record in report.sections
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="make gpu-check",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cuda; cpu: at toy sizes")
    add("--sections", nargs="+", choices=NAMES, default=NAMES, metavar="NAME", help="see below; all")
    add("--budget-s", type=positive, default=BUDGET_S, metavar="S", help=f"for all of it ({BUDGET_S:.0f})")
    add("--json", type=Path, metavar="OUT", help="write what was found there, after each section")
    return parser
