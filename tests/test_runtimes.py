"""Runtimes without an engine: local ones for real, the Docker one against a scripted client."""

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
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from docker.errors import APIError, NotFound

from tasks.errors import UserError
from tasks.runtimes import choose, docker, local
from tasks.runtimes.docker import Docker
from tasks.runtimes.job import Job, Mount, Owner, is_dead, is_orphan, parse_owner, start_time, this_owner
from tasks.runtimes.local import Local
from tasks.runtimes.podman import Podman

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parent.parent
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


def written(path: Path) -> int:
    return int(until(lambda: path.read_text() if path.exists() else ""))


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


# choosing, owning


def test_unknown_runtimes_are_refused_with_a_suggestion() -> None:
    with pytest.raises(UserError, match=r"runtime=dokcer.*did you mean 'docker'"):
        choose("dokcer")
    assert [choose(name).name for name in ("local", "docker", "podman")] == ["local", "docker", "podman"]


def test_an_owner_survives_its_text_form() -> None:
    assert parse_owner(str(this_owner())) == this_owner()
    assert [parse_owner(text) for text in ("", "a/b/c/d", "a/b/1", "x")] == [None] * 4


HERE = this_owner()
LIVE = dataclasses.replace(HERE)
REUSED = dataclasses.replace(HERE, start="1")
GONE = dataclasses.replace(HERE, pid=4_194_305)  # above the kernel's largest pid
REBOOTED = dataclasses.replace(GONE, boot="other")
ELSEWHERE = dataclasses.replace(GONE, namespace="4026539999")


@pytest.mark.parametrize(
    ("owner", "deadline", "orphan"),
    [
        (LIVE, None, False),
        (LIVE, 0.0, False),
        (GONE, None, True),
        (REUSED, None, True),
        (GONE, 1e12, True),
        (REBOOTED, None, False),
        (REBOOTED, 1e12, False),
        (REBOOTED, 0.0, True),
        (ELSEWHERE, 1e12, False),
        (ELSEWHERE, 0.0, True),
        (None, 0.0, False),
    ],
)
def test_only_what_provably_nobody_minds_is_an_orphan(
    owner: Owner | None, deadline: float | None, orphan: bool
) -> None:
    assert is_orphan(owner, HERE, deadline) is orphan


def test_a_zombie_is_dead_and_an_invisible_process_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    child = subprocess.Popen(["true"])
    until(lambda: start_time(child.pid) is None)
    assert is_dead(dataclasses.replace(HERE, pid=child.pid, start="?"))
    child.wait()
    monkeypatch.setattr(Path, "read_bytes", lambda _: (_ for _ in ()).throw(FileNotFoundError()))  # hidepid
    assert start_time(os.getpid()) == "?"
    assert not is_dead(HERE)


# local


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
import sys, threading
from pathlib import Path
sys.path.insert(0, sys.argv[1])
sys.path.insert(0, sys.argv[2])
import test_runtimes as t
from tasks.runtimes.local import Local
folder = Path(sys.argv[3])
t.go(Local(), t.job(folder, "bash", "-c", f"'{sys.executable}' -c '{t.DAEMON}' $PWD/pid; sleep 300"))
"""


def _runner(folder: Path) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-c", RUNNER, str(ROOT), str(ROOT / "tests"), str(folder)]
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


# docker and podman, scripted


class Fake:
    """A docker client, its one container and its engine; `states` are played one a reload, the last stays."""

    def __init__(self, *states: dict[str, Any], start: list[Exception] | None = None) -> None:
        self.states, self.start_errors = list(states), start or []
        self.created: list[dict[str, Any]] = []
        self.signals: list[str] = []
        self.removed = 0
        self.pings: list[Any] = []
        self.after_signal: dict[str, Any] | None = None
        self.attrs: dict[str, Any] = {"State": {}}
        self.containers = SimpleNamespace(create=self._create, list=lambda **_: [])
        self.networks = SimpleNamespace(list=lambda **_: [SimpleNamespace(name="bridge")])

    def _create(self, *_: Any, **options: Any) -> Fake:
        self.created.append(options)
        return self

    status = property(lambda self: self.attrs["State"].get("Status", "created"))

    def attach_socket(self, **_: Any) -> Any:
        return SimpleNamespace(close=lambda: None)

    def start(self) -> None:
        if self.start_errors:
            raise self.start_errors.pop(0)

    def reload(self) -> None:
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        if isinstance(state, Exception):
            raise state
        config = {"Cmd": ["python3", "agent.py", "spec.json"], "Labels": {}}
        self.attrs = {"State": state, "Config": config, "Image": "sha256:1", "Mounts": []}

    def kill(self, signal: str) -> None:
        self.signals.append(signal)
        if self.after_signal:
            self.states = [self.after_signal]

    def stop(self, timeout: int) -> None:
        self.signals.append("stop")

    def remove(self, **_: Any) -> None:
        self.removed += 1

    def logs(self, **_: Any) -> bytes:
        return b""

    def info(self) -> dict[str, Any]:
        return {"SecurityOptions": ["name=seccomp,profile=default"]}

    def ping(self) -> bool:
        answer = self.pings.pop(0) if self.pings else True
        if isinstance(answer, Exception):
            raise answer
        return bool(answer)

    def close(self) -> None:
        return


RUNNING = {"Status": "running", "ExitCode": 0, "Pid": 4_194_305}


def exited(rc: int, **more: Any) -> dict[str, Any]:
    return {"Status": "exited", "ExitCode": rc, "OOMKilled": False, "Error": "", **more}


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Fake], Docker]:
    monkeypatch.setattr(docker, "POLL_S", 0.01)
    monkeypatch.setattr(docker, "ENGINE_DYING_S", 0.05)
    monkeypatch.setattr(docker, "ENGINE_LOST_S", 0.1)
    (tmp_path / "exit.json").write_text('{"reason": "exited"}')

    def make(fake: Fake, kind: type[Docker] = Docker) -> Docker:
        runtime = kind("sha256:1", host="unix:///fake.sock")
        monkeypatch.setattr(runtime, "client", lambda: __import__("contextlib").closing(fake))
        monkeypatch.setattr(runtime, "engine_pid", lambda: 1)
        monkeypatch.setattr(runtime, "listener", lambda: 1)
        return runtime

    return make


def test_a_container_is_asked_for_as_the_brief_says(
    engine: Callable[..., Docker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    fake = Fake(exited(0))
    one = job(
        tmp_path, "true", id="level0.x/1", gpus=2, shm_bytes=1 << 30, secrets=("HF_TOKEN",), env={"A": "b"},
        mounts=(Mount(tmp_path, "/e2e/attempt", False), Mount(ROOT, "/e2e/agent", True)), labels={"nemo-rl-e2e.run": "r1"},
    )  # fmt: skip
    assert go(engine(fake), one).reason == "exited"
    made = fake.created[0]
    assert made["image"] == "sha256:1"
    assert (made["init"], made["tty"], made["shm_size"], made["network_mode"]) == (True, False, 1 << 30, "none")
    assert made["environment"] == {"A": "b", "HF_TOKEN": "secret"}
    assert [(m["Type"], m["Source"], m["Target"], m["ReadOnly"]) for m in made["mounts"]] == [
        ("bind", str(tmp_path), "/e2e/attempt", False),
        ("bind", str(ROOT), "/e2e/agent", True),
    ]
    assert made["device_requests"] == [
        {"Driver": "", "Count": 2, "DeviceIDs": [], "Capabilities": [["gpu"]], "Options": {}}
    ]
    label = made["labels"]
    assert (label["nemo-rl-e2e"], label["nemo-rl-e2e.run"], label["nemo-rl-e2e.attempt"]) == ("1", "r1", "level0.x/1")
    assert parse_owner(label["nemo-rl-e2e.owner"]) == HERE
    assert not is_orphan(HERE, HERE, float(label["nemo-rl-e2e.deadline"]))
    assert "/" not in made["name"]
    assert fake.removed == 1


def test_names_are_never_used_twice_and_devices_can_be_chosen(tmp_path: Path) -> None:
    runtime, fake = Docker("i", host="unix:///fake.sock"), Fake(exited(0))
    made = [runtime.options(fake, job(tmp_path, "true", gpus=1, gpu_ids=("3",))) for _ in range(2)]  # type: ignore[arg-type]
    assert made[0]["name"] != made[1]["name"]
    assert made[0]["device_requests"][0]["DeviceIDs"] == ["3"]
    assert "ulimits" not in runtime.options(fake, job(tmp_path, "true"))  # type: ignore[arg-type]


@pytest.mark.parametrize(("bridges", "mode"), [(["bridge"], "bridge"), ([], "host"), (["my-bridge"], "host")])
def test_a_job_with_network_gets_the_bridge_or_where_there_is_none_the_host(bridges: list[str], mode: str) -> None:
    client: Any = SimpleNamespace(networks=SimpleNamespace(list=lambda **_: [SimpleNamespace(name=n) for n in bridges]))
    assert docker.network(client, wanted=True) == {"network_mode": mode}


def test_memlock_is_given_up_where_the_engine_may_not_raise_limits(
    engine: Callable[..., Docker], tmp_path: Path
) -> None:
    fake = Fake(exited(0), start=[APIError("error setting rlimit type 8: operation not permitted")])
    assert go(engine(fake), job(tmp_path, "true", gpus=1)).reason == "exited"
    assert ["ulimits" in made for made in fake.created] == [True, False]
    assert fake.removed == 2


def test_a_container_that_does_not_start_is_blocked_with_a_remedy_and_removed(
    engine: Callable[..., Docker], tmp_path: Path
) -> None:
    fake = Fake(start=[APIError('could not select device driver "" with capabilities: [[gpu]]')])
    ended = go(engine(fake), job(tmp_path, "true", gpus=1))
    assert (ended.rc, ended.reason, fake.removed) == (None, "not_started", 1)
    assert "NVIDIA container toolkit" in ended.detail


@pytest.mark.parametrize(
    ("final", "record", "pings", "reason"),
    [
        (exited(0), "exited", [], "exited"),
        (exited(3), "exited", [], "exited"),
        (exited(0, OOMKilled=True), "exited", [], "oom"),
        (exited(137, OOMKilled=True), None, [], "oom"),
        (exited(143), "exited", [], "exited"),  # the command itself was ended by TERM
        (exited(143), "terminated", [], "killed"),
        (exited(137), None, [], "killed"),
        (exited(143), "terminated", [ConnectionRefusedError()], "engine_lost"),
        (exited(143), None, [True, FileNotFoundError()], "engine_lost"),
    ],
)
def test_what_an_engine_says_is_not_taken_at_face_value(
    engine: Callable[..., Docker],
    tmp_path: Path,
    final: dict[str, Any],
    record: str | None,
    pings: list[Any],
    reason: str,
) -> None:
    fake = Fake(RUNNING, final)
    fake.pings = pings
    runtime = engine(fake)
    (tmp_path / "exit.json").unlink()
    if record:
        (tmp_path / "exit.json").write_text(json.dumps({"reason": record}))
    assert go(runtime, job(tmp_path, "true")).reason == reason
    assert fake.removed == (1 if record else 2)  # without a record the files are given back by one more container


def test_a_restarted_engine_is_noticed_by_its_pid(
    engine: Callable[..., Docker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = engine(Fake(RUNNING, exited(143)))
    (tmp_path / "exit.json").write_text('{"reason": "terminated"}')
    pids = iter([1])
    monkeypatch.setattr(runtime, "engine_pid", lambda: next(pids, 2))
    assert go(runtime, job(tmp_path, "true")).reason == "engine_lost"


def test_a_stop_is_term_then_kill(
    engine: Callable[..., Docker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(docker, "STOP_S", 0.05)
    fake, stop = Fake(RUNNING), threading.Event()
    stop.set()
    polite = Fake(RUNNING)
    polite.after_signal = exited(143)
    assert go(engine(polite), job(tmp_path, "true"), stop).reason == "stopped"
    assert polite.signals == ["SIGTERM"]

    def poll() -> None:
        if "SIGKILL" in fake.signals:
            fake.states = [exited(137)]

    assert go(engine(fake), job(tmp_path, "true"), stop, poll).reason == "stopped"
    assert fake.signals == ["SIGTERM", "SIGKILL"]


def test_an_agent_that_overruns_its_limits_in_a_container_is_stopped(
    engine: Callable[..., Docker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(docker, "DEADLINE_MARGIN_S", 0.0)
    fake = Fake(RUNNING)
    fake.after_signal = exited(143)
    assert go(engine(fake), job(tmp_path, "true", timeout_s=0.05)).reason == "deadline"


@pytest.mark.parametrize(
    ("error", "reason"), [(NotFound("gone"), "killed"), (ConnectionRefusedError(111, "refused"), "engine_lost")]
)
def test_a_lost_container_or_engine_ends_the_wait(
    engine: Callable[..., Docker], tmp_path: Path, error: Any, reason: str
) -> None:
    assert go(engine(Fake(RUNNING, error)), job(tmp_path, "true")).reason == reason


def test_an_engine_that_comes_back_in_time_is_forgiven(engine: Callable[..., Docker], tmp_path: Path) -> None:
    lost: Any = ConnectionRefusedError(111, "refused")
    assert go(engine(Fake(RUNNING, lost, lost, RUNNING, exited(5))), job(tmp_path, "true")) == docker.Ended(
        5, "exited", ""
    )


def test_a_poll_that_raises_stops_and_removes_the_container(engine: Callable[..., Docker], tmp_path: Path) -> None:
    fake = Fake(RUNNING)

    def poll() -> None:
        raise SystemExit(143)

    with pytest.raises(SystemExit):
        go(engine(fake), job(tmp_path, "true"), poll=poll)
    assert (fake.signals, fake.removed) == (["stop"], 1)


def test_a_missing_mount_source_never_reaches_the_engine(engine: Callable[..., Docker], tmp_path: Path) -> None:
    fake = Fake()
    for kind in (Docker, Podman):  # podman would create it without a word
        ended = go(engine(fake, kind), job(tmp_path, "true", mounts=(Mount(tmp_path / "nope", "/x", True),)))
        assert (ended.reason, fake.created) == ("not_started", [])
        assert "nope" in ended.detail


def test_podman_refuses_gpus_because_its_api_would_ignore_them(engine: Callable[..., Docker], tmp_path: Path) -> None:
    fake = Fake()
    ended = go(engine(fake, Podman), job(tmp_path, "true", gpus=1))
    assert (ended.reason, fake.created) == ("not_started", [])
    assert "ignores GPU requests" in ended.detail


@pytest.mark.parametrize("kind", [Docker, Podman])
def test_without_an_engine_everything_says_so_with_a_remedy(kind: type[Docker], tmp_path: Path) -> None:
    runtime = kind("sha256:1", host=f"unix://{tmp_path}/no.sock")
    reason = runtime.available()
    assert reason
    assert reason.kind == "engine"
    assert runtime.remedy in reason.text
    ended = go(runtime, job(tmp_path, "true"))
    assert ended.reason == "not_started"
    assert runtime.remedy in ended.detail
    with pytest.raises(UserError, match=r"no\.sock"):
        runtime.collect_orphans()


def test_paths_of_a_job_are_the_hosts_or_fixed_ones() -> None:
    kinds = ("bridge", "mcore", "nemo_rl", "attempt", "agent")
    assert [Local().target(k, Path("/h")) for k in kinds] == ["/h"] * 5
    assert [Docker("i").target(k, Path("/h")) for k in kinds] == [
        "/opt/Megatron-Bridge", "/opt/Megatron-LM", "/opt/nemo-rl", "/e2e/attempt", "/e2e/agent"
    ]  # fmt: skip
