"""Docker and podman against an engine that is made here: what is asked for, and what its answers are worth."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from docker.errors import APIError, NotFound

from tasks.errors import UserError
from tasks.runtimes import docker
from tasks.runtimes.docker import Docker
from tasks.runtimes.job import Mount, is_orphan, parse_owner
from tasks.runtimes.podman import Podman
from tests.runtimes.jobs import HERE, ROOT, exited, go, job

if TYPE_CHECKING:
    from collections.abc import Callable


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
