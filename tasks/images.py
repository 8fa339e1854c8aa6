"""Which environment a run uses, as facts: reference, digest, ID, NeMo-RL commit, dependency fingerprint.

`resolve` turns what the user wrote (a name of containers/images.yaml, a reference, an image ID) into an `Image`. For
the local runtime the environment is the interpreter's installed distributions.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks import files
from tasks.errors import UserError
from tasks.image_pins import Image

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tasks.runtimes.job import Runtime
    from tasks.settings import Settings

BUILT = "build"  # image=build: what `doit image build` made of the checkout, see image_build.py
INTERPRETER_S = 60.0
DISTRIBUTIONS = """
import importlib.metadata, json, os, platform, sys
found = {(d.metadata["Name"] or "?", d.version or "?") for d in importlib.metadata.distributions()}
paths = [p for p in sys.path if p.endswith("-packages") and os.path.isdir(p)]
print(json.dumps({"python": platform.python_version(), "distributions": sorted(found), "paths": paths}))
"""


def resolve(settings: Settings, runtime: Runtime, *, progress: Callable[[str], None] = print) -> Image:
    """Return the environment that the settings name, and bind a container runtime to it (`runtime.use`).

    Raises UserError: no image named, unknown, no digest recorded, not found, registry or engine out of reach, a commit
    inside that contradicts the pin.
    """
    from tasks.runtimes.docker import Docker
    from tasks.runtimes.slurm import Slurm

    if isinstance(runtime, Slurm):
        from tasks.slurm_image import resolve as for_slurm

        image, name = for_slurm(settings.image, settings.build / "cache" / "squashfs.json", progress=progress)
        runtime.use(name)
        return image
    if not isinstance(runtime, Docker):
        return describe_interpreter(settings.python, settings.build / "interpreters.json")
    from tasks.container_image import resolve_container

    named = settings.image
    if named == BUILT:
        from tasks import image_build

        named = image_build.wanted(settings, runtime)
    image = resolve_container(named, runtime, require_pinned=settings.require_pinned, progress=progress)
    for note in image.notes:
        progress(note)
    runtime.use(image.id)
    return image


def describe_interpreter(interpreter: Path, cache: Path | None = None) -> Image:
    """Return the environment of an interpreter: a digest over its version and its distributions (name, version).

    `cache`, a file of this function's own, holds as long as interpreter and site-packages keep their times.
    """
    key = str(interpreter.absolute())  # not resolved: a venv's python is a link, and the venv is what counts
    records = files.read_json(cache) if cache else None
    records = records if isinstance(records, dict) else {}
    known = records.get(key)
    if not known or known["stamps"] != _stamps(known["stamps"]):
        known = _ask(interpreter)
        known["stamps"] = _stamps([key, *known.pop("paths")])
        if cache:
            files.write_json(cache, {**records, key: known})
    return Image(f"python {known['python']}, {known['count']} distributions", None, known["digest"], None, None)


def _ask(interpreter: Path) -> dict[str, Any]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    options: dict[str, Any] = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL, "env": env}
    try:
        run = subprocess.run([str(interpreter), "-c", DISTRIBUTIONS], timeout=INTERPRETER_S, check=True, **options)
        told = json.loads(run.stdout.splitlines()[-1])
    except (OSError, ValueError, IndexError, subprocess.SubprocessError) as error:
        last = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1:]
        raise UserError(f"python={interpreter}: cannot be asked for its packages: {' '.join(last)}") from error
    digest = files.sha256_json({"python": told["python"], "distributions": told["distributions"]})
    count = len(told["distributions"])
    return {"python": told["python"], "count": count, "digest": f"sha256:{digest}", "paths": told["paths"]}


def _stamps(paths: Iterable[str]) -> dict[str, int]:
    """Return path -> mtime in ns, -1 where there is nothing."""
    found = {path: Path(path) for path in paths}
    return {name: path.stat().st_mtime_ns if path.exists() else -1 for name, path in found.items()}
