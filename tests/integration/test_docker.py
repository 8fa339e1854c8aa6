"""The Docker and podman runtimes, the CI image and the image stage on real engines and a real registry.

Needs an engine (E2E_TEST_DOCKER_HOST or DOCKER_HOST; `.ci/engine.sh start DIR` makes one). Without one these tests are
skipped and say so; with CI=true they fail instead, so that they cannot vanish unseen.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tasks import container_image, image_pins
from tasks.errors import UserError
from tasks.runtimes.docker import Docker
from tasks.runtimes.job import Ended, Job, Mount, this_owner
from tasks.runtimes.podman import Podman
from tests.integration.conftest import CONTAINERS, HOST, REF, ROOT, lacking, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from docker import DockerClient

pytestmark = pytest.mark.docker

SILENT_S = 61  # docker-py's default read timeout is 60 s: a stream would end here and look like the container's end


@pytest.fixture
def runtime(image: str) -> Docker:
    return Docker(image, workspace="integration", host=HOST)


def job(folder: Path, script: str, **keys: Any) -> Job:
    """Return a job that runs a bash script in the container; spec keys and job fields may be given."""
    fields = {f.name for f in dataclasses.fields(Job)}
    spec = {
        "schema": 1, "id": folder.name, "argv": ["bash", "-c", script], "cwd": "/e2e/attempt", "timeout_s": 120.0,
        "env": {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}, "term_grace_s": 3.0, "owner": [1234, 4321],
        "log": "/e2e/attempt/run.log", "exit": "/e2e/attempt/exit.json", "give_back": ["/e2e/attempt"],
    }  # fmt: skip
    folder.mkdir(exist_ok=True)
    (folder / "spec.json").write_text(json.dumps({**spec, **{k: v for k, v in keys.items() if k not in fields}}))
    base: dict[str, Any] = {
        "id": folder.name, "argv": ("/e2e/agent/agent.py", "/e2e/attempt/spec.json"), "interpreter": "python3",
        "mounts": (Mount(CONTAINERS, "/e2e/agent", True), Mount(folder, "/e2e/attempt", False)), "env": {}, "secrets": (),
        "gpus": 0, "timeout_s": 120.0, "shm_bytes": 128 << 20, "labels": {}, "network": False, "folder": folder,
    }  # fmt: skip
    return Job(**{**base, **{k: v for k, v in keys.items() if k in fields}})


def go(
    runtime: Docker, one: Job, stop: threading.Event | None = None, poll: Callable[[], None] = lambda: None
) -> Ended:
    return runtime.run(one, stop=stop or threading.Event(), poll=poll)


def record(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "exit.json").read_text())
    return found


def owners(folder: Path) -> set[tuple[int, int]]:
    return {(p.lstat().st_uid, p.lstat().st_gid) for p in (folder, *folder.rglob("*")) if p.name != "agent.log"}


@pytest.fixture(scope="module")
def silent(image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], tuple[Ended, Path]]]:
    """Start a job that says nothing for a minute before everything else; the last test waits for it."""
    folder, ended = tmp_path_factory.mktemp("silent"), list[Ended]()
    one = job(folder, f"echo begin; sleep {SILENT_S}; echo end; exit 3")
    thread = threading.Thread(target=lambda: ended.append(go(Docker(image, host=HOST), one)), daemon=True)
    thread.start()

    def result() -> tuple[Ended, Path]:
        thread.join(SILENT_S + 30)
        return ended[0], folder

    yield result
    thread.join(SILENT_S + 30)


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize("rc", [0, 3])
def test_a_job_runs_to_its_own_end_and_its_files_belong_to_the_caller(runtime: Docker, tmp_path: Path, rc: int) -> None:
    began = time.monotonic()
    script = f"id -u; mkdir -p work/a; touch work/a/f; [ -w /e2e/agent ] || echo read-only; df -m /dev/shm; exit {rc}"
    ended = go(runtime, job(tmp_path, script))
    assert (ended.rc, ended.reason, ended.detail) == (rc, "exited", "")
    assert (record(tmp_path)["rc"], record(tmp_path)["environment"]["shm_bytes"]) == (rc, 128 << 20)
    assert (tmp_path / "run.log").read_text().splitlines()[0] == "0"
    assert owners(tmp_path) == {(1234, 4321)}
    assert time.monotonic() - began < 20


def test_a_container_has_loopback_only_knows_its_name_and_has_an_init(runtime: Docker, tmp_path: Path) -> None:
    script = "python3 -c 'import socket; print(socket.gethostbyname(socket.gethostname()))'; ls /sys/class/net; cat /proc/1/comm"
    assert go(runtime, job(tmp_path, script)).rc == 0
    assert (tmp_path / "run.log").read_text().split() == ["127.0.0.1", "lo", "docker-init"]


def test_a_missing_mount_source_is_the_engines_error_too_and_is_not_created(
    runtime: Docker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "refusal", lambda _: "")
    one = job(tmp_path, "true", mounts=(Mount(tmp_path / "nope", "/x", False),))
    ended = go(runtime, one)
    assert (ended.rc, ended.reason) == (None, "not_started")
    assert "bind source path does not exist" in ended.detail
    assert not (tmp_path / "nope").exists()


@pytest.mark.parametrize(
    ("keys", "text"), [({"interpreter": "/opt/no/python"}, "lacks the interpreter"), ({"gpus": 1}, "NVIDIA")]
)
def test_what_the_engine_refuses_is_blocked_with_a_remedy_and_leaves_no_container(
    runtime: Docker, client: DockerClient, tmp_path: Path, keys: dict[str, Any], text: str
) -> None:
    if "gpus" in keys and Path("/dev/nvidiactl").exists():
        pytest.skip("this host has a GPU")
    ended = go(runtime, job(tmp_path, "true", **keys))
    assert (ended.rc, ended.reason) == (None, "not_started")
    assert text in ended.detail
    assert not client.containers.list(all=True, filters={"label": f"nemo-rl-e2e.attempt={tmp_path.name}"})


def test_an_image_that_is_not_there_is_blocked(tmp_path: Path, client: DockerClient) -> None:
    assert Docker(host=HOST).available() is None  # nothing bound yet
    absent = Docker("sha256:" + "0" * 64, host=HOST)
    reason = absent.available()
    assert reason
    assert reason.kind == "image"
    ended = go(absent, job(tmp_path, "true"))
    assert (ended.reason, "doit image" in ended.detail) == ("not_started", True)


def test_a_stop_ends_the_tree_within_seconds_and_keeps_the_record(runtime: Docker, tmp_path: Path) -> None:
    stop = threading.Event()
    asked: list[float] = []

    def poll() -> None:
        if (tmp_path / "up").exists() and not stop.is_set():
            asked.append(time.monotonic())
            stop.set()

    script = "setsid bash -c 'trap \"\" TERM; touch up; sleep 300' & trap 'echo bye; exit 9' TERM; while :; do sleep 0.1; done"
    ended = go(runtime, job(tmp_path, script, term_grace_s=0.5), stop, poll)
    assert ended.reason == "stopped"
    assert time.monotonic() - asked[0] < 10
    assert (record(tmp_path)["reason"], record(tmp_path)["rc"], record(tmp_path)["survivors"]) == ("terminated", 9, 0)
    assert owners(tmp_path) == {(1234, 4321)}


def test_a_child_killed_for_memory_is_oom_also_when_the_command_ends_with_0(
    runtime: Docker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = runtime.options
    limits = {"mem_limit": "96m", "memswap_limit": "96m"}
    monkeypatch.setattr(runtime, "options", lambda client, one: {**usual(client, one), **limits})
    ended = go(runtime, job(tmp_path, "python3 -c 'x = b\"x\" * (400 << 20)'; echo went on; exit 0"))
    assert (ended.rc, ended.reason) == (0, "oom")
    assert record(tmp_path)["rc"] == 0


def test_a_killed_agent_gets_its_files_given_back_all_the_same(runtime: Docker, tmp_path: Path) -> None:
    ended = go(runtime, job(tmp_path, "mkdir a; touch a/f; kill -9 $PPID; sleep 300"))
    assert (ended.rc, ended.reason) == (137, "killed")
    assert not (tmp_path / "exit.json").exists()
    assert owners(tmp_path) == {(1234, 4321)}


def test_output_of_any_kind_and_daemons_are_what_they_are_outside_a_container(runtime: Docker, tmp_path: Path) -> None:
    script = "printf '\\000\\377\\r\\n'; setsid sleep 300 & exit 4"
    assert go(runtime, job(tmp_path, script)).rc == 4
    assert (tmp_path / "run.log").read_bytes() == b"\x00\xff\r\n"
    assert record(tmp_path)["leftover"] == 1


RUNNER = """
import sys
from pathlib import Path
sys.path[:0] = [sys.argv[1], sys.argv[2]]
import test_docker as t
t.go(t.Docker(sys.argv[3], host=t.HOST), t.job(Path(sys.argv[4]), sys.argv[5]))
"""


def _killed_runner(image: str, folder: Path, script: str, once: Callable[[], Any]) -> None:
    argv = [sys.executable, "-c", RUNNER, str(ROOT), str(Path(__file__).parent), image, str(folder), script]
    runner = subprocess.Popen(argv, stdin=subprocess.DEVNULL, start_new_session=True)
    until(once)
    runner.kill()
    runner.wait()


def test_sigkill_of_the_runner_ends_the_container_through_the_lifeline(
    image: str, runtime: Docker, tmp_path: Path
) -> None:
    _killed_runner(image, tmp_path, "touch up; sleep 300", (tmp_path / "up").exists)
    until((tmp_path / "exit.json").exists, 15)
    assert record(tmp_path)["reason"] == "runner_gone"
    assert owners(tmp_path) == {(1234, 4321)}
    assert any(tmp_path.name in line for line in runtime.collect_orphans())


def test_orphans_are_stopped_given_back_and_removed_and_nothing_else_is_touched(
    client: DockerClient, image: str, runtime: Docker, tmp_path: Path
) -> None:
    # An agent that is deaf (frozen) to its lifeline and to TERM: only the collector can end it.
    script = "mkdir a; touch a/f; kill -STOP $PPID; touch up; sleep 300"
    _killed_runner(image, tmp_path, script, (tmp_path / "up").exists)
    owner = dataclasses.replace(this_owner(), pid=4_194_305)
    options: dict[str, Any] = {
        "image": image,
        "command": ["sleep", "300"],
        "network_mode": "none",
        "init": True,
        "detach": True,
    }

    def started(labels: dict[str, str]) -> Any:
        return client.containers.run(labels=labels, **options)

    kept = [
        started({}),  # a stranger's
        started({"nemo-rl-e2e": "1"}),  # labelled, but whose is it?
        started({"nemo-rl-e2e": "1", "nemo-rl-e2e.owner": str(this_owner())}),
        started({"nemo-rl-e2e": "1", "nemo-rl-e2e.owner": str(dataclasses.replace(owner, boot="another"))}),
        started({"nemo-rl-e2e.owner": str(owner)}),
    ]
    created = client.containers.create(labels={"nemo-rl-e2e": "1", "nemo-rl-e2e.owner": str(owner)}, **options)
    try:
        runtime_stop = pytest.MonkeyPatch()
        runtime_stop.setattr("tasks.runtimes.docker.STOP_S", 2.0)
        lines = runtime.collect_orphans()
        runtime_stop.undo()
        assert len(lines) == 2, lines
        assert any(tmp_path.name in line for line in lines)
        assert any(created.name in line for line in lines)
        for container in kept:
            container.reload()
            assert container.status == "running"
        assert owners(tmp_path) == {(1234, 4321)}
    finally:
        for container in kept:
            container.remove(force=True)
        with contextlib.suppress(Exception):
            created.remove(force=True)


def _variant(client: DockerClient, image: str, ref: str, change: str) -> str:
    """Commit a changed container as `ref` and push it; return the digest that the registry gives."""
    container = client.containers.create(image, ["true"], network_mode="none")
    container.commit(ref, changes=change)
    container.remove()
    events = list(client.images.push(ref, stream=True, decode=True))
    assert not [e for e in events if "error" in e], events
    return next(str(e["aux"]["Digest"]) for e in events if "Digest" in e.get("aux", {}))


def test_images_are_taken_by_digest_and_a_moved_tag_is_seen(
    client: DockerClient, image: str, registry: str, tmp_path: Path
) -> None:
    engine, told = Docker(host=HOST), list[str]()
    ref = f"{registry}/t/app"
    sha = "3b04247b78c69ed4c447204aad0d1e3215b0a083"
    first = _variant(client, image, f"{ref}:1", f"ENV NEMO_RL_COMMIT={sha}")

    def resolve(setting: str, **keys: Any) -> image_pins.Image:
        return container_image.resolve_container(setting, engine, progress=told.append, **keys)

    found = resolve(f"{ref}:1")
    assert (found.digest, found.nemo_rl_sha, found.fingerprint, found.notes) == (first, sha, None, ())
    assert resolve(f"{ref}:1@{first}", require_pinned=True).id == found.id
    with pytest.raises(UserError, match="require_pinned=1 refuses a tag"):
        resolve(f"{ref}:1", require_pinned=True)
    # absent here: pulled by digest, with progress; then present, and no network is needed
    client.images.remove(found.id, force=True)
    with pytest.raises(UserError, match="not on this engine"):
        resolve(f"{ref}@{first}", offline=True)
    assert resolve(f"{ref}@{first}").id == found.id
    assert told == [f"pulling {ref}@{first}"]
    assert resolve(f"{ref}@{first}", offline=True).id == found.id
    assert resolve(found.id, require_pinned=True).digest is None
    # the tag moves in the registry only
    second = _variant(client, image, f"{ref}:2", "ENV NEMO_RL_COMMIT=<unknown>")
    client.images.get(f"{ref}:2").tag(ref, "1")
    list(client.images.push(f"{ref}:1", stream=True, decode=True))
    client.images.remove(f"{ref}:1")
    client.images.remove(f"{ref}:2")
    client.images.get(f"{ref}@{first}").tag(ref, "1")
    pinned = resolve(f"{ref}:1@{first}")
    assert (pinned.id, len(pinned.notes)) == (found.id, 1)
    assert second in pinned.notes[0]
    stale = resolve(f"{ref}:1", offline=True)
    assert (stale.id, stale.digest) == (found.id, first)
    moved = resolve(f"{ref}:1")
    assert (moved.digest, moved.nemo_rl_sha) == (second, None)
    assert moved.id != found.id
    assert "moved from" in moved.notes[0]
    # a pin whose commit is not the one inside
    pins = tmp_path / "images.yaml"
    pins.write_text(
        f"schema: 1\nimages:\n  app:\n    reference: {ref}:1\n    digest: {first}\n    nemo_rl: abcdef1234\n"
    )
    with pytest.raises(UserError, match=rf"says NeMo-RL abcdef1234, the image says {sha}"):
        resolve("app", pins=pins)
    for absent in (f"{ref}:9", f"{ref}@sha256:{'1' * 64}"):
        with pytest.raises(UserError, match="manifest unknown"):
            resolve(absent)


def test_the_fingerprint_is_read_without_running_the_image(client: DockerClient, image: str, tmp_path: Path) -> None:
    content = {"uv.lock": "abc", "pyproject.toml": "def"}
    (tmp_path / "Dockerfile").write_text(
        f'FROM {REF}\nCOPY fingerprint {container_image.FINGERPRINT}\nLABEL nemo-rl-e2e.nemo_rl=abcdef1234\nENTRYPOINT ["/bin/false"]\n'
    )
    (tmp_path / "fingerprint").write_text(json.dumps(content))
    client.images.build(path=str(tmp_path), tag="nemo-rl-e2e/fingerprint:1", rm=True)
    found = container_image.resolve_container("nemo-rl-e2e/fingerprint:1", Docker(host=HOST))
    assert json.loads(found.fingerprint or "") == content
    assert (found.digest, found.nemo_rl_sha) == (None, "abcdef1234")


def test_the_thin_layer_builds_on_a_base_and_is_labelled(client: DockerClient, image: str) -> None:
    client.images.build(
        path=str(CONTAINERS),
        dockerfile="Dockerfile",
        buildargs={"BASE": REF, "NEMO_RL_SHA": "abcdef1234"},
        tag="nemo-rl-e2e/thin:1",
        rm=True,
    )
    found = client.images.get("nemo-rl-e2e/thin:1")
    assert found.labels["org.opencontainers.image.base.name"] == REF
    assert container_image.commit_inside(found.attrs["Config"]) == "abcdef1234"


def test_the_ci_image_has_the_same_id_on_every_build(archive: tuple[Path, str], ci_image: Any, tmp_path: Path) -> None:
    assert ci_image.build(tmp_path / "again.tar", REF) == archive[1]
    assert (tmp_path / "again.tar").read_bytes() == archive[0].read_bytes()


@pytest.mark.skipif(os.geteuid() != 0, reason="a private engine needs root")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_engine_that_dies_is_the_environments_fault(
    archive: tuple[Path, str],
    tmp_path_factory: pytest.TempPathFactory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
) -> None:
    monkeypatch.setattr("tasks.runtimes.docker.ENGINE_LOST_S", 3.0)
    home = tmp_path_factory.mktemp("e")
    script = ROOT / ".ci" / "engine.sh"
    run = subprocess.run([script, "start", home], capture_output=True, text=True, check=False)
    if run.returncode:
        lacking(run.stderr)
    host = run.stdout.strip().removeprefix("DOCKER_HOST=")
    try:
        runtime = Docker(archive[1], host=host)
        with runtime.client() as client, archive[0].open("rb") as file:
            client.images.load(file.read())
        pid = runtime.engine_pid()
        assert pid

        def poll() -> None:
            if (tmp_path / "up").exists() and not (tmp_path / "shot").exists():
                (tmp_path / "shot").touch()
                os.kill(pid, number)

        assert go(runtime, job(tmp_path, "touch up; sleep 300"), poll=poll).reason == "engine_lost"
        # also without an engine the job comes to its end: the engine stopped it, or we did by its first process
        assert record(tmp_path)["reason"] == "terminated"
    finally:
        if number == signal.SIGKILL:  # its containerd and shims live on: a new engine takes them over and stops
            subprocess.run([script, "start", home], capture_output=True, check=False)
        subprocess.run([script, "stop", home], check=True)
        shutil.rmtree(home, ignore_errors=True)


@pytest.fixture(scope="session")
def podman(archive: tuple[Path, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Podman]:
    if not shutil.which("podman") or os.geteuid() != 0:
        lacking("podman is not installed, or this is not root")
    home = tmp_path_factory.mktemp("p")
    conf = home / "containers.conf"
    conf.write_text(
        '[containers]\ndefault_ulimits = ["nofile=20000:20000","nproc=10000:10000"]\n'
        '[engine]\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\nruntime = "runc"\n'  # crun refuses mixed cgroups
    )
    host = f"unix://{home}/podman.sock"
    places = ["--root", home / "root", "--runroot", home / "run"]
    with (home / "log").open("wb") as log:
        argv = ["podman", *places, "system", "service", "--time=0", host]
        service = subprocess.Popen(argv, env={**os.environ, "CONTAINERS_CONF": str(conf)}, stdout=log, stderr=log)
    try:
        until((home / "podman.sock").exists)
        runtime = Podman(archive[1], host=host)
        with runtime.client() as client, archive[0].open("rb") as file:
            client.images.load(file.read())
        yield runtime
    finally:
        service.terminate()
        service.wait(15)
        subprocess.run(["umount", home / "root" / "overlay"], check=False, capture_output=True)  # podman leaves it


def test_podman_runs_the_same_job_in_the_same_image(podman: Podman, tmp_path: Path) -> None:
    assert podman.available() is None
    ended = go(podman, job(tmp_path, "touch f; exit 3"))
    assert (ended.rc, ended.reason) == (3, "exited"), ended.detail
    assert record(tmp_path)["rc"] == 3
    assert owners(tmp_path) == {(1234, 4321)}


def test_podman_is_stopped_within_seconds(podman: Podman, tmp_path: Path) -> None:
    stop = threading.Event()

    def poll() -> None:
        if (tmp_path / "up").exists():
            stop.set()

    assert go(podman, job(tmp_path, "touch up; sleep 300"), stop, poll).reason == "stopped"
    assert record(tmp_path)["reason"] == "terminated"
    assert podman.collect_orphans() == []


def test_a_log_that_is_silent_for_a_minute_is_no_end(silent: Callable[[], tuple[Ended, Path]]) -> None:
    ended, folder = silent()
    assert (ended.rc, ended.reason) == (3, "exited"), ended.detail
    assert (folder / "run.log").read_text() == "begin\nend\n"


def test_no_container_of_ours_is_left(client: DockerClient, image: str) -> None:
    ours = client.containers.list(all=True, filters={"label": "nemo-rl-e2e.workspace=integration"})
    assert [c.name for c in ours] == []
