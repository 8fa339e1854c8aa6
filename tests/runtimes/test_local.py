"""Local jobs: they run to their own end, are stopped with their daemons, and die with their runner."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tasks.runtimes import local
from tasks.runtimes.job import Mount, start_time
from tasks.runtimes.local import Local
from tests.runtimes.jobs import AGENT, DAEMON, GONE, HERE, REBOOTED, ROOT, go, job, until

# forks twice and leaves its session, as Ray's daemons do, then names itself in the file of its first argument


def written(path: Path) -> int:
    return int(until(lambda: path.read_text() if path.exists() else ""))


def test_a_local_job_runs_to_its_own_end(tmp_path: Path) -> None:
    polls: list[float] = []
    ended = go(
        Local(),
        job(tmp_path, "bash", "-c", "echo hello; sleep 0.5; exit 3"),
        poll=lambda: polls.append(time.monotonic()),
    )
    assert (ended.rc, ended.reason, ended.detail) == (3, "exited", "")
    assert (tmp_path / "run.log").read_text() == "hello\n"
    assert polls


def test_the_jobs_environment_reaches_the_agent_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_12345678")
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    one = job(tmp_path, "env", secrets=("HF_TOKEN", "UNSET"))
    (tmp_path / "spec.json").write_text(
        json.dumps({**json.loads((tmp_path / "spec.json").read_text()), "secrets": ["HF_TOKEN"]})
    )
    assert go(Local(), one).rc == 0
    names = {line.partition("=")[0] for line in (tmp_path / "run.log").read_text().splitlines()}
    assert names == {"PATH", "HF_TOKEN", "NEMO_RL_E2E_JOB", "NEMO_RL_E2E_OWNER"}
    assert "hf_1234" not in (tmp_path / "run.log").read_text()


def test_a_stop_ends_a_local_job_within_seconds_daemon_included(tmp_path: Path) -> None:
    stop = threading.Event()
    pid: list[int] = []

    def poll() -> None:
        if (tmp_path / "pid").exists() and not stop.is_set():
            pid.append(written(tmp_path / "pid"))
            stop.set()

    ended = go(
        Local(), job(tmp_path, "bash", "-c", f"'{sys.executable}' -c '{DAEMON}' $PWD/pid; sleep 300"), stop, poll
    )
    assert ended.reason == "stopped"
    assert json.loads((tmp_path / "exit.json").read_text())["reason"] == "terminated"
    assert start_time(pid[0]) is None


def test_a_poll_that_raises_stops_the_job_first(tmp_path: Path) -> None:
    def poll() -> None:
        if (tmp_path / "pid").exists():
            raise KeyboardInterrupt

    one = job(tmp_path, "bash", "-c", f"'{sys.executable}' -c '{DAEMON}' $PWD/pid; sleep 300")
    with pytest.raises(KeyboardInterrupt):
        go(Local(), one, poll=poll)
    assert start_time(written(tmp_path / "pid")) is None
    assert json.loads((tmp_path / "exit.json").read_text())["reason"] == "terminated"


def test_an_agent_that_was_killed_leaves_nothing_alive(tmp_path: Path) -> None:
    def poll() -> None:
        if (tmp_path / "pid").exists():
            agents = [
                p for p in Path("/proc").glob("[0-9]*/cmdline") if str(tmp_path / "spec.json").encode() in _bytes(p)
            ]
            for path in agents:
                os.kill(int(path.parent.name), signal.SIGKILL)

    ended = go(Local(), job(tmp_path, "bash", "-c", f"'{sys.executable}' -c '{DAEMON}' $PWD/pid; sleep 300"), poll=poll)
    assert (ended.rc, ended.reason) == (-9, "killed")
    assert "stopped 2 left processes" in ended.detail  # the daemon and the shell (its sleep is in the shell's tree)
    assert start_time(written(tmp_path / "pid")) is None


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_an_agent_that_ignores_its_limits_is_killed_at_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "DEADLINE_MARGIN_S", 0.0)
    monkeypatch.setattr(local, "STOP_S", 0.5)
    deaf = tmp_path / "deaf.py"
    deaf.write_text("import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)")
    one = dataclasses.replace(job(tmp_path, "true"), argv=(str(deaf),), timeout_s=0.5)
    ended = go(Local(), one)
    assert (ended.rc, ended.reason) == (-9, "deadline")


@pytest.mark.parametrize("what", ["mount", "interpreter"])
def test_a_local_job_that_cannot_start_says_what_is_missing(tmp_path: Path, what: str) -> None:
    missing = tmp_path / "missing"
    keys = {"mounts": (Mount(missing, "/x", True),)} if what == "mount" else {"interpreter": str(missing)}
    ended = go(Local(), job(tmp_path, "true", **keys))
    assert (ended.rc, ended.reason) == (None, "not_started")
    assert str(missing) in ended.detail


def test_a_broken_agent_shows_its_last_words(tmp_path: Path) -> None:
    ended = go(Local(), dataclasses.replace(job(tmp_path, "true"), argv=(str(AGENT), str(tmp_path / "nothing.json"))))
    assert ended.rc == 2
    assert "unusable spec" in ended.detail


RUNNER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tasks.runtimes.local import Local
from tests.runtimes import jobs as t
folder = Path(sys.argv[2])
t.go(Local(), t.job(folder, "bash", "-c", f"'{sys.executable}' -c '{t.DAEMON}' $PWD/pid; sleep 300"))
"""


def _runner(folder: Path) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-c", RUNNER, str(ROOT), str(folder)]
    return subprocess.Popen(argv, stdin=subprocess.DEVNULL, start_new_session=True)


def test_sigkill_of_the_runner_ends_the_job_and_its_daemons(tmp_path: Path) -> None:
    runner = _runner(tmp_path)
    daemon = written(tmp_path / "pid")
    runner.kill()
    runner.wait()
    until((tmp_path / "exit.json").exists)
    assert json.loads((tmp_path / "exit.json").read_text())["reason"] == "runner_gone"
    assert start_time(daemon) is None


def test_orphans_of_dead_runners_are_stopped_and_those_of_live_ones_are_not(tmp_path: Path) -> None:
    processes = {}
    for name, owner in (("dead", GONE), ("live", HERE), ("far", REBOOTED), ("none", None)):
        env = {local.OWNER: str(owner), local.JOB: name} if owner else {}
        processes[name] = subprocess.Popen(["sleep", "300"], env=env, start_new_session=True)
    try:
        until(lambda: all(b"sleep" in _bytes(Path(f"/proc/{p.pid}/cmdline")) for p in processes.values()))
        lines = Local().collect_orphans()
        assert any(f"process {processes['dead'].pid} (sleep)" in line for line in lines)
        assert processes["dead"].wait(5) == -9
        assert [n for n, p in processes.items() if p.poll() is None] == ["live", "far", "none"]
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
