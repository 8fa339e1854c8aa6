"""A no-op `doit level0` on trees of 5,858 files against an empty `doit`: interleaved, ratios of medians.

python bench/bench_noop.py [--rounds 9] [--json FILE]`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.miniature import Miniature, run_git  # noqa: E402 - after the path

FILES = {"bridge": 2731, "nemo_rl": 2261, "bridge/3rdparty/Megatron-LM": 866}  # 5,858, as counted in the real trees


def measure(argv: list[str], cwd: Path, env: dict[str, str]) -> float:
    """Return the wall time of one call in seconds; CalledProcessError if it did not end with 0."""
    start = time.perf_counter()
    subprocess.run(argv, cwd=cwd, env=env, check=True, capture_output=True)
    return time.perf_counter() - start


def fill(repo: Path, count: int) -> None:
    """Add `count` small modules to a repository and commit them."""
    for index in range(count):
        path = repo / f"src/filler/p{index % 97}/m{index}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"VALUE = {index}\n" * 40)
    run_git(repo, "add", "-A")
    run_git(repo, "commit", "-q", "-m", "filler")


def main() -> int:
    """Measure and print one row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mini = Miniature(Path(folder) / "mini")
        fill(mini.bridge, FILES["bridge"])
        fill(mini.nemo_rl, FILES["nemo_rl"])
        fill(mini.bridge / "3rdparty/Megatron-LM", FILES["bridge/3rdparty/Megatron-LM"])
        empty = Path(folder) / "empty"
        empty.mkdir()
        (empty / "dodo.py").write_text("def task_nothing():\n    return {'actions': None}\n")
        env = mini.environment()
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        ours, peer = mini.argv("level0"), [sys.executable, "-m", "doit", "nothing"]
        for _ in range(3):  # run the level, settle the stat cache, write byte code
            measure(ours, ROOT, env)
            time.sleep(2.1)
        times: dict[str, list[float]] = {"ours": [], "peer": []}
        for _ in range(given.rounds):
            times["ours"].append(measure(ours, ROOT, env))
            times["peer"].append(measure(peer, empty, env))
    ours_s, peer_s = (statistics.median(times[name]) for name in ("ours", "peer"))
    row = {
        "bench": "no-op level on 5,858 files / empty doit",
        "ours_s": ours_s,
        "peer_s": peer_s,
        "ratio": ours_s / peer_s,
    }
    print(f"{row['bench']}: {ours_s:.3f} s / {peer_s:.3f} s = {row['ratio']:.2f}")
    if given.json:
        given.json.write_text(json.dumps([row]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
