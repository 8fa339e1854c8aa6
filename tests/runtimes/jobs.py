"""Jobs for tests of the runtimes: the agent itself on a small command."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.runtimes.job import Job, this_owner
from tasks.settings import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable


AGENT = ROOT / "containers" / "agent.py"
# forks twice and leaves its session, as Ray's daemons do, then names itself in the file of its first argument
DAEMON = """
import os, sys, time
if os.fork(): os._exit(0)
os.setsid()
if os.fork(): os._exit(0)
with open(sys.argv[1] + ".part", "w") as out: out.write(str(os.getpid()))
os.rename(sys.argv[1] + ".part", sys.argv[1])
time.sleep(300)
"""


def until(look: Callable[[], Any], seconds: float = 20) -> Any:
    end = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)
    return found


def job(folder: Path, *argv: str, **keys: Any) -> Job:
    """Return a job whose agent runs `argv` in `folder`; spec keys and job fields may be given."""
    fields = {f.name for f in dataclasses.fields(Job)}
    spec = {
        "schema": 1, "id": folder.name, "argv": argv, "cwd": str(folder), "env": {"PATH": os.environ["PATH"]},
        "log": str(folder / "run.log"), "exit": str(folder / "exit.json"), "timeout_s": 60.0, "term_grace_s": 2.0,
    }  # fmt: skip
    (folder / "spec.json").write_text(json.dumps({**spec, **{k: v for k, v in keys.items() if k not in fields}}))
    return Job(
        **{
            "id": folder.name, "argv": (str(AGENT), str(folder / "spec.json")), "interpreter": sys.executable,
            "mounts": (), "env": {}, "secrets": (), "gpus": 0, "timeout_s": 60.0, "shm_bytes": 0, "labels": {},
            "network": False, "folder": folder, **{k: v for k, v in keys.items() if k in fields},
        }
    )  # fmt: skip


def go(runtime: Any, one: Job, stop: threading.Event | None = None, poll: Callable[[], None] = lambda: None) -> Any:
    return runtime.run(one, stop=stop or threading.Event(), poll=poll)


HERE = this_owner()
GONE = dataclasses.replace(HERE, pid=4_194_305)  # above the kernel's largest pid
REBOOTED = dataclasses.replace(GONE, boot="other")


def exited(rc: int, **more: Any) -> dict[str, Any]:
    return {"Status": "exited", "ExitCode": rc, "OOMKilled": False, "Error": "", **more}
