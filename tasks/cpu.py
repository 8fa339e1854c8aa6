"""The CPU environment of rehearsals and proofs: built once by a task, then an isolated environment per attempt.

Protocol: `build(folder, report)` makes three things under `folder`, each in a place named by the digest of what it is
made from, and believes only what its last step has marked as complete:

    venv-<digest>/     pip install --no-deps -r containers/cpu/requirements.txt      (requirements, Python)
    models-<digest>/   containers/cpu/make_models.py                                 (that file, the venv)
    cpu-<digest>/      frozen copies of the stand-ins, links for Ray actors, marker  (all of containers/cpu, Python)

An edit of a stand-in therefore costs a second, not the installation again. A lock makes a second build wait for the
first. `environment(cpu, attempt)` gives one attempt its variables: own HOME, caches, conversion folder and Ray.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.cpu_build import actor_links, install, locked, make_models
from tasks.errors import UserError
from tasks.files import read_json, sha256_json, write_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

SOURCE = Path(__file__).resolve().parent.parent / "containers" / "cpu"
SCHEMA = 1
PYTHONS = ((3, 11), (3, 13))
ALWAYS = ("flash_attn",)  # stand-ins that every rehearsal sees; the others change what Core and Bridge do when present
OPTIONAL = ("vllm", "flashinfer", "nccl")
REFIT_SOCKETS = Path("/tmp")  # noqa: S108 - where NeMo-RL binds them, not a place that we choose
FAKE_CPUS = 8  # actors ask Ray for CPUs by the dozen; they are bookkeeping, not cores
SOCKET_PATH_BYTES = 107  # sun_path of Linux, without the final zero
RAY_SOCKET_SUFFIX_BYTES = 70  # /ray/session_2026-11-30_21-08-12_123456_1234567/sockets/plasma_store and some
# scripts that insist on a stock name find this model under it in the attempt's own model cache
STOCK_NAMES = {"Qwen/Qwen2.5-0.5B": "noisy_qwen2"}
_REVISION = "0" * 39 + "1"


@dataclass(frozen=True, slots=True)
class CpuEnvironment:
    """A finished build.

    `pythonpath`: folders of the stand-ins that are always there, in order; they come after Bridge and Core.
    `standins`: the optional ones by name. `models`: folders by name; `data`: root of swap/ and sums/.
    `env`: variables that are the same in every attempt.
    """

    python: Path
    env: Mapping[str, str]
    pythonpath: tuple[str, ...]
    standins: Mapping[str, str]
    models: Mapping[str, Path]
    data: Path
    digest: str


@dataclass(frozen=True, slots=True)
class AttemptEnvironment:
    """What one attempt adds: variables (without PYTHONPATH), stand-ins for PYTHONPATH, a folder to `release`."""

    env: Mapping[str, str]
    pythonpath: tuple[str, ...]
    temporary: Path
    python: Path = field(compare=False)


def build(
    folder: Path, report: Callable[[str], None], *, source: Path = SOURCE, python: Path | None = None
) -> CpuEnvironment:
    """Return the environment below `folder`, making what is missing; `report` gets one line per step of progress.

    Raises UserError where the interpreter cannot be used or a step fails; what was made before it is kept, and what was
    in the making is made anew next time.
    """
    folder = folder.resolve()
    python = python or _interpreter()
    _check_version(python)
    if (made := ready(folder, source=source, python=python)) is not None:
        return made
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / "lock", report) as lock:
        if (made := ready(folder, source=source, python=python)) is not None:
            return made
        venv = folder / f"venv-{_venv_digest(source, python)[:16]}"
        install(venv, source / "requirements.txt", python, report, lock)
        models = folder / f"models-{_models_digest(source, python)[:16]}"
        make_models(models, source / "make_models.py", venv / "bin" / "python", report, lock)
        _freeze(_place(folder, source, python), source, venv, models)
        report("CPU environment: ready")
    made = ready(folder, source=source, python=python)
    if made is None:
        raise UserError(f"{source} changed while the CPU environment was built from it; run the command again")
    return made


def linked(folder: Path, report: Callable[[str], None]) -> CpuEnvironment:
    """Return `build`'s environment; `venv` below `folder` leads to it, for python=build/cpu/venv/bin/python."""
    built, link = build(folder, report), folder / "venv"
    venv = built.python.parent.parent
    if not link.exists() or link.resolve() != venv.resolve():
        link.unlink(missing_ok=True)
        link.symlink_to(venv.name)
    return built


def ready(folder: Path, *, source: Path = SOURCE, python: Path | None = None) -> CpuEnvironment | None:
    """Return the finished environment below `folder` for the present `source`, or None; builds nothing, a few ms."""
    folder = folder.resolve()
    python = python or _interpreter()
    place = _place(folder, source, python)
    marker = read_json(place / "complete.json")
    if not isinstance(marker, dict) or marker.get("schema") != SCHEMA:
        return None
    venv, models = Path(marker["venv"]), Path(marker["models"])
    if not (venv / "complete.json").exists() or not (models / "complete.json").exists():
        return None
    shown = place / "standins"
    return CpuEnvironment(
        python=venv / "bin" / "python",
        env={
            **constant(),
            "PATH": os.pathsep.join([str(place / "bin"), str(venv / "bin"), os.environ.get("PATH", os.defpath)]),
            "NEMO_RL_VENV_DIR": str(place / "ray_venvs"),
        },
        pythonpath=(str(place / "shim"), *(str(shown / name) for name in ALWAYS)),
        standins={name: str(shown / name) for name in OPTIONAL},
        models={path.name: path for path in sorted((models / "models").iterdir())},
        data=models / "data",
        digest=digest(source, python),
    )


def digest(source: Path = SOURCE, python: Path | None = None) -> str:
    """Return the hex SHA-256 of every file of `source` (name, content, exec bit) and the version of `python`.

    Not of what measures in the environment, proof/: a proof has its digest among its own inputs.
    """
    return sha256_json({"schema": SCHEMA, "files": contents(source), "python": _version(python or _interpreter())})


def contents(source: Path = SOURCE) -> dict[str, list[str | bool]]:
    """Return name -> [hex SHA-256, exec bit] of every file of `source`."""
    return {
        str(path.relative_to(source)): [hashlib.sha256(path.read_bytes()).hexdigest(), os.access(path, os.X_OK)]
        for path in _sources(source)
    }


def environment(
    cpu: CpuEnvironment,
    attempt: Path,
    *,
    gpus: int,
    standins: Iterable[str] = (),
    cuda: bool = True,
    seen: str = "",
    joins: bool = False,
) -> AttemptEnvironment:
    """Return the variables of one attempt with `gpus` fake GPUs a node, and make the folders that they name.

    Everything that a run leaves behind lies in `attempt`, but for a short folder for Ray's sockets (a path of at most
    107 bytes) whose name follows from `attempt`; give it back with `release`. `cuda=False` is for imports and unit
    suites, which want torch as it is. `seen`: the attempt's path in a container, whose /tmp is its own. `joins`: the
    run joins a Ray cluster that was started for it. Raises UserError for an unknown stand-in or too deep a temporary
    folder.
    """
    unknown = sorted(set(standins) - set(cpu.standins))
    if unknown:
        raise UserError(f"unknown stand-in {unknown[0]!r}; there are: {', '.join(sorted(cpu.standins))}")
    attempt = attempt.resolve()
    place = attempt / "cpu"
    inside = f"{seen}/cpu" if seen else str(place)
    tag, temporary = _tag(attempt), Path("/tmp") if seen else _temporary(attempt)  # noqa: S108
    homes = {"HOME": "home", "HF_HOME": "hf", "NRL_MEGATRON_CHECKPOINT_DIR": "converted"}
    for path in (*(place / name for name in homes.values()), temporary):
        path.mkdir(parents=True, exist_ok=True)
    _stock_models(place / "hf" / "hub", cpu.models)
    chosen = [name for name in OPTIONAL if name in standins]
    for name in chosen:
        _own_copy(Path(cpu.standins[name]), place / "standins" / name)
    # The first entries are the fake GPUs, because nvml.py indexes this list by LOCAL_RANK; the last one only makes the
    # tag under which init_ray knows a cluster as its own distinct (virtual_cluster.py, surprise: it joins others).
    visible = ",".join([*map(str, range(gpus)), str(tag)])
    own_tag = "nrl_tag_" + "_".join(sorted(visible.split(",")))
    env = {
        **cpu.env,
        **{name: f"{inside}/{folder}" for name, folder in homes.items()},
        "CUDA_VISIBLE_DEVICES": visible,
        "E2E_CPU": "run" if cuda else "import",
        "E2E_CPU_TAG": str(tag),
        # "local" makes ray.init(address="auto") start a cluster instead of searching the machine for one
        **({} if joins else {"RAY_ADDRESS": "local"}),
        "RAY_OVERRIDE_RESOURCES": json.dumps({"CPU": FAKE_CPUS, "GPU": gpus, own_tag: 1}, separators=(",", ":")),
        "RAY_TMPDIR": str(temporary),
        "TMPDIR": str(temporary),
    }
    pythonpath = (*cpu.pythonpath, *(f"{inside}/standins/{name}" for name in chosen))
    return AttemptEnvironment(env=env, pythonpath=pythonpath, temporary=temporary, python=cpu.python)


def compiled(cpu: CpuEnvironment) -> Path:
    """Return where byte code of the packages is kept: with the packages' digest, so that stand-ins may change."""
    venv = cpu.python.parent.parent
    return venv.parent / f"bytecode-{venv.name.removeprefix('venv-')}"


def release(attempt: Path) -> None:
    """Remove what `attempt`, finished or dead, left outside its own folder: its temporary folder, its refit's sockets.

    NeMo-RL's refit meets at /tmp/<UUID>.sock whatever TMPDIR says, and the UUID (nvml.py) holds the attempt's tag.
    """
    attempt = attempt.resolve()
    shutil.rmtree(_temporary(attempt), ignore_errors=True)
    for path in REFIT_SOCKETS.glob(f"GPU-e2e-{_tag(attempt)}-*.sock"):
        if path.is_socket():
            path.unlink(missing_ok=True)


def substitute(texts: Iterable[str], cpu: CpuEnvironment, model: str, **trees: Path) -> tuple[str, ...]:
    """Replace {model} (folder of `model`), {models}, {data} and the names in `trees`, e.g. {nemo_rl}, in `texts`.

    Other braces stay as they are: they belong to Hydra. Raises UserError where the model is not among the tiny ones.
    """
    if model not in cpu.models:
        raise UserError(f"unknown tiny model {model!r}; there are: {', '.join(cpu.models)}")
    values = {"model": cpu.models[model], "models": cpu.models[model].parent, "data": cpu.data, **trees}
    done = []
    for text in texts:
        for name, value in values.items():
            text = text.replace(f"{{{name}}}", str(value))  # noqa: PLW2901
        done.append(text)
    return tuple(done)


def constant() -> dict[str, str]:
    """Return the variables that every attempt shares; each says why it is there."""
    return {
        "NEMO_RL_PY_EXECUTABLES_SYSTEM": "1",  # one interpreter for driver and workers, no uv environments
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "WANDB_MODE": "disabled",
        "RAY_DEDUP_LOGS": "0",  # a folded line cannot be searched for
        "RAY_memory_monitor_refresh_ms": "0",  # several actors on a small machine are not a leak
        "RAY_USAGE_STATS_ENABLED": "0",
        # No FAKE_CPUS idle workers at the start: ray.init gives the first node 30 s, and a loaded machine needs them
        "RAY_prestart_worker_first_driver": "0",
        "RAY_enable_worker_prestart": "0",
        "RAY_worker_niceness": "0",  # Ray's 15 starves the workers, which do all the work, on a machine with other load
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TORCH_CUDA_ARCH_LIST": "9.0",  # asked at import time, no device to ask
        "TORCHDYNAMO_DISABLE": "1",  # Core's jit_fuser is torch.compile, whose inductor would look for CUDA
        "TRITON_INTERPRET": "1",  # importing a kernel must not look for a driver
        "LANG": "C.UTF-8",
    }


def _interpreter() -> Path:
    """Return the interpreter that the running environment was made from."""
    return Path(getattr(sys, "_base_executable", sys.executable)).resolve()


def _version(python: Path) -> str:
    """Return `sys.version` of `python`, asked once per process for each state of the file."""
    if python == _interpreter():
        return sys.version
    try:
        return _asked_version(python, python.stat().st_mtime_ns)
    except OSError as error:
        raise UserError(f"{python} is no interpreter: {error.strerror}") from error


@functools.lru_cache
def _asked_version(python: Path, mtime_ns: int) -> str:  # noqa: ARG001 - part of the key
    command = [str(python), "-c", "import sys; print(sys.version)"]
    asked = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    if asked.returncode:
        raise UserError(f"{python} does not run: {asked.stderr.strip()[-300:]}")
    return asked.stdout.rstrip("\n")


def _check_version(python: Path) -> None:
    version = _version(python)
    major, minor = (int(part) for part in version.split(".")[:2])
    if not PYTHONS[0] <= (major, minor) <= PYTHONS[1]:
        raise UserError(f"{python} is Python {major}.{minor}; the CPU environment needs 3.11 to 3.13 (tried: 3.11)")


def _sources(source: Path) -> list[Path]:
    found = sorted(p for p in source.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    if not found:
        raise UserError(f"{source} holds no CPU environment; is this checkout complete?")
    return found


def _venv_digest(source: Path, python: Path) -> str:
    pins = [line for line in (source / "requirements.txt").read_text().splitlines() if line and line[0] != "#"]
    return sha256_json({"schema": SCHEMA, "pins": pins, "python": _version(python), "path": str(python)})


def _models_digest(source: Path, python: Path) -> str:
    recipe = hashlib.sha256((source / "make_models.py").read_bytes()).hexdigest()
    return sha256_json({"schema": SCHEMA, "recipe": recipe, "venv": _venv_digest(source, python)})


def _place(folder: Path, source: Path, python: Path) -> Path:
    return folder / f"cpu-{digest(source, python)[:16]}"


def _freeze(place: Path, source: Path, venv: Path, models: Path) -> None:
    """Copy the stand-ins of `source` to `place`, beside it first, so that a half copy never has the name."""
    making = place.with_name(f"{place.name}.new")
    shutil.rmtree(making, ignore_errors=True)
    shutil.rmtree(place, ignore_errors=True)
    ignore = shutil.ignore_patterns("__pycache__")
    for name in ("shim", "standins", "bin"):
        shutil.copytree(source / name, making / name, ignore=ignore)
    actor_links(making / "ray_venvs", venv)
    write_json(making / "complete.json", {"schema": SCHEMA, "venv": str(venv), "models": str(models)})
    making.rename(place)


def _own_copy(standin: Path, target: Path) -> None:
    """Copy a stand-in into the attempt: NeMo-RL rewrites files of vLLM in place (vllm/patches.py)."""
    shutil.copytree(standin, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))


def _stock_models(hub: Path, models: Mapping[str, Path]) -> None:
    """Lay out a Hugging Face cache in which stock names lead to tiny models."""
    for name, model in STOCK_NAMES.items():
        if model not in models:
            continue
        entry = hub / f"models--{name.replace('/', '--')}"
        snapshot = entry / "snapshots" / _REVISION
        if not snapshot.is_symlink():
            snapshot.parent.mkdir(parents=True, exist_ok=True)
            snapshot.symlink_to(models[model])
        (entry / "refs").mkdir(exist_ok=True)
        (entry / "refs" / "main").write_text(_REVISION)


def _tag(attempt: Path) -> int:
    """Return a number that two attempts do not share, too large for a device number: 100000 to 999999."""
    return 100_000 + int(hashlib.sha256(str(attempt).encode()).hexdigest()[:12], 16) % 900_000


def _temporary(attempt: Path) -> Path:
    """Return the short folder of `attempt` for Ray's sockets."""
    root = Path(tempfile.gettempdir())
    path = root / f"e2e-{os.getuid()}-{hashlib.sha256(str(attempt).encode()).hexdigest()[:10]}"
    if len(os.fsencode(path)) + RAY_SOCKET_SUFFIX_BYTES > SOCKET_PATH_BYTES:
        raise UserError(
            f"{root} is too deep for Ray's sockets ({SOCKET_PATH_BYTES} bytes); set TMPDIR to a short folder"
        )
    return path
