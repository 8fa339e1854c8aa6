"""Jobs as processes of this machine: the agent in a session of its own, held by a lifeline.

The agent's standard input is a pipe whose other end only this process holds: if the runner dies, however it dies, the
agent reads end-of-file and stops the whole tree (reason "runner_gone"). Should the agent itself be killed, its
processes are still found: they carry NEMO_RL_E2E_JOB and NEMO_RL_E2E_OWNER in their environment, so that this run's
end, or the next runner's `collect_orphans`, stops exactly them and their descendants.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.reason import Reason
from tasks.runtimes.job import (
    AGENT_FLAGS,
    DEADLINE_MARGIN_S,
    POLL_S,
    STOP_S,
    Ended,
    Job,
    is_orphan,
    parse_owner,
    start_time,
    this_owner,
)

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

JOB, OWNER = "NEMO_RL_E2E_JOB", "NEMO_RL_E2E_OWNER"
INHERITED = (
    "PATH",
    "HOME",
    "LANG",
    "TMPDIR",
    "LD_LIBRARY_PATH",
)  # what the agent itself needs; the command has its spec
KILL_S = 10.0  # a process in uninterruptible sleep is reported, not waited for
TAIL_BYTES = 2000  # of the agent's own output: a traceback


class Local:
    """Runs jobs with an interpreter of this machine; runtime paths are host paths."""

    name = "local"

    def target(self, kind: str, host: Path) -> str:
        """Return `host`: a local job sees the host's own paths."""
        return str(host)

    def use(self, image: str) -> None:
        """Do nothing: there is no image."""

    def available(self) -> Reason | None:
        """Return a Reason where there is no /proc (not Linux), without which nothing can be stopped reliably."""
        if Path("/proc/self/stat").exists():
            return None
        return Reason("engine", "local", "runtime=local needs Linux with /proc mounted: use runtime=docker instead.")

    def run(self, job: Job, *, stop: threading.Event, poll: Callable[[], None]) -> Ended:
        """Run the job's agent; nothing of the job is alive afterwards, also if `poll` raises."""
        if missing := [str(mount.source) for mount in job.mounts if not mount.source.exists()]:
            return Ended(None, "not_started", f"mount source does not exist: {', '.join(missing)}")
        env = {name: os.environ[name] for name in INHERITED if name in os.environ}
        env |= {**job.env, **job.secret_env(), JOB: job.id, OWNER: str(this_owner())}
        argv = [job.interpreter, *AGENT_FLAGS, *job.argv]
        with (job.folder / "agent.log").open("wb") as out:
            try:
                agent = subprocess.Popen(
                    argv, env=env, cwd=job.folder, stdin=subprocess.PIPE, stdout=out, stderr=out, start_new_session=True
                )
            except OSError as error:
                return Ended(None, "not_started", f"cannot start {job.interpreter}: {error}")
        try:
            reason = _wait(agent, job, stop, poll)
        finally:
            if agent.poll() is None:  # an exception is on its way up: Ctrl-C, SIGTERM, a full disk in poll()
                _stop(agent)
            if agent.stdin:
                agent.stdin.close()
            left = kill_marked(lambda values: values.get(JOB) == job.id and values.get(OWNER) == env[OWNER])
        tail = _tail(job.folder / "agent.log") + (f"; stopped {len(left)} left processes" if left else "")
        if reason == "exited" and agent.returncode < 0:
            return Ended(agent.returncode, "killed", f"the agent was killed by signal {-agent.returncode}; {tail}")
        return Ended(agent.returncode, reason, tail)

    def collect_orphans(self) -> list[str]:
        """Kill processes marked by a runner that is provably dead, with their descendants."""
        here = this_owner()
        return kill_marked(lambda values: is_orphan(parse_owner(values.get(OWNER, "")), here, None))


def _wait(agent: subprocess.Popen[bytes], job: Job, stop: threading.Event, poll: Callable[[], None]) -> str:
    """Wait for the agent's end, or for a reason to end it; return the reason."""
    deadline = time.monotonic() + job.timeout_s + DEADLINE_MARGIN_S
    while not _ended_within(agent, POLL_S):
        poll()
        if stop.is_set() or time.monotonic() > deadline:
            reason = "stopped" if stop.is_set() else "deadline"
            _stop(agent, poll)
            return reason
    return "exited"


def _stop(agent: subprocess.Popen[bytes], poll: Callable[[], None] = lambda: None) -> None:
    agent.terminate()
    until = time.monotonic() + STOP_S
    while not _ended_within(agent, POLL_S) and time.monotonic() < until:
        poll()
    agent.kill()  # without effect on one that has ended
    agent.wait()


def _ended_within(agent: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        agent.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def kill_marked(ours: Callable[[dict[str, str]], bool]) -> list[str]:
    """Kill every process whose environment satisfies `ours`, and its descendants; return a line for each.

    Repeats until none is found, for at most 10 s: a process may fork between being seen and being killed.
    """
    killed: dict[tuple[int, str], str] = {}
    until = time.monotonic() + KILL_S
    while time.monotonic() < until and (found := _marked(ours)):
        for pid, start in found.items():
            if start_time(pid) == start:
                killed.setdefault((pid, start), f"process {pid} ({_name(pid)})")
                try:
                    os.kill(pid, signal.SIGKILL)
                except OSError:  # gone, or not ours to signal
                    continue
        time.sleep(0.02)
    return sorted(killed.values())


def _marked(ours: Callable[[dict[str, str]], bool]) -> dict[int, str]:
    """Return pid -> start time of live processes that are `ours` or descend from one; never this process."""
    parents: dict[int, int] = {}
    roots: set[int] = set()
    for entry in os.scandir("/proc"):
        if not entry.name.isdecimal():
            continue
        pid = int(entry.name)
        try:
            parents[pid] = int(Path(entry.path, "stat").read_bytes().rpartition(b")")[2].split()[1])
            data = Path(entry.path, "environ").read_bytes()
        except OSError:  # gone, or another user's
            continue
        if OWNER.encode() in data:
            pairs = (item.partition("=") for item in data.decode("utf-8", "replace").split("\0"))
            if ours({name: value for name, _, value in pairs if name in {JOB, OWNER}}):
                roots.add(pid)
    roots.discard(os.getpid())
    found = set(roots)
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return {pid: start for pid in found - {os.getpid()} if (start := start_time(pid)) and start != "?"}


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text("utf-8", "replace").strip()
    except OSError:
        return "?"


def _tail(path: Path) -> str:
    try:
        return path.read_bytes()[-TAIL_BYTES:].decode("utf-8", "replace").strip()
    except OSError:
        return ""
