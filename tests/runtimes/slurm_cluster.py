"""A cluster of shell scripts on PATH, which answer as Slurm's programs do."""

from __future__ import annotations

import dataclasses
import json
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks import inflight
from tasks.runtimes.job import Ended, Job, Mount
from tasks.runtimes.slurm import Slurm

if TYPE_CHECKING:
    from collections.abc import Callable


LISTED = "17|RUNNING|None|n1|2026-12-01T00:00:00"
ACCEPT = f"echo 17; echo '{LISTED}' >$home/queue; mkdir -p $home/attempt/slurm; : >$home/attempt/slurm/started.json"
FAKE = """#!/bin/bash
home=$(dirname -- "$(dirname -- "$0")"); me=${0##*/}
printf '%s\\n' "$me $*" >>"$home/calls"
if [ -e "$home/$me.sh" ]; then . "$home/$me.sh"; fi
"""


class Cluster:
    """A Slurm whose commands are bash snippets over one folder; `queue` is what squeue prints."""

    def __init__(self, home: Path) -> None:
        self.home, self.folder, self.said = home, home / "attempt", list[str]()
        for path in (home / "bin", self.folder, home / "src"):
            path.mkdir()
        for name in ("sbatch", "squeue", "scancel", "sinfo", "sacct"):
            (home / "bin" / name).write_text(FAKE)
            (home / "bin" / name).chmod(0o755)
        self.does(sbatch=ACCEPT, squeue="cat $home/queue 2>/dev/null || true")
        self.does(scancel="sed -i 's/|[A-Z]*|/|CANCELLED|/' $home/queue 2>/dev/null || true")

    def does(self, **snippets: str) -> None:
        for name, text in snippets.items():
            (self.home / f"{name}.sh").write_text(text)

    def calls(self, name: str) -> list[str]:
        lines = (self.home / "calls").read_text().splitlines() if (self.home / "calls").exists() else []
        return [line for line in lines if line.startswith(name + " ")]

    def queue(self, line: str) -> None:
        (self.home / "queue").write_text(line + "\n")

    def ends(self, state: str = "COMPLETED", rc: int | None = 0, reason: str = "exited") -> None:
        self.queue(f"17|{state}|None|n1|N/A")
        if rc is not None:
            (self.folder / "exit.json").write_text(json.dumps({"rc": rc, "reason": reason}))

    def job(self, **changes: Any) -> Job:
        mount = Mount(self.home / "src", "/opt/nemo-rl", read_only=False)
        job = Job(
            "20261201-000000-abcd", ("/e2e/agent/agent.py", "/e2e/attempt/spec.json"), "python3", (mount,), {}, (), 2,
            600.0, 0, {inflight.TASK: "run:c", inflight.KEY: "k"}, network=False, folder=self.folder,
        )  # fmt: skip
        return dataclasses.replace(job, **changes)

    def runtime(self, **options: Any) -> Slurm:
        made = Slurm("i.sqsh", say=self.said.append, **options)
        made.latency_s, made.settle_s, made.second_thought_s = 0.05, 0.06, 0.07
        made.refuse_s, made.lost_s, made.look_s = 0.3, 20.0, 0.01
        return made

    def run(self, runtime: Slurm, after: Callable[[int], None] = lambda _: None, job: Job | None = None) -> Ended:
        polls = iter(range(10_000))
        stop = threading.Event()
        return runtime.run(job or self.job(), stop=stop, poll=lambda: after(next(polls)))
