"""One execution of anything: a folder of its own, the trees it runs in, the agent under a runtime, what it left behind.

Probe, unit suites and cases all go through `perform`; they differ in their command and in how they are judged.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks import bytecode, cpu, environment, inflight, local_copy, snapshot
from tasks.files import read_json, sha256_json, write_json
from tasks.runtimes.job import Job, Mount
from tasks.settings import ROOT

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Mapping, Sequence

    from tasks.cpu import CpuEnvironment
    from tasks.runtimes.job import Runtime

AGENT = ROOT / "containers"
TERM_GRACE_S = 10.0
SHM_BYTES = 64 << 30  # NeMo-RL's README and CI both start the image with --shm-size=64g
NOT_EVIDENCE = ("work", "home", "cpu")  # trees and caches an attempt ran in
CLUSTERS = ("slurm", inflight.FILE)  # written by the cluster in its own time; no verdict rests on it
WRITABLE = ("mcore", "nemo_rl")  # Core compiles its helpers in place, scripts write below NeMo-RL


@dataclass(frozen=True, slots=True)
class Tree:
    """A frozen tree of one kind: `path` on the host, `digest` of the whole, `components` of its parts."""

    kind: str
    path: Path
    digest: str
    components: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Place:
    """Where attempts run: the runtime, the interpreter as it sees it, the image, the CPU stand-ins if it has them.

    `libraries`: folders of modules in the container -> where their byte code is kept here. `mounted`: folders that it
    sees at their own paths, to read only.
    """

    runtime: Runtime
    interpreter: str
    image: Mapping[str, Any]
    cpu: CpuEnvironment | None = None
    rehearsal: bool = False
    libraries: Mapping[Path, Path] = field(default_factory=dict)
    mounted: tuple[Path, ...] = ()

    @property
    def local_copy(self) -> str:
        """Return the folder on a node's own storage that Core is copied to, "" where it stays (tasks/local_copy.py)."""
        return str(getattr(self.runtime, "local_copy", ""))

    def root(self, kind: str, attempt: Path, trees: Mapping[str, Tree]) -> str:
        """Return where the tree of `kind` is for the run: the attempt's work copy, or the snapshot itself."""
        host = attempt / "work" / kind if kind in WRITABLE else trees[kind].path
        return self.runtime.target(kind, host)


@dataclass(frozen=True, slots=True)
class Command:
    """What to run: `argv` (paths as the run sees them), in the tree `cwd`, and its limits in seconds.

    `gpus` are real ones, or pretended ones where the place has stand-ins; `standins` and `cuda` are for the latter.
    """

    argv: tuple[str, ...]
    cwd: str
    timeout_s: float
    env: Mapping[str, str] = field(default_factory=dict)
    gpus: int = 0
    done_pattern: str | None = None
    grace_s: float = 60.0
    silence_s: float | None = None
    network: bool = False
    standins: tuple[str, ...] = ()
    cuda: bool = True
    nodes: int = 1


@dataclass(frozen=True, slots=True)
class Attempt:
    """A finished execution: its folder, exit.json (None if the agent never wrote it) and the engine's word."""

    id: str
    folder: Path
    exit: Mapping[str, Any] | None
    engine_reason: str
    engine_detail: str


def new_folder(home: Path, name: str) -> Path:
    """Make and return a fresh attempt folder; the name sorts by time and is never used twice."""
    while True:
        folder = home / name / f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(2)}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder


def perform(
    place: Place,
    trees: Mapping[str, Tree],
    folder: Path,
    command: Callable[[Mapping[str, str]], Command],
    *,
    stop: threading.Event,
    poll: Callable[[], None],
    labels: Mapping[str, str],
) -> Attempt:
    """Run one command in `folder` and return what happened; never raises for what the command does.

    `command` gets the run-time paths of "bridge", "mcore", "nemo_rl", "attempt" and "agent". Raises UserError when
    trees cannot be copied or the engine refuses to start, InFlightError when a cluster's job goes on without us. A
    folder whose job is in flight is not prepared again.
    """
    attached = (folder / inflight.FILE).exists()
    if not attached:
        _make(place, trees, folder)
    paths = {kind: place.root(kind, folder, trees) for kind in ("bridge", *WRITABLE)}
    paths["attempt"] = place.runtime.target("attempt", folder)
    paths["agent"] = place.runtime.target("agent", AGENT)
    run = _Run(place, trees, folder, paths, command(paths))
    if not attached:
        bytecode.share(folder / "work" / "pycache", run.compiled)
    # Unix sockets of Ray end at 107 bytes: its folder must be short, and it must be ours alone
    ray = Path(tempfile.mkdtemp(prefix="e2e-ray-")) if run.local and run.pretended is None else None
    env, hidden = run.environment(ray), environment.secret_names(os.environ)
    if not attached:
        write_json(folder / "spec.json", run.spec(env, hidden))
    try:
        ended = place.runtime.run(run.job(env, hidden, labels), stop=stop, poll=poll)
    finally:
        if ray is not None:
            shutil.rmtree(ray, ignore_errors=True)
        if run.pretended is not None:
            cpu.release(folder)
    if ended.reason == "detached":
        if not inflight.is_open(folder):  # it was not accepted: an attempt that never was
            shutil.rmtree(folder)
        raise inflight.InFlightError(ended.detail)
    return Attempt(folder.name, folder, read_json(folder / "exit.json"), ended.reason, ended.detail)


def _make(place: Place, trees: Mapping[str, Tree], folder: Path) -> None:
    """Make what a fresh attempt runs in: its own folders, and work copies of the trees that a run may write to."""
    for name in ("home", "origins", "work", "logs"):
        (folder / name).mkdir(exist_ok=True)
    for kind in WRITABLE:
        if kind == "mcore" and place.local_copy:
            local_copy.prepare(folder, trees[kind])
        else:
            snapshot.work_copy(trees[kind].path, folder / "work" / kind)


class _Run:
    """One execution on its way to a runtime: what its spec (for the agent) and its job (for the engine) share.

    `paths` are those that the run sees. `compiled`: folder of sources as the run sees it -> where its byte code is
    kept. `pretended`: what the CPU environment adds, None on real GPUs.
    """

    def __init__(
        self, place: Place, trees: Mapping[str, Tree], folder: Path, paths: Mapping[str, str], what: Command
    ) -> None:
        self.place, self.trees, self.folder, self.paths, self.what = place, trees, folder, paths, what
        self.local = place.runtime.name == "local"
        # a container finds what rehearsals compiled at its own path; an image's interpreter is not seen from here
        self.compiled = _byte_code(place, trees, folder, paths) if self.local or place.cpu else {}
        self.pretended = None
        if place.cpu:
            self.pretended = cpu.environment(
                place.cpu, folder, gpus=max(1, what.gpus // what.nodes), standins=what.standins, cuda=what.cuda,
                seen="" if self.local else paths["attempt"], joins=what.nodes > 1,
            )  # fmt: skip

    def environment(self, ray: Path | None) -> dict[str, str]:
        """Return the complete environment of the command; `ray` is its folder for Ray, if it has one of its own."""
        paths, pretended = self.paths, self.pretended
        env = environment.compose(
            user=environment.passed(os.environ),
            case={**({} if pretended is None else without_ours(pretended.env)), **self.what.env},
            pythonpath=(
                f"{paths['bridge']}/src", paths["mcore"], paths["nemo_rl"], f"{paths['agent']}/origins",
                *(pretended.pythonpath if pretended else ()),
            ),
            attempt=paths["attempt"],
            interpreter=self.place.interpreter,
            local=self.local,
            ray_folder=ray,
        )  # fmt: skip
        if self.place.local_copy and not self.compiled:
            env["PYTHONPYCACHEPREFIX"] = f"{local_copy.root(self.place.local_copy, self.folder)}/pycache"
        return env

    def spec(self, env: Mapping[str, str], hidden: Sequence[str]) -> dict[str, Any]:
        """Return spec.json; secrets are in it by name (`hidden`) alone."""
        what, attempt = self.what, self.paths["attempt"]
        kept = [] if self.local else [os.fspath(path) for path in self.compiled.values()]
        return {
            "schema": 1, "id": self.folder.name, "argv": list(what.argv), "cwd": what.cwd, "env": env,
            "secrets": list(hidden), "log": f"{attempt}/run.log", "exit": f"{attempt}/exit.json",
            "timeout_s": what.timeout_s, "done_pattern": what.done_pattern, "grace_s": what.grace_s,
            "term_grace_s": TERM_GRACE_S, "silence_s": what.silence_s, "owner": [os.getuid(), os.getgid()],
            "give_back": [attempt, *kept],
        }  # fmt: skip

    def job(self, env: Mapping[str, str], hidden: tuple[str, ...], labels: Mapping[str, str]) -> Job:
        """Return what the engine is asked for: the agent on spec.json, the mounts, the GPUs."""
        place, what, paths = self.place, self.what, self.paths
        return Job(
            id=self.folder.name,
            argv=(f"{paths['agent']}/agent.py", f"{paths['attempt']}/spec.json"),
            interpreter=place.interpreter,
            mounts=(
                *_mounts(place, self.trees, self.folder, paths),
                *_host_folders(environment.passed(os.environ)),
                *(Mount(p, os.fspath(p), read_only=True) for p in place.mounted),
                *_ray(place, what),
                # byte code at its own path, where the links in the attempt lead, so that only the first run compiles
                *(Mount(p, os.fspath(p), read_only=False) for p in sorted({*self.compiled.values()}) if not self.local),
            ),
            env=env,
            secrets=hidden,
            gpus=0 if place.cpu and what.nodes == 1 else what.gpus,  # ray.sub counts what a node offers
            timeout_s=what.timeout_s + what.grace_s + 3 * TERM_GRACE_S,
            shm_bytes=SHM_BYTES,
            labels=labels,
            network=what.network,
            folder=self.folder,
            nodes=what.nodes,
            local_copy=local_copy.arguments(paths["attempt"], paths["mcore"]) if place.local_copy else (),
        )


def without_ours(pretended: Mapping[str, str]) -> dict[str, str]:
    """Return the CPU environment's variables but for those that every attempt has a private place for anyway."""
    return {k: v for k, v in pretended.items() if k not in ("HOME", "NRL_MEGATRON_CHECKPOINT_DIR")}


def _byte_code(place: Place, trees: Mapping[str, Tree], folder: Path, paths: Mapping[str, str]) -> dict[Path, Path]:
    """Return folder of sources, as the run sees it -> where its byte code is kept, for what nobody edits."""
    found = dict(place.libraries)
    for kind, tree in trees.items():
        kept = bytecode.beside(tree.path)
        if kept is not None:
            top, home = kept
            found[Path(paths[kind])] = home / tree.path.relative_to(top)
    if place.runtime.name != "local" and not place.mounted:
        return found
    if place.cpu is None:
        home = folder.parents[2] / f"{bytecode.NAME}-{sha256_json(place.image)[:16]}"
        return found | bytecode.of_interpreter(Path(place.interpreter), home)
    packages = bytecode.of_interpreter(place.cpu.python, cpu.compiled(place.cpu))
    if place.mounted:  # a standard library that is the image's own is not the one seen from here
        packages = {lib: kept for lib, kept in packages.items() if lib.parent in place.mounted}
    return found | packages


def _mounts(place: Place, trees: Mapping[str, Tree], folder: Path, paths: Mapping[str, str]) -> Sequence[Mount]:
    hosts = {"bridge": trees["bridge"].path, "attempt": folder, "agent": AGENT}
    hosts |= {kind: folder / "work" / kind for kind in WRITABLE}
    if place.local_copy:
        hosts["mcore"], paths = trees["mcore"].path, {**paths, "mcore": local_copy.SOURCE}
    frozen = {"bridge", "agent"} | ({"mcore"} if place.local_copy else set())
    return [Mount(source=host, target=paths[kind], read_only=kind in frozen) for kind, host in hosts.items()]


def _ray(place: Place, what: Command) -> list[Mount]:
    """Put the CPU environment's `ray` on the image's PATH where ray.sub starts Ray before the agent: several nodes."""
    if place.cpu is None or what.nodes == 1:
        return []
    return [Mount(place.cpu.python.parent / "ray", "/usr/local/bin/ray", read_only=True)]


def _host_folders(user: Mapping[str, str]) -> list[Mount]:
    """Mount the user's caches where they are; nested ones once."""
    found = sorted({Path(user[n]) for n in environment.HOST_FOLDERS if n in user and Path(user[n]).is_dir()})
    outer = [p for p in found if not any(q != p and q in p.parents for q in found)]
    return [Mount(source=p, target=os.fspath(p), read_only=False) for p in outer]


def evidence_files(folder: Path, workspace: Path) -> dict[str, str]:
    """Return path below the workspace -> SHA-256 of every file of an attempt that a verdict may rest on."""
    from tasks.files import sha256_file

    found = {}
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder).parts[0]
        if path.is_file() and not path.is_symlink() and inside not in (*NOT_EVIDENCE, *CLUSTERS):
            found[os.fspath(path.relative_to(workspace))] = sha256_file(path)
    return found


def clear_work(folder: Path) -> None:
    """Remove the trees and caches an attempt ran in; evidence lies beside them and stays."""
    for name in NOT_EVIDENCE:
        shutil.rmtree(folder / name, ignore_errors=True)
