"""Put generated faults into the Bridge and tell which check sees each: `proof --mutants OUT KEPT LIMITS FAMILY`.

A parent imports everything that the Bridge imports, but not the Bridge. A first child proves the unmodified tree and
tells what it imported and which lines of the models it ran. Then each fault has a child that imports the Bridge with
one source replaced as it is read; the trees are never touched. Sections run in order until one sees the fault.

OUT/mutants.json: {"schema", "family", "unmodified": [...], "mutants": [{"file", "line", "operator", "what", "caught":
check or null, "how", "section", "reading", "seconds"}], "seconds"}. LIMITS: check -> largest good value.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import re
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

from proof import bytecode, faults, reference, serve

SECTIONS = ("base", "TP=2", "lora", "PP=2", "EP=2", "save", "lora TP=2", "lora EP=2")
# most faults of a file: the family's own, and the shared code by its part in a mapping
MODELS = "/megatron/bridge/models/"
OWN = 48
SHARED = {"models/conversion/param_mapping.py": 36, "models/conversion/model_bridge.py": 24}
FIELDS_ONLY = ("models/conversion/model_bridge.py",)  # the rest of it is machinery: tasks, caches, progress


class Lines:
    """Which lines of the Bridge's models ran: file -> lines."""

    def __init__(self) -> None:
        self.ran: dict[str, set[int]] = {}

    def __call__(self, frame: Any, _event: str, _arg: Any) -> Any:
        """Follow a function of the models line by line, and no other: what sys.settrace calls."""
        file = frame.f_code.co_filename
        return functools.partial(self.line, self.ran.setdefault(file, set())) if MODELS in file else None

    def line(self, ran: set[int], frame: Any, _event: str, _arg: Any) -> Any:
        """Note a line."""
        ran.add(frame.f_lineno)
        return functools.partial(self.line, ran)


def prove(family: str, kept: Path, folder: Path, limits: dict[str, float]) -> dict[str, Any]:
    """Import the Bridge here and run the sections until a check is beyond its limit or something is raised."""
    started = time.monotonic()
    found: dict[str, Any] = {"caught": None, "how": "", "section": "", "fields": {}}
    try:
        serve.import_trees()
    except Exception as error:  # noqa: BLE001 - a fault that breaks the import is seen
        return {**found, "caught": "import", "how": f"{type(error).__name__}: {error}"[:200], "seconds": 0}
    for name in [s for s in SECTIONS if s in serve.sections_of(family)]:
        answer = serve.section(family, name, kept, folder / name)
        found["fields"] = found["fields"] or answer.get("provider", {})
        if (problem := answer["problem"]) is not None:
            found |= {"caught": "exception", "how": f"{problem['type']}: {problem['text']}"[:200], "section": name}
            break
        bad = [c for c in answer["checks"] if not _is_good(c, limits)]
        if bad:
            found |= {"caught": bad[0]["name"], "how": f"{bad[0]['value']}: {bad[0]['text']}"[:200], "section": name}
            found["also"] = [c["name"] for c in bad[1:]]
            break
    return {**found, "seconds": round(time.monotonic() - started, 1)}


def _is_good(check: dict[str, Any], limits: dict[str, float]) -> bool:
    value = float(check["value"])
    return check["name"] in limits and value <= limits[check["name"]]


def first(family: str, kept: Path, folder: Path, limits: dict[str, float]) -> dict[str, Any]:
    """Prove the unmodified tree; return also the modules that it took and the lines that its base ran."""
    unmodified = prove(family, kept, folder, limits)
    from proof import sections

    followed = Lines()
    (folder / "again").mkdir()
    sys.settrace(followed)  # type: ignore[arg-type]
    try:
        sections.base(sections.Run(family, kept / family, folder / "again", 0, {}))
    finally:
        sys.settrace(None)
    lines = {file: sorted(ran) for file, ran in followed.ran.items()}
    modules = [name for name in list(sys.modules) if name.partition(".")[0] != "proof"]
    return {**unmodified, "lines": lines, "modules": [m for m in modules if not m.startswith("megatron.bridge")]}


def chosen(lines: dict[str, list[int]], fields: frozenset[str]) -> list[tuple[str, str, int, str, str]]:
    """Return the faults: of the family's own files, and of the mapping code that all share."""
    found: list[tuple[str, str, int, str, str]] = []
    for file, ran in sorted(lines.items()):
        inside = file.partition("/megatron/bridge/")[2]
        own = re.fullmatch(r"models/(?!conversion|hf_pretrained|decorators)[^/]+/[^/]+\.py", inside)
        most = OWN if own else SHARED.get(inside, 0)
        if most:
            source = Path(file).read_text(encoding="utf-8")
            reached = set(ran) if inside not in FIELDS_ONLY else set()
            found += [(file, *fault) for fault in faults.faults(source, reached, most, fields)]
    return found


def mutated(file: str, source: str, family: str, kept: Path, folder: Path, limits: dict[str, float]) -> dict[str, Any]:
    """Import the Bridge with `file` read as `source`, and prove."""
    bytecode.ByContent.replaced = {file: source.encode()}
    return prove(family, kept, folder, limits)


def reading(fault: dict[str, Any], fields: dict[str, str]) -> str:
    """Say in a line what a survivor means."""
    theirs = fault.get("fields", {})
    differ = sorted(name for name in fields.keys() | theirs.keys() if fields.get(name) != theirs.get(name))
    if not differ:
        return "the provider is the same and every check, too: equivalent on this model, or nothing measures it"
    return f"provider fields {', '.join(differ[:4])} differ: no check depends on them"


def main(out: Path, kept: Path, limits_file: Path, family: str) -> int:
    """Run the faults of `family` and write OUT/mutants.json."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    started = time.monotonic()
    limits = json.loads(limits_file.read_text())
    kept.mkdir(parents=True, exist_ok=True)
    if not reference.is_kept(kept / family):
        reference.start(kept, [family]).wait()
    bytecode.install(kept.parent / "bytecode", serve.roots())
    import megatron.core
    import torch

    torch.set_num_threads(1)
    print(f"{megatron.core.__file__} imported, {time.monotonic() - started:.0f} s", flush=True)
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
        home = Path(scratch)
        target = home / "first.json"
        serve.wait_all({serve.fork(target, functools.partial(first, family, kept, home / "first", limits))}, 300,
                       stop_at_failure=False)  # fmt: skip
        unmodified = json.loads(target.read_text())
        print(f"unmodified: {unmodified['caught'] or 'passes'}, {time.monotonic() - started:.0f} s", flush=True)
        for name in unmodified["modules"]:
            with contextlib.suppress(Exception), warnings.catch_warnings():
                importlib.import_module(name)
        if early := [name for name in sys.modules if name.startswith("megatron.bridge")]:
            msg = f"{early[0]} was imported by another package: a child would not see its fault"
            raise RuntimeError(msg)
        config = json.loads((kept / family / "model" / "config.json").read_text())
        todo = chosen(unmodified["lines"], frozenset(config))
        print(f"{len(todo)} faults, {time.monotonic() - started:.0f} s", flush=True)
        jobs = {
            home / f"{n}.json": (
                fault,
                functools.partial(mutated, fault[0], fault[4], family, kept, home / f"{n}", limits),
            )
            for n, fault in enumerate(todo)
        }
        rows = []
        for done in serve.pool(iter([(t, work) for t, (_, work) in jobs.items()]), os.cpu_count() or 1):
            file, operator, line, what, _ = jobs[done][0]
            answer = json.loads(done.read_text()) if done.exists() else {"caught": "ended", "how": "no answer"}
            row = {"file": file, "line": line, "operator": operator, "what": what, **answer}
            row["reading"] = "" if row["caught"] else reading(row, unmodified["fields"])
            row.pop("fields", None)
            rows.append(row)
            print(
                f"{len(rows)}/{len(todo)} {Path(file).name}:{line} {operator}: {row['caught'] or 'SURVIVES'}",
                flush=True,
            )
    rows.sort(key=lambda row: (row["file"], row["line"], row["what"]))
    answer = {
        "schema": 1, "family": family, "unmodified": unmodified["caught"], "how": unmodified["how"], "mutants": rows,
        "seconds": round(time.monotonic() - started, 1),
    }  # fmt: skip
    (out / "mutants.json").write_text(json.dumps(answer, indent=1) + "\n")
    return 0
