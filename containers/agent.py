"""Run one command inside any runtime, record what happened, and leave nothing behind.

Protocol (standard library only, Python >= 3.11, one file, so that every image can run it from a read-only mount):

    python agent.py spec.json            run the command of the spec, write run.log and exit.json
    python agent.py give-back spec.json  only give the spec's paths to its owner (the agent itself had been killed)
    python agent.py probe spec.json      import probe.py beside this file and call its main

The exit status repeats the command's (128 + N for signal N; 124: a time limit; 143: stopped on request; 127: not
startable), but exit.json decides: a container engine's status can lie. One thread, one loop: the command's output,
signals, the death of children and the lifeline (standard input, if it is a pipe) all arrive through one selector.
The agent is a child subreaper, so a daemon that double-forks is still found by its parent chain in /proc.
"""

# Descriptors and names as the kernel has them; the spec's paths stay strings:

from __future__ import annotations

import contextlib
import ctypes
import datetime as dt
import hashlib
import importlib
import json
import os
import platform
import re
import selectors
import shutil
import signal
import stat
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

PR_SET_CHILD_SUBREAPER = 36
CHUNK_BYTES = 64 * 1024  # one read; also the longest piece of a line that is matched against done_pattern
LINGER_S = 1.0  # after the command's end: `exec > >(tee ...)` needs a moment to write its last lines
KILL_S = 10.0  # after KILL: a process in uninterruptible sleep is reported, not waited for
TICK_S = 0.05  # while the tree is being stopped
MIN_SECRET_BYTES = 4  # shorter values would blank half the log and hide nothing
RESERVE_BYTES = 16 * 1024  # room for exit.json, taken at the start: the disk may be full at the end
MARKERS = ("NEMO_RL_E2E_JOB", "NEMO_RL_E2E_OWNER")  # set by the local runtime: whose process is this?
NEEDED = ("schema", "id", "argv", "cwd", "env", "log", "exit", "timeout_s")
DEFAULTS = {"secrets": (), "done_pattern": None, "grace_s": 60.0, "silence_s": None, "term_grace_s": 10.0}
STATUS = {"terminated": 143, "runner_gone": 143, "spawn_failed": 127}  # the three limits: 124


class Mask:
    """Replace secrets in a byte stream by `***`, also where a read cuts a secret in two."""

    def __init__(self, values: Iterable[str]) -> None:
        stripped = {value.strip().encode("utf-8", "surrogateescape") for value in values}
        secrets = sorted((s for s in stripped if len(s) >= MIN_SECRET_BYTES), key=len, reverse=True)
        self._pattern = re.compile(b"|".join(map(re.escape, secrets))) if secrets else None
        self._hold_bytes = len(secrets[0]) - 1 if secrets else 0
        self._by_line = not any(b"\n" in secret for secret in secrets)
        self._rest = b""

    def feed(self, data: bytes, *, final: bool = False) -> bytes:
        """Return the stream so far; an unfinished line's last bytes, too few for the longest secret, are held back."""
        if self._pattern is None:
            return data
        data, out, at = self._rest + data, [], 0
        line = data.rfind(b"\n") + 1 if self._by_line else 0
        end = len(data) if final else max(line, len(data) - self._hold_bytes)
        for match in self._pattern.finditer(data):  # leftmost, then longest: one secret may begin with another
            if match.start() >= end:
                break
            out += [data[at : match.start()], b"***"]
            at = match.end()
        self._rest = data[max(at, end) :]
        return b"".join([*out, data[at : max(at, end)]])


class Log:
    """run.log: written at once, hashed, counted; a full disk loses lines but never the run."""

    def __init__(self, path: str, secrets: Iterable[str]) -> None:
        self.lines, self.lost_bytes, self.error, self.last = 0, 0, "", time.monotonic()
        self._mask, self._hash, self._line, self._fd = Mask(secrets), hashlib.sha256(), b"", -1
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        except OSError as error:
            self.error = str(error)

    def feed(self, data: bytes, pattern: re.Pattern[str] | None = None) -> bool:
        """Append `data`; return whether `pattern` was found in a line of it (lines longer than 64 KiB: in a piece)."""
        self.last = time.monotonic()
        self.lines += data.count(b"\n")
        self._write(self._mask.feed(data))
        if pattern is None:
            return False
        *whole, self._line = (self._line + data).split(b"\n")
        if len(self._line) > CHUNK_BYTES:
            whole, self._line = [*whole, self._line], b""
        return any(pattern.search(line.decode("utf-8", "replace")) for line in whole)

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view and self._fd >= 0:
                size = os.write(self._fd, view)
                self._hash.update(view[:size])
                view = view[size:]
        except OSError as error:
            self.error = self.error or str(error)
        self.lost_bytes += len(view)

    def close(self) -> str:
        """Write what was held back, sync, and return the SHA-256 of the file's content."""
        self._write(self._mask.feed(b"", final=True))
        with contextlib.suppress(OSError):
            os.fsync(self._fd)
        return self._hash.hexdigest()


def process(pid: int) -> tuple[str, int, str]:
    """Return state letter, parent and start time (clock ticks since boot) of a process; OSError if there is none."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].decode().split()
    return fields[0], int(fields[1]), fields[19]


def descendants(root: int) -> dict[int, str]:
    """Return pid -> start time of all live, not zombie, descendants of `root`."""
    table: dict[int, tuple[str, int, str]] = {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            table[int(name)] = process(int(name))
    found = {root}
    while more := {pid for pid, entry in table.items() if entry[1] in found} - found:
        found |= more
    return {pid: table[pid][2] for pid in found - {root} if table[pid][0] not in "ZX"}


def mine() -> dict[int, str]:
    """Return all live descendants of this process, for sure: one scan of /proc can miss a process that just forked.

    As a subreaper this process is the parent of every orphan below it; only the kernel's "no children" ends the search.
    """
    for _ in range(20):
        found = descendants(os.getpid())
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return found
        if found:
            break
        time.sleep(0.005)
    return found


def send(pid: int, started: str, number: int) -> None:
    """Signal process `pid` only if it still is the one that started at `started` (pids are reused)."""
    with contextlib.suppress(OSError):  # no pidfd: engines' seccomp profiles of the last years refuse it
        if process(pid)[2] == started:
            os.kill(pid, number)


def environment(folder: str) -> dict[str, Any]:
    """Return what the machine looks like from in here: evidence, never a condition."""
    facts: dict[str, Any] = {"python": platform.python_version(), "platform": platform.platform(), "gpus": []}
    facts |= {"hostname": platform.node(), "cpus": len(os.sched_getaffinity(0)), "uid": os.getuid()}
    for name, path in (("shm_bytes", "/dev/shm"), ("tmp_free_bytes", "/tmp"), ("disk_free_bytes", folder)):  # noqa: S108 - their size is the fact
        with contextlib.suppress(OSError):
            usage = shutil.disk_usage(path)
            facts[name] = usage.total if name == "shm_bytes" else usage.free
    if tool := shutil.which("nvidia-smi"):
        argv = [tool, "--query-gpu=name,driver_version", "--format=csv,noheader"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            run = subprocess.run(argv, capture_output=True, text=True, timeout=20, check=True, stdin=subprocess.DEVNULL)
            rows = [
                [word.strip() for word in f"{line},".split(",")] for line in run.stdout.splitlines() if line.strip()
            ]
            facts |= {"gpus": [row[0] for row in rows], "driver": next((row[1] for row in rows), "")}
    return facts


def give_back(owner: Sequence[int] | None, tops: Iterable[str]) -> list[str]:
    """Change the owner of everything below `tops`; return the problems. Links are not followed."""
    problems: list[str] = []
    for top in tops if owner else ():
        for folder, names, files in os.walk(top, onerror=lambda error: problems.append(str(error))):
            for name in (".", *names, *files):
                try:
                    os.chown(os.path.join(folder, name), *(owner or ()), follow_symlinks=False)
                except FileNotFoundError:
                    continue
                except OSError as error:
                    problems.append(str(error))
    return problems[:20]


class Command:
    """One run: the child, its log, and the reason why it ended."""

    def __init__(self, spec: Mapping[str, Any], log: Log) -> None:
        self.spec, self.log = spec, log
        self.child, self.reason, self.detail, self.leftover, self.survivors, self.output = -1, "", "", 0, 0, -1
        self.rc: int | None = None
        self.done_at: float | None = None
        self.signals: list[int] = []
        self.pattern = re.compile(spec["done_pattern"]) if spec["done_pattern"] else None
        self.selector = selectors.DefaultSelector()
        wake, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)
        self.selector.register(wake, selectors.EVENT_READ, "signal")
        with contextlib.suppress(OSError):
            if stat.S_ISFIFO(os.fstat(0).st_mode):
                self.selector.register(0, selectors.EVENT_READ, "lifeline")

    def spawn(self) -> None:
        """Start the command in a session of its own, with nothing on its standard input."""
        argv, env = list(self.spec["argv"]), dict(self.spec["env"])
        if os.path.basename(argv[0]) == "bash":
            argv[1:1] = ["-o", "pipefail"]
        env |= {name: os.environ[name] for name in (*self.spec["secrets"], *MARKERS) if name in os.environ}
        self.output, write = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.output, False)
        self.selector.register(self.output, selectors.EVENT_READ, "output")
        options: dict[str, Any] = {"cwd": self.spec["cwd"], "env": env, "start_new_session": True}
        try:
            child = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=write, stderr=write, **options)
            child.returncode = 0  # pump() is the only one that waits, or Popen would swallow the status
            self.child = child.pid
        except (OSError, ValueError, TypeError) as error:
            self.reason, self.detail = "spawn_failed", f"{type(error).__name__}: {error}"
            self.log.feed(f"cannot start {argv[0]}: {error}\n".encode("utf-8", "backslashreplace"))
        finally:
            os.close(write)

    def pump(self, wait_s: float) -> None:
        """Wait for events at most `wait_s` and take them in."""
        for key, _ in self.selector.select(max(0.0, wait_s)):
            try:
                data = os.read(key.fd, CHUNK_BYTES)
            except BlockingIOError:
                continue
            if key.data == "signal":
                self.signals += [number for number in data if number != signal.SIGCHLD]
            elif not data:
                self.selector.unregister(key.fd)
                if key.data == "lifeline":
                    self.reason = self.reason or "runner_gone"
            elif key.data == "output" and self.log.feed(data, self.pattern) and self.done_at is None:
                self.done_at = time.monotonic()
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self.child:
                    self.rc = os.waitstatus_to_exitcode(ended[1])

    def overdue(self, began: float) -> tuple[str, float]:
        """Return the reason to stop now ("" for none) and the seconds until the next limit."""
        if self.signals or self.reason:
            return self.reason or "terminated", 0.0
        limits = [("timeout", began + self.spec["timeout_s"])]
        if self.done_at is not None:  # the grace replaces the long limit: training is over
            limits = [("hang", self.done_at + self.spec["grace_s"])]
        elif self.spec["silence_s"]:
            limits.append(("silent", self.log.last + self.spec["silence_s"]))
        reason, at = min(limits, key=lambda limit: limit[1])
        left_s = at - time.monotonic()
        return (reason, 0.0) if left_s <= 0 else ("", left_s)

    def stop_tree(self, grace_s: float) -> int:
        """Send TERM to all descendants, KILL after `grace_s` or at a further signal; return how many stayed alive."""
        asked: dict[int, str] = {}
        began, signals = time.monotonic(), len(self.signals)
        while (alive := mine()) and time.monotonic() < began + grace_s + KILL_S:
            kill = time.monotonic() >= began + grace_s or len(self.signals) > signals
            for pid, started in alive.items():
                if kill or asked.get(pid) != started:
                    send(pid, started, signal.SIGKILL if kill else signal.SIGTERM)
                    asked[pid] = started
            self.pump(TICK_S)
        return len(alive)

    def run(self, began: float) -> None:
        """Run the command to its end or to a limit, then stop whatever it left."""
        self.pump(0.0)
        if not self.overdue(began)[0]:
            self.spawn()
        while self.rc is None:
            self.reason, left_s = self.overdue(began)
            if self.reason:
                break
            self.pump(min(left_s, 60.0))
        if not self.reason:
            self.reason, until = "exited", time.monotonic() + LINGER_S
            while (alive := mine()) and time.monotonic() < until and not self.signals:
                self.pump(TICK_S)
            self.leftover = len(alive)  # outlived the command; survivors outlived even KILL
        self.survivors = self.stop_tree(self.spec["term_grace_s"])
        until = time.monotonic() + (TICK_S if self.survivors else KILL_S)
        while any(key.data == "output" for key in self.selector.get_map().values()) and time.monotonic() < until:
            self.pump(TICK_S)  # the pipe's end comes as soon as no writer is left
        self.pump(0.0)


def finish(path: str, reserved: str, record: Mapping[str, Any], owner: Sequence[int] | None) -> None:
    """Write the record over the reserved room, then rename: exit.json is there complete or not at all."""
    data = (json.dumps(record, sort_keys=True, indent=1) + "\n").encode()
    with open(os.open(reserved, os.O_RDWR | os.O_CREAT, 0o644), "r+b") as file:
        file.write(data)
        file.truncate()
        file.flush()
        os.fsync(file.fileno())
        if owner:
            os.fchown(file.fileno(), *owner)
    os.replace(reserved, path)


def run(spec: Mapping[str, Any]) -> int:
    """Run the spec's command; return the agent's exit status."""
    subreaper = ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    with contextlib.suppress(OSError):
        os.setsid()
    log = Log(spec["log"], (os.environ[name] for name in spec["secrets"] if name in os.environ))
    command, reserved = Command(spec, log), f"{spec['exit']}.{os.getpid()}.part"
    with contextlib.suppress(OSError), open(reserved, "wb") as file:
        file.write(b" " * RESERVE_BYTES)
    facts = environment(os.path.dirname(spec["log"])) | {"subreaper": subreaper}
    started, began = dt.datetime.now(dt.UTC), time.monotonic()
    command.run(began)
    record = {name: getattr(command, name) for name in ("rc", "reason", "leftover", "survivors")} | {
        "schema": 1,
        "id": spec["id"],
        "detail": command.detail or ", ".join(signal.Signals(number).name for number in command.signals),
        "done_seen": command.done_at is not None,
        "started": started.isoformat(timespec="seconds").replace("+00:00", "Z"),
        "duration_s": round(time.monotonic() - began, 3),
        "lines": log.lines,
        "last_line_age_s": round(time.monotonic() - log.last, 3),
        "log_sha256": log.close(),
        "log_lost_bytes": log.lost_bytes,
        "log_error": log.error,
        "environment": facts,
        "give_back_problems": give_back(spec["owner"], spec["give_back"]),
    }
    finish(spec["exit"], reserved, record, spec["owner"])
    if command.reason != "exited" or command.rc is None:
        return STATUS.get(command.reason, 124)
    return command.rc if command.rc >= 0 else 128 - command.rc


def main(argv: Sequence[str]) -> int:
    """Dispatch on the first word; an unusable spec ends with status 2 and one line."""
    if argv and argv[0] == "probe":
        return int(importlib.import_module("probe").main(list(argv[1:])))
    try:
        with open(argv[-1], "rb") as file:
            spec = json.load(file)
        spec = DEFAULTS | {"owner": None, "give_back": ()} | spec
        problem: Any = [f"no {name}" for name in NEEDED if spec.get(name) in (None, "", [])]
        problem = problem or (spec["schema"] != 1 and "schema is not 1")
        re.compile(spec["done_pattern"] or "")
    except (OSError, ValueError, IndexError, TypeError, re.error) as error:
        problem = repr(error)
    if problem:
        print(f"agent: unusable spec {list(argv)}: {problem}", file=sys.stderr)
        return 2
    if os.geteuid() or "NEMO_RL_E2E_ROOTLESS" in os.environ:  # a rootless engine's root is the caller already
        spec["owner"] = None
    if argv[0] != "give-back":
        return run(spec)
    problems = give_back(spec["owner"], spec["give_back"])
    print("\n".join(problems), file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
