"""The CPU environment of the rehearsals as a container image whose ID follows from its content.

Protocol: `place(settings, ...)` is where a rehearsal runs when the user named runtime=docker or podman. Three layers,
lowest first: a Debian from the archive (kept, since the archive moves on), the packages, then stand-ins and models:

    /opt/e2e-cpu/{venv,models}     what tasks/cpu.py built on this machine, without byte code, times and its paths
    /opt/e2e-cpu/{shim,bin,ray_venvs,standins}

The label says which stand-ins and recipe are inside. An image of that kind that the user pins (`image=REPO@sha256:...`
on the command line) is used as it is, or refused where its label is not this checkout's: then nothing is built at all.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks import bytecode, container_image, cpu, image_pins, images
from tasks.attempts import Place
from tasks.cpu_build import ACTORS, locked
from tasks.errors import UserError
from tasks.files import read_json, sha256_file, sha256_json, write_json
from tasks.runtimes import choose
from tasks.settings import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from docker import DockerClient

    from tasks.cpu import CpuEnvironment
    from tasks.runtimes.docker import Docker
    from tasks.settings import Settings

PATH = "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"  # a container's own
RECIPE = ROOT / "containers" / "ci_image.py"
TOP = "/opt/e2e-cpu"
REPOSITORY = "nemo-rl-e2e/cpu"
LAYOUT = 1  # count up when what the layers hold changes: pinned images of another layout are refused
LIBRARIES = (f"{TOP}/venv/lib", "/usr/lib/python3.11")
LABEL, MODELS_LABEL = "nemo-rl-e2e.cpu", "nemo-rl-e2e.cpu.models"
PYTHON = (3, 11)  # Debian 12's; compiled packages are made for one minor version
# Core compiles its dataset helpers at the start of a run (make, g++, python3-config); scripts ask git and ps
PACKAGES = "python3,python3-dev,git,make,g++,procps,ca-certificates"
LOAD_S = 1800  # the engine unpacks 3 GB before it says a word
FOLDERS = ("e2e/attempt", "e2e/agent", "opt/Megatron-Bridge", "opt/Megatron-LM", "opt/nemo-rl", "usr/local/bin")
_BIN = re.compile(r"^(?:\.\./)+bin/[^,]*,.*$", re.MULTILINE)


def place(settings: Settings, workspace: str, report: Callable[[str], None]) -> Place:
    """Return the place of rehearsals in containers; the image is built and loaded where it is not there yet.

    UserError as `images.resolve`, or for a pinned CPU image that was made from other stand-ins.
    """
    from tasks.runtimes.docker import Docker

    runtime = choose(settings.runtime, workspace=workspace)
    if not isinstance(runtime, Docker):
        raise UserError(f"runtime={settings.runtime}: rehearsals run with runtime=local, docker or podman")
    found = _pinned(settings, runtime, report) if settings.origins.get("image") == "the command line" else None
    image, models = found or ensure(settings.build / "cpu", runtime, report)
    runtime.use(image.id)
    inside = environment(models)
    kept = settings.build / "cpu" / f"{bytecode.NAME}-{image.id.removeprefix('sha256:')[:16]}"
    libraries = {Path(lib): kept / lib[1:] for lib in LIBRARIES}
    return Place(runtime, os.fspath(inside.python), image.as_dict(), inside, rehearsal=True, libraries=libraries)


def mounted(built: Place, place: Place) -> Place:
    """Return the place of rehearsals whose containers are `place`'s and see the folders of `built` at their own paths.

    Debian's own Python lies in /usr, which is the image's: there the image must bring the same one.
    """
    made = built.cpu
    if made is None:
        raise TypeError("only the CPU environment is mounted")
    venv = made.python.parent.parent
    bases, python = {made.python.resolve().parent.parent}, made.python
    while python.is_symlink():  # a folder on the way may be a link too, and is then asked for by that name
        python = python.parent / python.readlink()
        bases.add(python.parent.parent)
    folders = {venv, made.data.parent, Path(made.env["NEMO_RL_VENV_DIR"]).parent} | (bases - {Path("/usr"), venv})
    base = os.fspath(made.python.resolve().parent)  # Core's Makefile asks this Python's python3-config
    path = os.pathsep.join([*made.env["PATH"].split(os.pathsep)[:2], base, PATH])
    inside = replace(made, env={**made.env, "PATH": path})
    image = {**place.image, "cpu": built.image["id"]}
    return replace(built, runtime=place.runtime, image=image, cpu=inside, mounted=tuple(sorted(folders)))


def digest(source: Path = cpu.SOURCE) -> str:
    """Return what an image's label must say: a digest of the stand-ins, the pins and how the image is made."""
    return sha256_json({"files": cpu.contents(source), "layout": LAYOUT, "debian": PACKAGES})


def environment(models: Sequence[str]) -> CpuEnvironment:
    """Return the CPU environment as a job in the image sees it; optional stand-ins are copied from this checkout."""
    return cpu.CpuEnvironment(
        python=Path(f"{TOP}/venv/bin/python"),
        env={
            **cpu.constant(),
            "PATH": f"{TOP}/bin:{TOP}/venv/bin:{PATH}",
            "NEMO_RL_VENV_DIR": f"{TOP}/ray_venvs",
        },
        pythonpath=(f"{TOP}/shim", *(f"{TOP}/standins/{name}" for name in cpu.ALWAYS)),
        standins={name: os.fspath(cpu.SOURCE / "standins" / name) for name in cpu.OPTIONAL},
        models={name: Path(f"{TOP}/models/models/{name}") for name in models},
        data=Path(f"{TOP}/models/data"),
        digest=digest(),
    )


def _pinned(
    settings: Settings, runtime: Docker, report: Callable[[str], None]
) -> tuple[image_pins.Image, tuple[str, ...]] | None:
    """Return the user's image and the names of its models; None where it is no CPU image but the levels'."""
    image = images.resolve(settings, runtime, progress=report)
    with runtime.client() as client:
        labels = client.images.get(image.id).labels
    if LABEL not in labels:
        report(f"image={settings.image}: no CPU environment; rehearsals run in one that is built here")
        return None
    if labels[LABEL] != digest():
        raise UserError(
            f"image={settings.image}: a CPU environment made from other stand-ins ({labels[LABEL][:12]}, this checkout "
            f"has {digest()[:12]}): leave image= out and a fitting one is built, or push that one and pin it."
        )
    return image, tuple(json.loads(labels[MODELS_LABEL]))


def ensure(home: Path, runtime: Docker, report: Callable[[str], None]) -> tuple[image_pins.Image, tuple[str, ...]]:
    """Return name and model names of the image on the engine, building and loading what is missing below `home`.

    UserError: no engine, no disk, an interpreter of another version than Debian's, mmdebstrap missing or failing.
    """
    from docker.errors import DockerException

    if (problem := runtime.available()) is not None:  # before anything slow
        raise UserError(problem.text)
    built = cpu.linked(home, report)
    key = sha256_json({"image": digest(), "environment": built.digest})[:16]
    record = home / f"image-{key}.json"
    models = tuple(built.models)
    try:
        with locked(home / "lock", report), runtime.client() as client:
            known = read_json(record)
            if not known or not container_image.present(client, known["id"]):
                client.api.timeout = LOAD_S
                started = time.monotonic()
                known = {"id": _make(home, built, client, report)}
                write_json(record, known)
                report(f"CPU image: {known['id'][:19]} ready after {time.monotonic() - started:.0f} s")
    except (DockerException, OSError) as error:
        raise runtime.unusable("the CPU image cannot be loaded", error) from error
    return image_pins.Image(REPOSITORY, None, str(known["id"]), None, None), models


def _make(home: Path, built: CpuEnvironment, client: DockerClient, report: Callable[[str], None]) -> str:
    """Write the layers that the engine has not, load the image, and return its ID; big layers are not kept."""
    recipe = _recipe()
    epoch = int(os.environ.get("SOURCE_DATE_EPOCH", "0"))
    venv = built.python.parent.parent
    base = _base(home, recipe, epoch, report)
    packages, own = home / f"{venv.name}.layer.tar", home / "standins.layer.tar"
    noted = home / f"{venv.name}-{LAYOUT}-{epoch}.layer.json"
    layers: list[tuple[str, Path | None]] = [(sha256_file(base), base)]
    try:
        known = read_json(noted)
        if known and _has(client, [layers[0][0], known["sha256"]]):
            layers = [(layers[0][0], None), (known["sha256"], None)]
        else:
            report("CPU image: writing the packages as a layer (3 GB)")
            recipe.write_layer(packages, _packages(venv), epoch, folders=())
            layers.append((sha256_file(packages), packages))
            write_json(noted, {"sha256": layers[1][0]})
        recipe.write_layer(own, _standins(built), epoch, folders=FOLDERS)
        layers.append((sha256_file(own), own))
        labels = {LABEL: digest(), MODELS_LABEL: json.dumps(list(built.models))}
        tag = f"{REPOSITORY}:{digest()[:16]}"
        identity, stream = recipe.archive(layers, tag, epoch, labels=labels)
        report("CPU image: loading it into the engine, a minute or two")
        client.images.load(stream)
        made = client.images.get(tag)
    finally:
        for path in (packages, own):
            path.unlink(missing_ok=True)
    # an engine with containerd's image store calls an image by its manifest
    if made.id != identity and made.attrs["RootFS"]["Layers"] != [f"sha256:{sha}" for sha, _ in layers]:
        raise UserError(f"the engine made {made.id} out of the CPU image, {identity} was expected")
    return str(made.id)


def _base(home: Path, recipe: Any, epoch: int, report: Callable[[str], None]) -> Path:
    """Return the Debian below everything; fetched once, since the archive is another one tomorrow."""
    path = home / f"debian-{hashlib.sha256(PACKAGES.encode()).hexdigest()[:8]}-{epoch}.tar"
    if not path.exists():
        report("CPU image: a Debian from the archive by mmdebstrap, a minute or two")
        part = path.with_name(f"new-{path.name}")
        try:
            recipe.debian(part, epoch, PACKAGES)
        except FileNotFoundError as error:
            raise UserError("mmdebstrap is not installed: apt-get install mmdebstrap, or use runtime=local") from error
        except subprocess.CalledProcessError as error:
            last = (error.stderr or "").strip().splitlines()[-3:]
            raise UserError(f"mmdebstrap ended with {error.returncode}: {' '.join(last)}") from error
        part.replace(path)
    return path


def _has(client: DockerClient, layers: list[str]) -> bool:
    """Tell whether an image of ours on the engine has these layers at its bottom, so that they need not be sent.

    Docker's own store takes an archive without them; containerd's (Docker 29's default) and podman do not.
    """
    told = client.info()
    if "containerd" in str(told.get("DriverStatus")) or "Engine" not in [
        c["Name"] for c in client.version()["Components"]
    ]:
        return False
    wanted = [f"sha256:{name}" for name in layers]
    return any(
        image.attrs["RootFS"].get("Layers", [])[: len(wanted)] == wanted
        for image in client.images.list(filters={"label": LABEL})
    )


def _packages(venv: Path) -> dict[str, Path | str | bytes]:
    """Return the venv for Debian's interpreter: no byte code, no path of this machine, the same on every machine."""
    configuration = (venv / "pyvenv.cfg").read_text(encoding="utf-8")
    version = re.search(r"^version = (\d+)\.(\d+)", configuration, re.MULTILINE)
    found = (int(version[1]), int(version[2])) if version else (0, 0)
    if found != PYTHON:
        raise UserError(
            f"the CPU environment is Python {found[0]}.{found[1]}, the image's Debian has {PYTHON[0]}.{PYTHON[1]}: run "
            "doit with Python 3.11, or use runtime=local"
        )
    name = f"python{PYTHON[0]}.{PYTHON[1]}"
    content: dict[str, Path | str | bytes] = {}
    for base, folders, files in os.walk(venv):
        dropped = ("include", "share") if Path(base) == venv else ("__pycache__",)
        folders[:] = sorted(f for f in folders if f not in dropped)
        for file in files:
            path = Path(base, file)
            inside = path.relative_to(venv)
            target = f"{TOP[1:]}/venv/{inside}"
            if path.is_symlink() or inside == Path("complete.json"):
                continue
            content[target] = path
            if inside.parts[0] == "bin":
                content[target] = _script(path, venv)
            elif inside.name == "RECORD" and inside.parent.name.endswith(".dist-info"):
                # the scripts' hashes depend on where the venv is
                content[target] = _BIN.sub(
                    lambda line: line[0].partition(",")[0] + ",,", path.read_text("utf-8")
                ).encode()
    content[f"{TOP[1:]}/venv/pyvenv.cfg"] = b"home = /usr/bin\ninclude-system-site-packages = false\nversion = 3.11\n"
    content |= {f"{TOP[1:]}/venv/bin/{link}": f"/usr/bin/{name}" for link in ("python", "python3", name)}
    content[f"{TOP[1:]}/venv/lib64"] = "lib"
    return content


def _script(path: Path, venv: Path) -> Path | bytes:
    """Return a script of the venv with the image's path in it; programs stay as they are."""
    data = path.read_bytes()
    return data.replace(os.fsencode(venv), f"{TOP}/venv".encode()) if b"\0" not in data[:1024] else path


def _standins(built: CpuEnvironment) -> Mapping[str, Path | str | bytes]:
    """Return stand-ins, links for Ray's actors, and the tiny models with their data."""
    source, top = cpu.SOURCE, TOP[1:]
    trees = [(source / name, f"{top}/{name}") for name in ("shim", "bin")]
    trees += [(source / "standins" / name, f"{top}/standins/{name}") for name in cpu.ALWAYS]
    models = built.data.parent
    trees += [(models / name, f"{top}/models/{name}") for name in ("models", "data")]
    content: dict[str, Path | str | bytes] = _recipe().contents(trees)
    return content | {f"{top}/ray_venvs/{actor}": f"{TOP}/venv" for actor in ACTORS}


def _recipe() -> Any:
    """Return containers/ci_image.py, a script of its own, as a module."""
    spec = importlib.util.spec_from_file_location("ci_image", RECIPE)
    if spec is None or spec.loader is None:
        raise UserError(f"{RECIPE} is missing; is this checkout complete?")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
