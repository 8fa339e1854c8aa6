"""`doit mutants [family=NAME]`: generated faults in the Bridge under test, and which check of the CPU proof sees each.

`containers/cpu/proof/mutants.py` makes them in memory, one child each, in an attempt under the agent; the checkouts and
the snapshots are not touched. The table says caught by what; a survivor comes with one line that says what it is.
Exit status 0: the unmodified tree passes and at least `AIM` of the faults are caught. It says how good the proof is,
nothing about the change, and leaves no record: stages/mutants/NAME.json and the attempt are what it leaves.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks import attempts, proof, records
from tasks.errors import UserError
from tasks.files import read_json, write_json
from tasks.query import Query, table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tasks.invocation import Invocation

AIM = 0.9
FAULT_S = 60.0
PROGRESS = re.compile(r"\d+/\d+ |\d+ faults, |unmodified: ")
MOST = 160  # faults, for the time limit; the program makes about 90


class Mutants(Query):
    """Measure the proof itself."""

    doc_purpose = "generated faults in the Bridge, and which check of the CPU proof sees each"

    def answer(self, now: Invocation, words: Sequence[str], *, as_json: bool) -> int:
        """Run the faults of one family and print the table; 1 where too many survive, 2 where there is no answer."""
        family = now.settings.arguments.get("family", "qwen2")
        if family not in proof.FAMILIES or words:
            raise UserError(f"doit mutants family=NAME: one of {', '.join(proof.FAMILIES)}")
        with records.lock(now.workspace.root / "lock", now.settings.wait_s, "one run a workspace"):
            now.sync()
            found = measure(now, family)
        if as_json:
            import json

            print(json.dumps(found, indent=1))
        else:
            show(found)
        return status(found)


def measure(now: Invocation, family: str) -> dict[str, Any]:
    """Run the faults in an attempt and return what mutants.json says; UserError where it says nothing."""
    place, trees = now.cpu_place, now.sound_trees()
    folder = attempts.new_folder(now.workspace.attempts, f"mutants.{family}")
    write_json(folder / "limits.json", proof.LIMITS)
    kept = now.settings.build / "cpu" / "references"
    shown: list[str] = []

    def heard(kind: str, _subject: str, facts: Mapping[str, Any]) -> None:
        log = folder / "run.log"
        lines = log.read_text(errors="replace").splitlines() if kind == "poll" and log.exists() else []
        mine = [line for line in lines if PROGRESS.match(line)]
        for line in [*mine[len(shown) :], *([str(facts["text"])] if kind == "progress" else [])]:
            print(line, flush=True)
        shown.extend(mine[len(shown) :])

    def command(paths: Mapping[str, str]) -> attempts.Command:
        program = f"{paths['agent']}/{proof.PROGRAM.removeprefix('containers/')}"
        limits = f"{paths['attempt']}/limits.json"
        argv = (place.interpreter, program, "--mutants", paths["attempt"], os.fspath(kept), limits, family)
        return attempts.Command(argv, paths["attempt"], proof.START_S + FAULT_S * MOST)

    now.listeners.append(heard)
    now.perform(place, trees, folder, f"mutants:{family}", command)
    root = place.root("bridge", folder, trees)
    attempts.clear_work(folder)
    found = read_json(folder / "mutants.json")
    if not isinstance(found, dict):
        raise UserError(f"no answer: {folder / 'run.log'}")
    for row in found["mutants"]:
        row["file"] = row["file"].removeprefix(f"{root}/")
    write_json(now.workspace.artefact("mutants", family), found)
    return found


def status(found: Mapping[str, Any]) -> int:
    """Return 0 where the unmodified tree passes and enough is caught, 2 without a single fault, else 1."""
    rows = found["mutants"]
    if not rows:
        return 2
    return 0 if found["unmodified"] is None and sum(bool(r["caught"]) for r in rows) >= AIM * len(rows) else 1


def show(found: Mapping[str, Any]) -> None:
    """Print what was caught by what, then each survivor with its reading."""
    rows = found["mutants"]
    caught = [row for row in rows if row["caught"]]
    by = Counter((row["operator"], row["caught"]) for row in caught)
    print(f"unmodified: {found['unmodified'] or 'passes'}")
    table([(operator, str(count), check) for (operator, check), count in sorted(by.items())], (16, 4))
    for row in rows:
        if not row["caught"]:
            print(
                f"SURVIVES  {Path(row['file']).name}:{row['line']}  {row['operator']}: {row['what']}: {row['reading']}"
            )
    print(f"{len(caught)} of {len(rows)} faults caught in {found['seconds']:.0f} s")
