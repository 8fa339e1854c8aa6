"""tasks.metrics against a merge with tensorboard's EventAccumulator: whole process against whole process.

    python bench/bench_metrics.py [--quick] [--json FILE]      --quick: 200 tags x 2,000 steps only

Both programs read the same files and must write the same bytes, else the benchmark fails. With NEMO_RL_REPO set, its
own tests/json_dump_tb_logs.py is a further row. Only ratios within one run mean anything, on a busy machine that of the
processor time. The peer needs about 50 us a point, so five million points take it some minutes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402 - after the path
from tensorboard.compat.proto import event_pb2  # noqa: E402

from tasks import crc32c, metrics, tfrecords  # noqa: E402

SIZES = {"200 tags x 2,000 steps": (200, 2_000), "5 million points (200 x 25,000)": (200, 25_000)}
CHUNK_STEPS = 1_000
PEER = """
import json, sys
from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator
events = EventAccumulator(sys.argv[1], size_guidance={SCALARS: 0})
events.Reload()
merged = {tag: {e.step: e.value for e in events.Scalars(tag)} for tag in sorted(events.scalars.Keys())}
with open(sys.argv[2], "w") as out:
    json.dump({tag: {str(s): points[s] for s in sorted(points)} for tag, points in merged.items()}, out, indent=2)
"""


def write_log(path: Path, tags: int, steps: int) -> None:
    """Write one event file of `tags` x `steps` scalars in the order in which a trainer logs them.

    One record of each tag and step width is made by tensorboard's classes; its siblings differ in step and value.
    """

    def framed(messages: Any) -> Any:
        """Return (n, length + 16) records of an (n, length) matrix of messages."""
        count, length = messages.shape
        header = np.frombuffer(length.to_bytes(8, "little"), np.uint8)
        header_sum = np.frombuffer(int(crc32c.mask(crc32c.crc32c(header.tobytes()))).to_bytes(4, "little"), np.uint8)
        sums = crc32c.mask(crc32c.many(np.ascontiguousarray(messages.T))).astype("<u4").view(np.uint8).reshape(-1, 4)
        head = np.broadcast_to(np.concatenate([header, header_sum]), (count, 12))
        return np.concatenate([head, messages, sums], axis=1)

    chance = np.random.default_rng(0)
    start = event_pb2.Event(wall_time=1.0, file_version="brain.Event:2").SerializeToString()
    with path.open("wb") as out:
        out.write(framed(np.frombuffer(start, np.uint8)[None]).tobytes())
        edges = sorted({1, 128, 16384, steps + 1, *range(1, steps + 1, CHUNK_STEPS)})
        for low, high in zip(edges, [edge for edge in edges if edge > 1], strict=False):
            if low > steps:
                break
            numbers = np.arange(low, min(high, steps + 1), dtype=np.int64)
            width = 1 + (low >= 128) + (low >= 16384)
            records = []
            for tag in range(tags):
                event = event_pb2.Event(wall_time=1.7e9, step=low)
                event.summary.value.add(tag=f"timing/train/some_metric_{tag}", simple_value=1.0)
                messages = np.tile(np.frombuffer(event.SerializeToString(), np.uint8), (len(numbers), 1))
                for position in range(width):
                    more = 0x80 if position < width - 1 else 0
                    messages[:, 10 + position] = ((numbers >> (7 * position)) & 0x7F) | more
                values = chance.random(len(numbers), dtype=np.float32).astype("<f4")
                messages[:, -4:] = values.view(np.uint8).reshape(-1, 4)
                records.append(framed(messages))
            out.write(np.concatenate(records, axis=1).tobytes())


@dataclass(frozen=True, slots=True)
class Cost:
    """What one whole process took: wall and processor time in seconds, peak memory in MiB."""

    wall_s: float
    cpu_s: float
    peak_mib: float


def run(argv: list[str]) -> Cost:
    """Run a program to its end; raises CalledProcessError where it fails."""
    begin = time.perf_counter()
    child = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise subprocess.CalledProcessError(child.returncode, argv)
    return Cost(time.perf_counter() - begin, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)


def measure(label: str, tags: int, steps: int, folder: Path, repeats: int) -> dict[str, Any]:
    """Return one row: seconds and memory of both, and the ratios."""
    log = folder / "logs" / "events.out.tfevents.1.bench"
    log.parent.mkdir(parents=True, exist_ok=True)
    write_log(log, tags, steps)
    ours_out, peer_out = folder / "ours.json", folder / "peer.json"
    own = [sys.executable, "-m", "tasks.metrics", str(log.parent), "--output_path", str(ours_out)]
    before = run(own)
    peer = run([sys.executable, "-c", PEER, str(log), str(peer_out)])
    ours = min([before, *(run(own) for _ in range(repeats))], key=lambda cost: cost.wall_s)  # around the peer's run
    digests = {hashlib.sha256(path.read_bytes()).hexdigest() for path in (ours_out, peer_out)}
    if len(digests) != 1:
        raise SystemExit(f"error: {label}: the two programs disagree")
    row = {
        "benchmark": f"metrics: {label}",
        "peer": "EventAccumulator",
        "ours_s": round(ours.wall_s, 2),
        "peer_s": round(peer.wall_s, 2),
        "ratio": round(peer.wall_s / ours.wall_s, 1),
        "cpu_ratio": round(peer.cpu_s / ours.cpu_s, 1),
        "ours_mib": round(ours.peak_mib),
        "peer_mib": round(peer.peak_mib),
        "file_mib": round(log.stat().st_size / 2**20),
        "points": tags * steps,
    }
    if upstream := os.environ.get("NEMO_RL_REPO"):
        program = str(Path(upstream) / "tests" / "json_dump_tb_logs.py")
        theirs = run([sys.executable, program, str(log.parent), "--output_path", str(peer_out)])
        row |= {"original_s": round(theirs.wall_s, 2), "original_ratio": round(theirs.wall_s / ours.wall_s, 1)}
        if peer_out.read_bytes() != ours_out.read_bytes():
            raise SystemExit(f"error: {label}: the original disagrees")
    return row


def where_the_time_goes(log: Path) -> dict[str, float]:
    """Return the seconds of each part of our own program on one file, measured in this process."""
    parts: dict[str, float] = {}
    clock = time.perf_counter
    begin = clock()
    imports = "import numpy, tasks.metrics, tensorboard.compat.proto.event_pb2"
    subprocess.run([sys.executable, "-c", imports], cwd=ROOT, check=True)
    parts["start and imports"] = clock() - begin
    begin = clock()
    with log.open("rb") as source:
        blocks = list(tfrecords.blocks(source))
    parts["read and frame"] = clock() - begin
    begin = clock()
    for block in blocks:
        tfrecords.sound_records(block, tfrecords.equal_lengths(block))
    parts["checksums"] = clock() - begin
    begin = clock()
    merged = metrics.merge(log.parent)
    parts["decode and merge"] = clock() - begin - parts["read and frame"] - parts["checksums"]
    begin = clock()
    for _ in metrics.json_chunks(merged.series):
        pass
    parts["write JSON"] = clock() - begin
    return {name: round(max(seconds, 0.0), 2) for name, seconds in parts.items()}


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description="tasks.metrics against EventAccumulator")
    parser.add_argument("--quick", action="store_true", help="the smaller size only")
    parser.add_argument("--json", type=Path, default=None, help="write the rows to this file too")
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        for label, (tags, steps) in list(SIZES.items())[: 1 if given.quick else None]:
            folder = Path(temporary) / str(steps)
            row = measure(label, tags, steps, folder, repeats=2 if steps < 10_000 else 0)
            if not rows:
                row["where"] = where_the_time_goes(folder / "logs" / "events.out.tfevents.1.bench")
            rows.append(row)
            print(
                f"{row['benchmark']}: {row['ratio']} x faster ({row['ours_s']} s against {row['peer_s']} s, "
                f"processor time {row['cpu_ratio']} x), "
                f"{row['ours_mib']} against {row['peer_mib']} MiB for a file of {row['file_mib']} MiB"
                + (f"; original: {row['original_ratio']} x" if "original_ratio" in row else ""),
                flush=True,
            )
            if "where" in row:
                print("  " + ", ".join(f"{part} {seconds} s" for part, seconds in row["where"].items()), flush=True)
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
