"""Where a job runs: one small interface, and who owns what was started.

A runtime starts `agent.py spec.json` with mounts, environment, GPUs and a time limit, stops it, and clears up. It
judges nothing: `Ended` is what the engine says, the attempt's exit.json decides. The protocol of a run:

    runtime.available()  -> None, or the Reason (Blocked) with a remedy
    runtime.target(kind, host path) -> the path that the job sees; write these into spec.json
    runtime.run(job, stop=event, poll=callback) -> Ended; returns only when nothing of the job is alive any more
    runtime.collect_orphans() -> what a dead runner had left behind and was stopped now

Ownership is proved, never guessed: everything started carries `Owner` (boot, pid namespace, pid, start time of the
runner). Only where that process is provably gone, or the job's own deadline is long past, is it an orphan.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Mapping

    from tasks.reason import Reason

POLL_S = 0.2  # how often poll() is called and the stop event is looked at
STOP_S = 25.0  # from TERM to KILL of a whole job: the agent's own TERM grace (10 s), its KILL and the give-back
DEADLINE_MARGIN_S = 120.0  # over job.timeout_s, until a runtime no longer trusts the agent to keep its limits
AGENT_FLAGS = ("-E", "-s", "-S", "-B")  # the standard library alone, nothing of the job's, no __pycache__ in a mount


@dataclass(frozen=True, slots=True)
class Mount:
    """A host folder or file as the job sees it; a missing source is an error, never created."""

    source: Path
    target: str
    read_only: bool


@dataclass(frozen=True, slots=True)
class Job:
    """One agent call. `argv` is the agent's path and its arguments, in runtime paths, without the interpreter.

    `timeout_s` covers the agent's own limits (time limit plus grace); `folder` is the attempt folder on the host;
    `secrets` are names of variables of this process; `gpu_ids` picks devices, else the first `gpus` are taken;
    `gpus` counts those of all `nodes`, of which only Slurm has more than one; `local_copy` is Slurm's alone, too.
    """

    id: str
    argv: tuple[str, ...]
    interpreter: str
    mounts: tuple[Mount, ...]
    env: Mapping[str, str]
    secrets: tuple[str, ...]
    gpus: int
    timeout_s: float
    shm_bytes: int
    labels: Mapping[str, str]
    network: bool
    folder: Path
    gpu_ids: tuple[str, ...] = field(default=())
    nodes: int = 1
    local_copy: tuple[str, ...] = ()

    def secret_env(self) -> dict[str, str]:
        """Return the secrets that are set in this process, by name."""
        return {name: os.environ[name] for name in self.secrets if name in os.environ}


@dataclass(frozen=True, slots=True)
class Ended:
    """What the engine says about a job's end; exit.json decides.

    `reason`: "exited", "stopped" (by our stop event), "deadline" (the agent overran its own limits and was killed),
    "killed" (by somebody else), "oom", "not_started" (detail says why; Blocked), "engine_lost" (Blocked). Slurm alone:
    "detached" (the job goes on), "preempted", "time_limit", "node_fail", "requeued", "cancelled" (by somebody else).
    """

    rc: int | None
    reason: str
    detail: str


class Runtime(Protocol):
    """A place that runs jobs; instances hold configuration only and may be used from several threads."""

    name: str

    def target(self, kind: str, host: Path) -> str:
        """Return what the job sees for a host path; `kind`: bridge, mcore, nemo_rl, attempt or agent."""

    def use(self, image: str) -> None:
        """Run later jobs in `image` (an ID or repo@digest); nothing to do for a runtime without images."""

    def available(self) -> Reason | None:
        """Return None if jobs can be started, else why not, with a remedy."""

    def run(self, job: Job, *, stop: threading.Event, poll: Callable[[], None]) -> Ended:
        """Run the job to its end, calling `poll` about five times a second; whatever happens, leave nothing alive."""

    def collect_orphans(self) -> list[str]:
        """Stop what runners that are provably dead left behind; return a line for each."""


@dataclass(frozen=True, slots=True)
class Owner:
    """A process that can be told from every other one: boot id, pid namespace, pid, start time in clock ticks."""

    boot: str
    namespace: str
    pid: int
    start: str

    def __str__(self) -> str:
        return f"{self.boot}/{self.namespace}/{self.pid}/{self.start}"


def this_owner() -> Owner:
    """Return the identity of the calling process."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    namespace = os.readlink("/proc/self/ns/pid").strip("pid:[]")
    return Owner(boot, namespace, os.getpid(), start_time(os.getpid()) or "0")


def parse_owner(text: str) -> Owner | None:
    """Return the Owner of `str(owner)`, None for anything else."""
    parts = text.split("/")
    if len(parts) != 4 or not parts[2].isdecimal():
        return None
    return Owner(parts[0], parts[1], int(parts[2]), parts[3])


def start_time(pid: int) -> str | None:
    """Return the start time of a live process in clock ticks since boot; None if gone or a zombie.

    "?" where the process exists but may not be looked at (/proc mounted with hidepid): then it counts as alive.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode("ascii").split()
    except OSError:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except PermissionError:
            return "?"
        return "?"
    return None if fields[0] in "ZX" else fields[19]


def is_dead(owner: Owner) -> bool:
    """Return whether an owner of this boot and this pid namespace is gone: no such process, or a later one."""
    start = start_time(owner.pid)
    return start is None or start not in {owner.start, "?"}


def is_orphan(owner: Owner | None, here: Owner, deadline: float | None, now: float | None = None) -> bool:
    """Return whether something that `owner` started may be stopped.

    A runner in another container or of an earlier boot cannot be proved dead; there only the job's own deadline
    (seconds since the epoch), overrun by more than the agent's stop can take, is proof that nobody minds it.
    """
    if owner is None:
        return False
    if (owner.boot, owner.namespace) == (here.boot, here.namespace):
        return is_dead(owner)
    return deadline is not None and (time.time() if now is None else now) > deadline + 2 * STOP_S
