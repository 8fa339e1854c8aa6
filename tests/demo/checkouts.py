"""The demo's checkouts, and what a script of theirs leaves behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

from tasks import demo

SCRIPTS = {
    "grpo_megatron": 2,
    "grpo_megatron_generation": 2,
    "grpo_megatron_lora": 3,
    "grpo_megatron_lora_resume": 4,
    "grpo_megatron_non_colocated": 2,
}


@dataclass(frozen=True)
class Evidence:
    """What a script left: exit status (None: stopped by the test), output, its own metrics.json or {}."""

    rc: int | None
    log: str
    metrics: dict[str, dict[str, float]]
    tree: Path

    def series(self, tag: str) -> list[float]:
        return [self.metrics[tag][step] for step in sorted(self.metrics[tag], key=int)]


def git(checkout: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-c", "safe.directory=*", "-C", checkout, *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout


def environment(checkouts: demo.Checkouts, home: Path) -> dict[str, str]:
    bridge, nemo_rl = checkouts.bridge, checkouts.nemo_rl
    return {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(home),
        "PYTHONPATH": f"{bridge / 'src'}:{bridge / '3rdparty/Megatron-LM'}:{nemo_rl}",
        "NRL_MEGATRON_CHECKPOINT_DIR": str(home / "conversions"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def run(checkouts: demo.Checkouts, home: Path, script: str, *overrides: str, stop_after: str | None = None) -> Evidence:
    """Run a script in a copy of the NeMo-RL checkout; with `stop_after`, stop it ten seconds after that line."""
    tree = home / "nemo-rl"
    if not tree.exists():
        shutil.copytree(checkouts.nemo_rl, tree, symlinks=True)
    command = ["bash", f"tests/functional/{script}.sh", *overrides]
    env = environment(demo.Checkouts(checkouts.bridge, tree), home)
    process = subprocess.Popen(command, cwd=tree, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, text=True, start_new_session=True)  # fmt: skip
    stopped = threading.Event()

    def stop() -> None:
        stopped.set()
        os.killpg(process.pid, signal.SIGKILL)

    assert process.stdout is not None
    lines, timers = [], [threading.Timer(300, stop)]
    timers[0].start()
    for line in process.stdout:
        lines.append(line)
        if stop_after and stop_after in line:
            timers.append(threading.Timer(10, stop))
            timers[-1].start()
    rc: int | None = process.wait()
    process.stdout.close()
    for timer in timers:
        timer.cancel()
    file = tree / f"tests/functional/{script}/metrics.json"
    metrics = json.loads(file.read_text()) if file.exists() else {}
    return Evidence(None if stopped.is_set() else rc, "".join(lines), metrics, tree)
