"""`doit reproduce ATTEMPT|BUNDLE`: trees, image, environment and command of an attempt again, run anew, and compared.

The trees are rebuilt file by file below build/reproduce/ and hashed; the run goes through `repeat` with n=1, so its
record is its own. What is not the same as then (GPUs, an image that is gone) is named before the answer. Compared are
the verdict and the series that measure the training: step sets exactly, values within a relative tolerance.
Reproducing runs the code of the bundle: know whose it is.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from doit import doit_cmd

from tasks import bundle, environment, invocation, rebuild, settings
from tasks.command import Run
from tasks.errors import UserError
from tasks.files import read_json, write_json
from tasks.image_pins import parse_reference
from tasks.reason import Verdict
from tasks.repeat import PREFIX
from tasks.verdict import is_finite

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tasks.settings import Settings

# Relative to the larger of both values. Kernels and sampling differ between GPUs and runs; a step's mean of a ratio
# around 1 does not. `tolerance=0.1`, `tolerance=train/reward:0.5,0.1` replace them.
TOLERANCE = 0.05
TOLERANCES = {"train/token_mult_prob_error": 0.02, "train/lr": 0.0, "train/wd": 0.0, "train/reward": 0.5}
COMPARED = re.compile(r"^(?:train|validation)/(?!.*(?:time|per_sec|memory))")  # the others measure the machine
SMALL = 1e-9  # below it two values are the same nothing


@dataclass(frozen=True, slots=True)
class Difference:
    """One place where two attempts differ beyond the tolerance; `step` is None for a whole series or step set."""

    tag: str
    step: str | None
    old: Any
    new: Any
    tolerance: float | None

    @property
    def text(self) -> str:
        """Return it as one line."""
        where = f"{self.tag} at step {self.step}" if self.step else self.tag
        limit = f", beyond {100 * self.tolerance:g} %" if self.tolerance is not None else ""
        return f"{where}: {self.old} then, {self.new} now{limit}"


def tolerances(text: str | None) -> dict[str, float]:
    """Return tag -> relative tolerance, "" for all others, of `0.1` or `TAG:0.5,0.1`; UserError otherwise."""
    found = {**TOLERANCES, "": TOLERANCE}
    for word in (text or "").split(","):
        tag, _, number = word.rpartition(":")
        try:
            value = float(number) if word else 0.0
        except ValueError:
            value = -1.0
        if not is_finite(value) or value < 0:
            raise UserError(f"tolerance={text}: write a number, or TAG:NUMBER, several with commas")
        if word:
            found = {"": value} if not tag and found == {**TOLERANCES, "": TOLERANCE} else {**found, tag: value}
    return found


def compare(old: Mapping[str, Any], new: Mapping[str, Any], allowed: Mapping[str, float]) -> list[Difference]:
    """Return where two metrics.json differ: a series or a step that only one has, a value beyond its tolerance."""
    found = []
    for tag in sorted(t for t in {*old, *new} if COMPARED.match(t)):
        sides = [f"steps {_steps(series[tag])}" if tag in series else "absent" for series in (old, new)]
        if tag not in old or tag not in new or set(old[tag]) != set(new[tag]):
            found.append(Difference(tag, None, sides[0], sides[1], None))
        else:
            limit = allowed.get(tag, allowed[""])
            found += [
                Difference(tag, step, old[tag][step], new[tag][step], limit)
                for step in sorted(old[tag], key=int)
                if not _near(old[tag][step], new[tag][step], limit)
            ]
    return found


def _steps(series: Mapping[str, Any]) -> str:
    steps = sorted(map(int, series))
    return f"{steps[0]} to {steps[-1]}, {len(steps)} points" if steps else "none"


def _near(old: Any, new: Any, limit: float) -> bool:
    if not (is_finite(old) and is_finite(new)):
        return bool(old == new)
    largest = max(abs(old), abs(new))
    return bool(largest < SMALL or abs(old - new) <= limit * largest)


def not_as_then(recorded: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return which inputs of the run are not those of the attempt; a GPU model is named, of the rest only the name."""
    return [
        f"{name}: {recorded.get(name)} then, {now.get(name)} now" if name in ("gpus", "runtime") else f"{name} differs"
        for name in sorted({*recorded, *now})
        if recorded.get(name) != now.get(name) and name not in ("repeat", "series")
    ]


def checkout(given: Settings, kind: str) -> Path | None:
    """Return the user's checkout of a kind, or None where there is none."""
    try:
        return given.checkout(kind)
    except UserError:
        return None


def trees(given: Settings, described: Mapping[str, Any], packed: Path, home: Path) -> None:
    """Rebuild the three trees below `home`; UserError names the files that nothing here has any more."""
    for kind, tree in described["trees"].items():
        known = read_json(packed / "trees" / f"{kind}.json")
        if known is None:
            raise UserError(f"{kind}: the bundle does not hold its manifest; tree {tree['digest'][:12]} is lost")
        files = rebuild.entries(known["files"], tree["digest"])
        sources, where, lack = [packed / "trees" / kind], checkout(given, kind), ""
        if where is not None:
            commit = home / "commits" / kind
            try:
                rebuild.export(where, tree["sha"], commit)
            except UserError:
                lack = f"; {where} lacks commit {tree['sha'][:12]}: git fetch there"
            sources += [commit, where]
        lost = rebuild.rebuild(files, sources, home / kind)
        if lost:
            hint = lack or ("" if where else f"; name a checkout that has commit {tree['sha'][:12]}: {kind}=PATH")
            raise UserError(
                f"{kind}: {len(lost)} files of tree {tree['digest'][:12]} are nowhere, {lost[0]} first{hint}"
            )
    shutil.rmtree(home / "commits", ignore_errors=True)


def set_environment(passed: Mapping[str, str]) -> list[str]:
    """Give this process the variables that the attempt's user had; return those that cannot be had here."""
    notes = []
    for name in environment.PASSED:
        value = passed.get(name)
        if value is None:
            os.environ.pop(name, None)
        elif name in environment.HOST_FOLDERS and not Path(value).exists():
            notes.append(f"{name}: {value} is not here, {os.environ.get(name, 'nothing')} is used")
        else:
            os.environ[name] = value
    return notes


class Reproduce(Run):
    """Run an attempt again from its records and compare; exit status 0 reproduced, 1 differs, 2 could not be run."""

    doc_purpose = "rebuild and run an attempt (id, case or bundle file) again and compare its metrics (tolerance=0.05)"
    doc_usage = "ATTEMPT|CASE|FILE [tolerance=0.05] [bridge=PATH nemo_rl=PATH mcore=PATH]"

    def prepare(self, names: list[str]) -> list[str]:
        """Rebuild everything and return the one task that runs it."""
        words = [word for word in names if not word.startswith("-")]
        if len(words) != 1:
            raise UserError("reproduce what? name one attempt, case or bundle: doit reproduce level0.grpo_megatron")
        variables = doit_cmd._CMDLINE_VARS or {}  # noqa: SLF001 - what the command line says, before dodo.py is read
        given = settings.load(variables)
        self.allowed = tolerances(given.arguments.get("tolerance"))
        file = Path(words[0]).absolute()
        if not file.is_file():
            earlier = invocation.Invocation(given)
            file = bundle.pack(earlier, bundle.find(earlier, words[0]))
        said, _ = bundle.read(file)
        home = given.build / "reproduce" / re.sub(r"[^\w.-]", "_", str(said.get("attempt")))
        shutil.rmtree(home, ignore_errors=True)
        self.packed = home / "bundle"
        self.described, wrong = bundle.read(file, self.packed)
        if wrong:
            raise UserError(f"{file}: {wrong[0]} ({len(wrong)} such): not believed, nothing was run")
        trees(given, self.described, self.packed, home)
        facts = read_json(self.packed / "attempt/attempt.json")
        self.notes = [*self.described["notes"], *set_environment(facts["passed"])]
        chosen = {kind: os.fspath(home / kind) for kind in self.described["trees"]}
        chosen |= {"n": "1", "runtime": self.described["runtime"], **_image(self.described)}
        if (self.packed / "levels.yaml").exists():
            chosen["levels"] = os.fspath(self.packed / "levels.yaml")
        for name, value in chosen.items():
            if name in self.described["trees"] or name == "n" or name not in variables:
                doit_cmd.set_var(name, value)
        flags = [word for word in self.described["overrides"] if "=" not in word]
        for word in self.described["overrides"]:
            if "=" in word:
                doit_cmd.set_var(*word.split("=", 1))
        self.case = str(self.described["case"]).removeprefix(PREFIX)
        sys.argv[1:] = [f"repeat:{self.case}", *flags]  # dodo.py asks the command line which cases are spoken of
        print(f"reproduce: attempt {self.described['attempt']} of {self.described['case']}, trees rebuilt in {home}")
        return [f"repeat:{self.case}", *(word for word in names if word.startswith("-"))]

    def status(self) -> int:
        """Compare, say what is not as then and what differs, write report/reproduce.json, and return 0, 1 or 2."""
        now = invocation.current()
        outcome = now.outcomes.get(f"repeat:{self.case}")
        tried = outcome.record.artefact["attempts"] if outcome and outcome.record else []
        if not tried or not tried[0]["id"]:
            why = outcome.reasons[0].text if outcome and outcome.reasons else "a stage before it was no Pass"
            print(f"Result: Blocked - not reproduced, it could not be run here: {why}")
            return 2
        again, record = tried[0], read_json(self.packed / "records/run.json")
        inputs = dict(outcome.record.inputs) if outcome and outcome.record else {}
        if record["inputs"]["image"] != inputs["image"] and self.described["image"]["id"] == now.place.image["id"]:
            inputs["image"] = record["inputs"]["image"]  # another name for the same bits
        notes = [*self.notes, *not_as_then(record["inputs"], inputs)]
        old = read_json(self.packed / "attempt/metrics.json") or {}
        new = read_json(now.workspace.root / again["path"] / "metrics.json") or {}
        found = compare(old, new, self.allowed)
        if again["verdict"] != self.described["verdict"]:
            found.insert(0, Difference("verdict", None, self.described["verdict"], again["verdict"], None))
        result = Verdict.FAIL if found else Verdict.PASS
        compared = sum(bool(COMPARED.match(tag)) for tag in old)
        path = now.workspace.report / "reproduce.json"
        write_json(path, {
            "schema": 1, "attempt": self.described["attempt"], "case": self.described["case"], "again": again["path"],
            "reproduced": not found, "not_as_then": notes, "tolerances": self.allowed, "compared": compared,
            "differences": [asdict(one) for one in found],
        })  # fmt: skip
        for line in [*(f"not as then: {text}" for text in notes), *(f"DIFFERS {one.text}" for one in found[:20])]:
            print(line)
        sentence = (
            f"verdict {again['verdict']} again, {compared} series within tolerance" if not found else found[0].text
        )
        print(f"Result: {result} - {'differs' if found else 'reproduced'}: {sentence}")
        print(f"Report: {path}")
        return 1 if found else 0


def _image(described: Mapping[str, Any]) -> dict[str, str]:
    """Return the image setting that names the very image of the attempt: by digest, else by what it was called."""
    image = described["image"]
    if described["runtime"] == "local":
        return {}
    if not image["digest"]:
        return {"image": image["id"] or image["ref"]}
    return {"image": f"{parse_reference(image['ref']).repo}@{image['digest']}"}
