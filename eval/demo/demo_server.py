"""One side of a demo: a server with a policy, and the folder of its output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from eval.load.bench_run import BenchRun
from eval.load.server_process import ServerProcess
from eval.report.results import ResultFile, write_results
from eval.say import say

BLOCK_SIZE = 16
TRACE = "trace.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoServer:
    """The settings that all policies share."""

    model: Path
    name: str
    """The served model name."""
    num_blocks: int
    max_model_len: int
    max_num_batched_tokens: int
    out: Path
    """Output folder, with a folder for each policy: log, trace, records, result."""

    def run(self, policy: str, work: Callable[[str, Path], BenchRun]) -> BenchRun:
        """Starts a server with this policy and calls ``work`` with its address and its folder."""
        folder = self.out / policy
        folder.mkdir(parents=True, exist_ok=True)
        (folder / TRACE).unlink(missing_ok=True)  # of an earlier run; the server would not replace it
        say(f"\n{policy}: starting the server")
        with ServerProcess(self._arguments(policy, folder), folder / "server.log") as server:
            run = work(server.base_url, folder)
        write_results(folder / "result.json", ResultFile(title=policy, runs=[run.result]))
        return run

    def _arguments(self, policy: str, folder: Path) -> list[str]:
        return [
            str(self.model),
            *("--scheduling-policy", policy),
            *("--served-model-name", self.name),
            *("--host", "127.0.0.1"),
            *("--port", "0"),
            *("--block-size", str(BLOCK_SIZE)),
            *("--num-gpu-blocks-override", str(self.num_blocks)),
            *("--max-model-len", str(self.max_model_len)),
            *("--max-num-batched-tokens", str(self.max_num_batched_tokens)),
            *("--trace", str(folder / TRACE)),
        ]
