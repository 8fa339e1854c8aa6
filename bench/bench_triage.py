"""Judge a log of 200 MB: seconds, MB/s and peak memory. `python bench/bench_triage.py [--megabytes N] [--log FILE]`.

Made here: chatter of workers with one error at the end, nothing but the echoes of one error, nothing but tracebacks (of
the driver, of eight ranks at once), one line without an end, and a progress bar that only knows carriage returns.
`--log` repeats a given log up to the size instead. The limit of the project is 5 s in flat memory. One JSON object a
line.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[1]
WORKER = "\x1b[36m(MegatronPolicyWorker[rank={rank}] pid={pid})\x1b[0m "
TRACEBACK = (
    "Traceback (most recent call last):\n"
    '  File "/x/nemo_rl/algorithms/grpo.py", line 9, in grpo_train\n    step()\n'
    '  File "/x/src/megatron/bridge/models/conversion/model_bridge.py", line 1346, in load\n    raise ValueError(\n'
    "ValueError: bad weight\n"
)


def _chatter() -> str:
    lines = []
    for n in range(4000):
        prefix = WORKER.format(rank=n % 8, pid=1000 + n % 8)
        lines += [
            f"{'=' * 25} Step {n}/4000 {'=' * 25}" if n % 50 == 0 else f"  - Loss: 0.{n}, reward {n / 7:.4f}",
            f"{prefix}INFO:nemo_rl.utils.nvml:nvml.py:219: GPU memory {n} MiB of 143771 MiB, allocated {n / 3:.2f}",
            f"{prefix}/x/y.py:{n}: UserWarning: Apex is not installed. Falling back to Torch Norm",
            f"\r{n % 100}%|####   | {n}/4000\r{n % 100}%|#####  | {n}/4000",
        ]
    return "\n".join(lines) + "\n"


def _logs(given: Path | None) -> Iterator[tuple[str, bytes, bytes]]:
    """Yield name, repeated part and end of each log."""
    if given is not None:
        yield given.name, given.read_bytes(), b""
        return
    yield "chatter", _chatter().encode(), TRACEBACK.encode()
    echo = "torch.distributed.DistBackendError: [{rank}] wait timeout after 600000ms\n"
    yield "echoes", "".join((WORKER + echo).format(rank=n % 64, pid=n) for n in range(2000)).encode(), b""
    yield "tracebacks", TRACEBACK.encode() * 500, b""
    lines = TRACEBACK.splitlines(keepends=True) * 100
    yield "rank tracebacks", "".join(WORKER.format(rank=n, pid=n) + t for t in lines for n in range(8)).encode(), b""
    yield "one line", b"ValueError: x " * 4096, b"\n"
    yield "bar", "".join(f"\r{n % 100}%|#####  | {n}/4000 ValueError: x" for n in range(4000)).encode(), b"\n"


def _measure(path: Path) -> None:
    """Read one log in this process and print the result (called in a process of its own)."""
    from tasks.triage import read_log  # noqa: PLC0415 - the parent needs none of it

    read_log(ROOT / "no such log")  # imports and compilation are not what is measured
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    wall, cpu = time.perf_counter(), time.process_time()
    facts = read_log(path)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    print(
        json.dumps(
            {
                "megabytes": round(facts.size_bytes / 1e6, 1),
                "lines": facts.lines,
                "wall_s": round(wall, 2),
                "cpu_s": round(cpu, 2),
                "mb_per_cpu_s": round(facts.size_bytes / 1e6 / cpu, 1),
                "memory_growth_mib": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024,
                "first": facts.first.signature if facts.first else None,
            }
        )
    )


def main(argv: list[str]) -> int:
    """Write the logs, measure each in a fresh process, print one JSON object a line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--log", type=Path)
    parser.add_argument("--json", type=Path, help="write the rows to this file too")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.measure:
        _measure(options.measure)
        return 0
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, part, end in _logs(options.log):
            path = Path(folder) / "run.log"
            with path.open("wb") as out:
                while out.tell() < options.megabytes * 1_000_000:
                    out.write(part)
                out.write(end)
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
            call = [sys.executable, __file__, "--measure", str(path)]
            ran = subprocess.run(call, env=environment, capture_output=True, text=True, check=True)
            rows.append({"bench": "triage", "log": name, **json.loads(ran.stdout)})
            print(json.dumps(rows[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
