"""Models of a plan: which ones, whether the cache of Hugging Face has them whole, and `doit fetch-models`.

Whether a model is there is decided from files alone (config, tokenizer, every weight file of the index), the way a run
with HF_HUB_OFFLINE=1 finds them; nothing is asked of the hub. A local folder (MODEL_PATH) is held to the same.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks import attempts, cpu
from tasks.errors import UserError
from tasks.files import read_json, write_json
from tasks.queries import Query
from tasks.verdict import Reason

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tasks.attempts import Place
    from tasks.invocation import Invocation
    from tasks.levels import Case

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")
BYTES_PER_PARAMETER = 2.2  # bfloat16 and the files around the weights
TIMEOUT_S = 12 * 3600.0
REMEDY = {
    "gated": "accept its licence on the hub and export HF_TOKEN of that account",
    "rate_limit": "the hub limits this address: wait some minutes and call again, what is there is kept",
    "missing": "no such model on the hub, or it is gated and there is no HF_TOKEN",
    "disk": "the disk of HF_HOME is full: export HF_HOME=/large/disk",
    "network": "the hub is out of reach: network, proxy, HF_ENDPOINT",
}


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


class FetchModels(Query):
    """Fill HF_HOME with the models of cases and levels."""

    name = "fetch-models"
    doc_purpose = "download the models of cases or levels into HF_HOME; whole files that are there are kept"
    doc_usage = "[CASE|LEVEL...] [--json]"

    def answer(self, now: Invocation, words: Sequence[str], *, as_json: bool) -> int:
        """Fetch what is missing; Blocked with a remedy a model where one cannot be had."""
        cases = chosen(now, words)
        names = [name for name in wanted(cases) if lacking(name, os.environ, tokenizer=False)]
        if hub(os.environ) is None:
            raise UserError("HF_HOME is not set, and a run's own HOME is empty: export HF_HOME=/large/disk first")
        found = fetch(now, names) if names else {}
        failed = {name: found.get(name, {}).get("error") for name in names if "path" not in found.get(name, {})}
        if as_json:
            print(json.dumps({"models": wanted(cases), "fetched": found}, indent=1))
        for name, error in failed.items():
            kind, text = (error["kind"], error["text"]) if error else ("rate_limit", "not asked for any more")
            print(f"Blocked  {name}: {text}\n         -> {REMEDY[kind]}")
        if not as_json:
            kept = len(wanted(cases)) - len(names)
            done = f"{len(names) - len(failed)} fetched, {kept} were there, in {hub(os.environ)}"
            print(
                f"Result: Blocked - {len(failed)} of {len(names)} not to be had" if failed else f"Result: Pass - {done}"
            )
        return 2 if failed else 0


def chosen(now: Invocation, words: Sequence[str]) -> list[Case]:
    """Return the cases that words name: a level's required ones, single ones, or level 0's where nothing is named."""
    found: list[Case] = []
    for word in words or ("level0",):
        found += now.levels.level(word).required if word in now.levels.levels else [now.levels.case(word)]
    return found


def fetch(now: Invocation, names: Sequence[str]) -> dict[str, Any]:
    """Download models in the place of the runs, or in the CPU environment where that one lacks huggingface_hub."""
    place = interpreter(now)
    folder = attempts.new_folder(now.workspace.attempts, "fetch-models")
    Path(os.environ.get("HF_HOME") or os.environ["HF_HUB_CACHE"]).mkdir(parents=True, exist_ok=True)

    def command(paths: Mapping[str, str]) -> attempts.Command:
        write_json(folder / "question.json", {"models": list(names), "result": f"{paths['attempt']}/answers.json"})
        argv = (place.interpreter, f"{paths['agent']}/fetch_models.py", f"{paths['attempt']}/question.json")
        return attempts.Command(argv, paths["attempt"], TIMEOUT_S, {"HF_HUB_OFFLINE": "0"}, network=True, cuda=False)

    print(f"with huggingface_hub of {place.interpreter} ({place.runtime.name}); log: {folder / 'run.log'}", flush=True)
    shown = 0

    def show(kind: str, _subject: str, _facts: Mapping[str, Any]) -> None:
        nonlocal shown
        log = folder / "run.log"
        if kind == "poll" and log.exists():
            whole = [line for line in log.read_text(errors="replace").splitlines() if line.startswith("[")]
            for line in whole[shown:]:
                print(line, flush=True)
            shown = len(whole)

    now.listeners.append(show)
    attempt = now.perform(place, now.sound_trees(), folder, "fetch-models", command)
    show("poll", "", {})
    attempts.clear_work(folder)
    found = read_json(folder / "answers.json")
    if not isinstance(found, dict):
        raise UserError(f"fetch-models gave no answer: {attempt.engine_detail or folder / 'run.log'}")
    return found


def interpreter(now: Invocation) -> Place:
    """Return where to download: an image has huggingface_hub; of local interpreters the first that has it."""
    import subprocess

    if now.settings.runtime != "local":
        return now.place
    built = cpu.ready(now.settings.build / "cpu")
    for python in (now.settings.python, *([built.python] if built else [])):
        argv = [os.fspath(python), "-c", "import huggingface_hub"]
        if subprocess.run(argv, check=False, capture_output=True).returncode == 0:
            return replace(now.place, interpreter=os.fspath(python), cpu=None)
    raise UserError(
        f"{now.settings.python} has no huggingface_hub: python=PATH names one that has, or `doit cpu` builds one"
    )
