"""Models of a plan: which ones, and whether the cache of Hugging Face has them whole.

Whether a model is there is decided from files alone (config, tokenizer, every weight file of the index), the way a run
with HF_HUB_OFFLINE=1 finds them; nothing is asked of the hub. A local folder (MODEL_PATH) is held to the same.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.files import read_json
from tasks.reason import Reason

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tasks.levels import Case

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")
BYTES_PER_PARAMETER = 2.2  # bfloat16 and the files around the weights


def wanted(cases: Iterable[Case]) -> list[str]:
    """Return the hub names of the models that cases load, each once; MODEL_PATH stands in for the main one."""
    given = os.environ.get("MODEL_PATH")
    found = {name: None for case in cases for name in (given or case.model, *case.also_models)}
    return [name for name in found if name.count("/") == 1 and not name.startswith(("/", ".", "~"))]


def overrides(case: Case) -> tuple[str, ...]:
    """Return what MODEL_PATH means for a case: model and tokenizer together, or a wrong one is loaded in silence."""
    given = os.environ.get("MODEL_PATH")
    if not given or case.steps is None or case.id.startswith("rehearse."):
        return ()
    return (f"policy.model_name={given}", f"policy.tokenizer.name={given}")


def lacking(name: str, environ: Mapping[str, str], *, tokenizer: bool = True) -> str | None:
    """Return what of a model is not there for a run that asks nobody, or None if it is whole."""
    folder = Path(name)
    if not name.startswith(("/", "./", "~")):
        home = hub(environ)
        if home is None:
            return "neither HF_HOME nor HF_HUB_CACHE is set, so a run starts with an empty cache"
        repository = home / f"models--{name.replace('/', '--')}"
        try:
            revision = (repository / "refs" / "main").read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            return f"not in {home}"
        folder = repository / "snapshots" / revision
    if not (folder / "config.json").is_file():
        return f"{folder} has no config.json"
    if tokenizer and not any((folder / file).is_file() for file in TOKENIZERS):
        return f"{folder} has no tokenizer ({', '.join(TOKENIZERS)})"
    index = read_json(folder / "model.safetensors.index.json")
    files = sorted(set(index["weight_map"].values())) if isinstance(index, dict) and "weight_map" in index else []
    gone = [file for file in files if not (folder / file).is_file()]  # a link into blobs/ whose file is not there
    if gone:
        return f"{folder} lacks {len(gone)} of {len(files)} weight files, first {gone[0]}"
    if not files and not any(path.is_file() for glob in ("*.safetensors", "*.bin") for path in folder.glob(glob)):
        return f"{folder} has no weights"
    return None


def hub(environ: Mapping[str, str]) -> Path | None:
    """Return the folder of cached models that a run sees, or None: a run's own HOME is empty."""
    if environ.get("HF_HUB_CACHE"):
        return Path(environ["HF_HUB_CACHE"])
    return Path(environ["HF_HOME"]) / "hub" if environ.get("HF_HOME") else None


def size_of(name: str) -> int:
    """Return about how many bytes a model takes, by the parameters in its name ("8B", "30B-A3B"); 0 if none says."""
    found = re.search(r"(\d+(?:\.\d+)?)[Bb](?![a-z])", name.rpartition("/")[2])
    return int(float(found[1]) * 1e9 * BYTES_PER_PARAMETER) if found else 0


def preflight(case: Case, environ: Mapping[str, str]) -> list[Reason]:
    """Return why a case cannot have its models: not there while offline, or no room to fetch them."""
    main = environ.get("MODEL_PATH") or case.model
    missing = {
        name: why for name in (main, *case.also_models)
        if "/" in name and (why := lacking(name, environ, tokenizer=name == main))
    }  # fmt: skip
    if environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        told = "HF_HUB_OFFLINE is set; without it: doit fetch-models"
        return [Reason("model", n, f"model {n}: {why}; {told} {case.id}") for n, why in missing.items()]
    local = [n for n in missing if n.startswith(("/", "./", "~"))]
    if local:
        return [Reason("model", n, f"model {n}: {missing[n]}; MODEL_PATH must be a whole snapshot") for n in local]
    home, need = hub(environ), sum(map(size_of, missing))
    while home is not None and not home.is_dir() and home != home.parent:
        home = home.parent
    if home is not None and need and shutil.disk_usage(home).free < need:
        free = shutil.disk_usage(home).free
        text = f"{', '.join(missing)} take about {need / 1e9:.0f} GB, {home} has {free / 1e9:.0f} GB free"
        return [Reason("disk", str(home), f"{text}: export HF_HOME=/large/disk")]
    return []
