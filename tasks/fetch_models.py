"""`doit fetch-models`: fill HF_HOME with the models of cases and levels, where they will run; resumable."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks import attempts, cpu, models
from tasks.errors import UserError
from tasks.files import read_json, write_json
from tasks.query import Query

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tasks.attempts import Place
    from tasks.invocation import Invocation
    from tasks.levels import Case

TIMEOUT_S = 12 * 3600.0
REMEDY = {
    "gated": "accept its licence on the hub and export HF_TOKEN of that account",
    "rate_limit": "the hub limits this address: wait some minutes and call again, what is there is kept",
    "missing": "no such model on the hub, or it is gated and there is no HF_TOKEN",
    "disk": "the disk of HF_HOME is full: export HF_HOME=/large/disk",
    "network": "the hub is out of reach: network, proxy, HF_ENDPOINT",
}


class FetchModels(Query):
    """Fill HF_HOME with the models of cases and levels."""

    name = "fetch-models"
    doc_purpose = "download the models of cases or levels into HF_HOME; whole files that are there are kept"
    doc_usage = "[CASE|LEVEL...] [--json]"

    def answer(self, now: Invocation, words: Sequence[str], *, as_json: bool) -> int:
        """Fetch what is missing; Blocked with a remedy a model where one cannot be had."""
        cases = chosen(now, words)
        names = [name for name in models.wanted(cases) if models.lacking(name, os.environ, tokenizer=False)]
        if models.hub(os.environ) is None:
            raise UserError("HF_HOME is not set, and a run's own HOME is empty: export HF_HOME=/large/disk first")
        found = fetch(now, names) if names else {}
        failed = {name: found.get(name, {}).get("error") for name in names if "path" not in found.get(name, {})}
        if as_json:
            print(json.dumps({"models": models.wanted(cases), "fetched": found}, indent=1))
        for name, error in failed.items():
            kind, text = (error["kind"], error["text"]) if error else ("rate_limit", "not asked for any more")
            print(f"Blocked  {name}: {text}\n         -> {REMEDY[kind]}")
        if not as_json:
            kept = len(models.wanted(cases)) - len(names)
            done = f"{len(names) - len(failed)} fetched, {kept} were there, in {models.hub(os.environ)}"
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
