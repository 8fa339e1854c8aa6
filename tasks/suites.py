"""Unit suites: pytest in the policy worker's interpreter, on frozen trees, judged by its JUnit file, not its status.

Zero executed tests are never a Pass, whatever pytest's exit status says (5 for none collected, 0 for all skipped).
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

from tasks import attempts, snapshot
from tasks.files import sha256_json
from tasks.reason import Reason, Verdict
from tasks.stage import Done, environment_inputs

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tasks.levels import Suite
    from tasks.pipeline import Pipeline

COMPONENT = {"bridge": "bridge-tests", "nemo_rl": "nemo_rl-tests", "mcore": "mcore"}
_MISSING = re.compile(r"(?:ModuleNotFoundError|ImportError): No module named '([\w.]+)'")
_OURS = ("megatron", "nemo_rl")


@dataclass(frozen=True, slots=True)
class Counts:
    """What a pytest JUnit file counts; `problems` are (test, first line of message) of failed and erroneous ones."""

    tests: int
    failed: int
    errors: int
    skipped: int
    problems: tuple[tuple[str, str], ...]

    @property
    def executed(self) -> int:
        """Return how many tests really ran."""
        return self.tests - self.skipped


def read_junit(path: Path) -> Counts | None:
    """Return the counts of a JUnit file, or None if it is missing, empty or not XML."""
    try:
        root = ET.parse(path).getroot()  # noqa: S314 - written by the pytest that we started
    except (OSError, ET.ParseError):
        return None
    cases = list(root.iter("testcase"))
    problems = []
    for kind in ("failure", "error"):
        for case in cases:
            found = case.find(kind)
            if found is not None:
                text = (found.get("message") or found.text or kind).strip()
                detail = (found.text or "").strip()
                missing = _MISSING.search(f"{text}\n{detail}")
                said = next((line.strip() for line in text.splitlines() if line.strip(" E>")), kind)
                line = missing[0] if missing else said
                problems.append((f"{case.get('classname', '')}::{case.get('name', '')}".strip(":"), line[:300]))
    return Counts(
        len(cases),
        sum(case.find("failure") is not None for case in cases),
        sum(case.find("failure") is None and case.find("error") is not None for case in cases),
        sum(case.find("skipped") is not None for case in cases),
        tuple(problems),
    )


def decide(counts: Counts | None, exit_facts: Mapping[str, Any] | None, min_tests: int) -> tuple[Verdict, list[Reason]]:
    """Return the verdict of a suite. Failures are Fail, unless all are imports of packages that are not ours."""
    if exit_facts is None or exit_facts.get("reason") != "exited":
        how = (exit_facts or {}).get("reason", "no exit.json")
        return Verdict.BLOCKED, [Reason("stopped", "pytest", f"pytest did not end by itself: {how}")]
    rc = exit_facts.get("rc")
    if counts is None:
        return Verdict.BLOCKED, [Reason("no_tests", "pytest", f"0 tests executed: no JUnit file, pytest rc {rc}")]
    if counts.problems:
        foreign = [
            m for _, line in counts.problems for m in [_MISSING.search(line)] if m and not m[1].startswith(_OURS)
        ]
        verdict = Verdict.BLOCKED if len(foreign) == len(counts.problems) else Verdict.FAIL
        shown = [Reason("test", name, f"{name}: {line}") for name, line in counts.problems[:20]]
        more = len(counts.problems) - len(shown)
        return verdict, [*shown, *([Reason("test", "more", f"and {more} more")] if more else [])]
    if counts.executed == 0:
        text = f"0 tests executed ({counts.skipped} skipped, pytest rc {rc})"
        return Verdict.BLOCKED, [Reason("no_tests", "pytest", text)]
    if counts.executed < min_tests:
        text = f"{counts.executed} tests executed, at least {min_tests} expected"
        return Verdict.BLOCKED, [Reason("no_tests", "pytest", text, str(min_tests), str(counts.executed))]
    if rc != 0:
        return Verdict.BLOCKED, [Reason("rc", "pytest", f"pytest ended with rc {rc} though no test failed")]
    return Verdict.PASS, []


def inputs(pipe: Pipeline, suite: Suite) -> dict[str, str]:
    """Return the input digest's parts: the trees it reaches, its definition, image and environment."""
    reached = {}
    for kind in {*suite.reaches, suite.repo}:
        components = pipe.tree(kind).components
        name = COMPONENT[kind] if kind == suite.repo else kind
        reached[kind] = components[name]
    definition = {
        "repo": suite.repo, "paths": suite.paths, "args": suite.args, "min_tests": suite.min_tests,
        "env": dict(suite.env), "interpreter": suite.interpreter, "gpus": suite.gpus,
    }  # fmt: skip
    return {
        **reached,
        "image": sha256_json(pipe.place.image),
        "definition": sha256_json(definition),
        **environment_inputs(suite.env),
    }


def missing_paths(pipe: Pipeline, suite: Suite) -> list[Reason]:
    """Return a reason for each path of the suite that the tree does not have, with where a rename took it."""
    files = pipe.manifests[suite.repo].files
    reasons = []
    for path in suite.paths:
        plain = path.partition("::")[0].rstrip("/")
        if plain in files or any(name.startswith(plain + "/") for name in files):
            continue
        name = plain.rpartition("/")[2]
        moved = next((p for p in files if p.endswith("/" + name)), None)
        hint = f" (renamed to {moved} in the change?)" if moved else ""
        reasons.append(Reason("input_missing", path, f"input missing: {suite.repo}:{path}{hint}"))
    return reasons


def execute(pipe: Pipeline, suite: Suite) -> Done:
    """Run the suite in an attempt of its own and judge it."""
    missing = missing_paths(pipe, suite)
    if missing:
        return Done({"counts": None}, Verdict.BLOCKED, tuple(missing), reusable=False)
    place, trees = pipe.place, pipe.sound_trees()
    folder = pipe.folder(f"unit:{suite.name}", f"unit.{suite.name}")

    def command(paths: Mapping[str, str]) -> attempts.Command:
        interpreter = place.interpreter
        if place.runtime.name != "local":
            from tasks.probe import IMAGE_INTERPRETERS

            known = IMAGE_INTERPRETERS.get(suite.interpreter, [])
            interpreter = "|".join([*known, interpreter])
        # cache and addopts off: NeMo-RL's pyproject stops at the first failure (-x) and asks for plugins
        options = ("-q", "-p", "no:cacheprovider", "-o", "addopts=", f"--junitxml={paths['attempt']}/logs/junit.xml")
        first, *others = interpreter.split("|")
        argv = (first, "-m", "pytest", *options, *suite.args, *suite.paths)
        if others:  # the worker's own interpreter where the image has it, else the image's
            script = 'for p in "$1" "$2"; do command -v "$p" >/dev/null && break; done; shift 2; exec "$p" "$@"'
            argv = ("bash", "-c", script, "suite", first, others[-1], *argv[1:])
        cwd = snapshot.workplace(suite.repo, trees[suite.repo].path, folder, paths)
        return attempts.Command(argv, cwd, suite.timeout_s, suite.env, suite.gpus, cuda=suite.repo == "bridge")

    attempt = pipe.perform(place, trees, folder, f"unit:{suite.name}", command)
    counts = read_junit(folder / "logs" / "junit.xml")
    verdict, reasons = decide(counts, attempt.exit, suite.min_tests)
    proof = attempts.evidence_files(folder, pipe.workspace.root)
    attempts.clear_work(folder)
    artefact = {
        "attempt": os.fspath(folder.relative_to(pipe.workspace.root)),
        "counts": None
        if counts is None
        else {"tests": counts.tests, "failed": counts.failed, "errors": counts.errors, "skipped": counts.skipped},
    }
    return Done(artefact, verdict, tuple(reasons), reusable=verdict is Verdict.PASS, evidence=proof)
