"""What one attempt asks a runtime for: mounts, environment and what is given back, without starting anything."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pytest

from tasks import attempts, cpu, cpu_image, inflight
from tasks.attempts import Command, Place, Tree
from tasks.cpu import CpuEnvironment
from tasks.runtimes.container import TARGETS
from tasks.runtimes.job import Ended, Job

if TYPE_CHECKING:
    from collections.abc import Mapping


class Captured:
    """A runtime that keeps the job and starts nothing."""

    def __init__(self, name: str) -> None:
        self.name, self.jobs = name, list[Job]()

    def target(self, kind: str, host: Path) -> str:
        return str(host) if self.name == "local" else TARGETS[kind]

    def run(self, job: Job, **_: object) -> Ended:
        self.jobs.append(job)
        return Ended(0, "exited", "")


@pytest.fixture
def built(tmp_path: Path) -> CpuEnvironment:
    home = tmp_path / "cpu"
    for name in ("venv/bin", "venv/lib", "models/models/tiny", "models/data", "env/bin", "env/ray_venvs", "env/shim"):
        (home / name).mkdir(parents=True)
    base = tmp_path / "base"
    (base / "bin").mkdir(parents=True)
    (base / "lib").mkdir()
    (base / "bin" / "python3").touch()
    (home / "venv/bin/python").symlink_to(base / "bin" / "python3")
    return CpuEnvironment(
        python=home / "venv/bin/python",
        env={"PATH": f"{home}/env/bin:{home}/venv/bin:/host/only", "NEMO_RL_VENV_DIR": f"{home}/env/ray_venvs"},
        pythonpath=(f"{home}/env/shim",),
        standins={},
        models={"tiny": home / "models/models/tiny"},
        data=home / "models/data",
        digest="d" * 64,
    )


def asked(
    runtime: str | Captured, tmp_path: Path, built: CpuEnvironment | None, monkeypatch: pytest.MonkeyPatch,
    size: Mapping[str, int] = MappingProxyType({}), **keys: Any,
) -> tuple[Job, dict[str, list[str]]]:  # fmt: skip
    monkeypatch.setattr(attempts.snapshot, "work_copy", lambda _, target: target.mkdir())
    monkeypatch.setattr(cpu.tempfile, "gettempdir", lambda: "/tmp")
    trees = {}
    for kind in ("bridge", "mcore", "nemo_rl"):
        top = tmp_path / "snapshots" / kind
        (top / "tree").mkdir(parents=True)
        (top / "manifest.json").write_text("{}")
        trees[kind] = Tree(kind, top / "tree", kind, {})
    folder = tmp_path / "ws" / "attempts" / "case" / "1"
    folder.mkdir(parents=True)
    captured = Captured(runtime) if isinstance(runtime, str) else runtime
    python = str(built.python) if built else "python3"
    place = Place(captured, python, {"id": "i"}, built, rehearsal=built is not None, **keys)
    attempts.perform(
        place, trees, folder, lambda paths: Command(("true",), paths["nemo_rl"], 9.0, **size),
        stop=threading.Event(), poll=lambda: None, labels={},
    )  # fmt: skip
    return captured.jobs[0], json.loads((folder / "spec.json").read_text())


def test_a_contained_rehearsal_has_its_environment_in_the_image_and_its_byte_code_kept_here(
    tmp_path: Path, built: CpuEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "cpu/bytecode-1/opt/x/lib"
    job, spec = asked("docker", tmp_path, built, monkeypatch, libraries={Path("/opt/x/lib"): kept})
    mounts = {m.target: m for m in job.mounts}
    assert not [target for target in mounts if target.startswith(str(tmp_path / "cpu")) and "bytecode" not in target]
    assert mounts["/opt/Megatron-Bridge"].read_only
    assert job.env["PYTHONPATH"].split(":")[:3] == ["/opt/Megatron-Bridge/src", "/opt/Megatron-LM", "/opt/nemo-rl"]
    assert job.env["HF_HOME"] == "/e2e/attempt/cpu/hf"
    assert job.gpus == 0
    compiled = {m.source for m in mounts.values() if not m.read_only and m.target == str(m.source)}
    assert compiled == {*(tmp_path / "snapshots" / kind / "bytecode" for kind in ("bridge", "mcore", "nemo_rl")), kept}
    assert sorted(spec["give_back"]) == sorted(["/e2e/attempt", *map(str, compiled)])
    prefix = tmp_path / "ws/attempts/case/1/work/pycache"
    assert (prefix / "opt/Megatron-Bridge").readlink() == tmp_path / "snapshots/bridge/bytecode"
    assert (prefix / "opt/x/lib").readlink() == kept
    assert kept.is_dir(), "else the engine makes it, as root"


def test_local_attempts_and_real_images_get_no_mount_of_the_cpu_environment(
    tmp_path: Path, built: CpuEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, runtime, environment in (("a", "local", built), ("b", "docker", None)):
        job, spec = asked(runtime, tmp_path / name, environment, monkeypatch)
        assert len(job.mounts) == 5
        assert spec["give_back"] == [str(tmp_path / "a/ws/attempts/case/1") if environment else "/e2e/attempt"]


def test_a_rehearsal_over_nodes_joins_the_cluster_that_ray_sub_starts_with_its_share_of_gpus_on_each(
    tmp_path: Path, built: CpuEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    several, _ = asked("slurm", tmp_path / "a", built, monkeypatch, {"gpus": 4, "nodes": 2})
    alone, _ = asked("slurm", tmp_path / "b", built, monkeypatch, {"gpus": 4})
    assert ("RAY_ADDRESS" in several.env, alone.env["RAY_ADDRESS"]) == (False, "local")
    assert [json.loads(j.env["RAY_OVERRIDE_RESOURCES"])["GPU"] for j in (several, alone)] == [2, 4]
    assert [j.gpus for j in (several, alone)] == [4, 0], "ray.sub claims what a node offers; one node needs no GPU"
    ray = {m.source for m in several.mounts if m.target == "/usr/local/bin/ray"}
    assert ray == {built.python.parent / "ray"}, "ray.sub calls it before the agent has set PATH"
    assert not [m for m in alone.mounts if m.target.endswith("/ray")]


@pytest.mark.parametrize(
    ("state", "kept"), [("submitted", True), ("submitting", True), ("unread", True), ("over", False), (None, False)]
)
def test_a_job_that_goes_on_keeps_its_attempt_and_one_that_was_not_accepted_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str | None, kept: bool
) -> None:
    class Refusing(Captured):
        def run(self, job: Job, **_: object) -> Ended:
            if state:
                inflight.note(job.folder, state=state)
            if state == "unread":
                (job.folder / inflight.FILE).write_text("{")
            return Ended(None, "detached", "in flight")

    with pytest.raises(inflight.InFlightError):
        asked(Refusing("slurm"), tmp_path, None, monkeypatch)
    assert (tmp_path / "ws" / "attempts" / "case" / "1").exists() is kept


def test_under_slurm_the_environment_is_mounted_and_both_digests_name_the_place(
    tmp_path: Path, built: CpuEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Place(
        Captured("local"), str(built.python), {"ref": "CPU environment", "id": "environment"}, built, rehearsal=True
    )
    cluster = Place(Captured("slurm"), "python3", {"ref": "x.sqsh", "id": "image"})
    place = cpu_image.mounted(here, cluster)
    assert (place.image["id"], place.image["cpu"]) == ("image", "environment")
    assert (place.runtime, place.rehearsal) == (cluster.runtime, True)
    assert place.cpu
    assert "/host/only" not in place.cpu.env["PATH"]
    job, _ = asked(Captured("slurm"), tmp_path, place.cpu, monkeypatch, mounted=place.mounted)
    mounts = {m.target: m for m in job.mounts}
    for name in ("cpu/venv", "cpu/models", "cpu/env", "base"):
        mounted = mounts[str(tmp_path / name)]
        assert (mounted.source, mounted.read_only) == (tmp_path / name, True)
