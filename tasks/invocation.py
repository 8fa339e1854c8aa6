"""One call of doit: the pipeline with its lock, its doit-facing actions, its reports and its exit status."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack, suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tasks import ahead, answer, cpu, proof, records, settings
from tasks.errors import UserError
from tasks.pipeline import Pipeline
from tasks.reason import Verdict
from tasks.runtimes import choose
from tasks.stage import Outcome, Stage

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from doit.exceptions import TaskFailed

    from tasks.levels import Case

GOES_ON = ("the case runs without it", "the case may run (proof=off skips it, proof=on builds what it needs)")
EXIT = {Verdict.PASS: 0, Verdict.SKIPPED: 0, Verdict.FAIL: 1, Verdict.BLOCKED: 2}


class Invocation(Pipeline):
    """The pipeline as dodo.py and the console see it."""

    def __init__(self, chosen: settings.Settings) -> None:
        super().__init__(chosen)
        self.requested: list[str] = []
        self.needs: Mapping[str, Iterable[str]] = {}
        self.roots: dict[str, str] = {}
        self.early: set[str] = set()  # tasks that were done before doit asked for them (ahead.py)
        self.report: dict[str, Any] | None = None
        self._held = ExitStack()

    # for dodo.py ----------------------------------------------------------------------------------------------------

    def database(self) -> Path:
        """Return doit's database; an accelerator of doit's own checks, never the truth."""
        self.settings.build.mkdir(parents=True, exist_ok=True)
        return self.settings.build / ".doit.db"

    @cached_property
    def _has_checkouts(self) -> bool:
        try:
            return bool(self.workspace)
        except UserError:
            return False

    def artefacts(self, task: str) -> list[str]:
        """Return the artefact file of a task, as doit wants it; none while no checkout is named (`doit list`)."""
        if not self._has_checkouts or task in ("sync", "cpu") or task.startswith("gate:"):
            return []
        return [os.fspath(self.workspace.artefact(*task.partition(":")[::2]))]

    def asked_for(self, prefix: str) -> Iterator[Case]:
        """Yield the cases in their `prefix` form ("rehearse", "baseline") if the command line speaks of them."""
        if any(word.startswith(prefix) or word in ("list", "tabcompletion", "completion") for word in sys.argv[1:]):
            for case in self.levels.cases():
                if prefix == "baseline" or (case.rehearsal and case.rehearsal.supported):
                    yield self.case(f"{prefix}.{case.id}")

    def repeatable(self) -> Iterator[tuple[Case, tuple[str, ...]]]:
        """Yield the cases that the command line wants repeated, each with the tasks that must be a Pass before."""
        from tasks import repeat

        for word in sys.argv[1:]:
            if word.startswith("repeat:"):
                repeat.times(self.settings.arguments)  # a wrong n= is told before anything is started
                case = self.case(word.removeprefix("repeat:"))
                name = self.environment_of(case)
                suites = () if name else self.levels.levels[case.level].suites
                yield case, (f"probe-{name}" if name else "probe", *(f"unit:{suite}" for suite in suites))

    def is_fresh(self, stage: Stage) -> bool:
        """Return whether a record makes the stage fresh: doit's `uptodate`."""
        if stage.task in self.early:
            return False  # its action knows: it was done a moment ago, and not reused
        try:
            return self.reuse(stage)
        except (UserError, OSError):
            return False  # the action meets the same error and reports it

    def do(self, stage: Stage) -> bool | TaskFailed:
        """Bring the stage up to date: doit's action. A verdict that is no Pass stops what depends on it."""
        try:
            outcome = self.outcomes.get(stage.task)
            if outcome is None or not (outcome.cached or stage.task in self.early):
                outcome = self.outcomes[stage.task] if self.reuse(stage) else self.execute(stage)
            if stage.kind == "check":
                self._compare(stage, outcome)
        except (UserError, OSError) as error:
            outcome = self.block(stage.task, error)
        return self._to_doit(outcome)

    def _compare(self, stage: Stage, outcome: Outcome) -> None:
        """Run the baseline of a case whose failure the rules leave open, if its budget allows."""
        case = self.case(stage.name)
        undecided = outcome.record is not None and outcome.record.artefact.get("class") == "undecided"
        if not undecided or self.stop.is_set() or self.environment_of(case):
            return
        if case.gpus * case.minutes > self.settings.baseline_budget:
            return
        theirs = self.case(f"baseline.{case.id}")
        try:
            for one in (
                self.probe(environment_name="baseline"),
                self.config(theirs),
                self.run(theirs),
                self.metrics(theirs),
                self.check(theirs),
            ):
                self.tell("progress", stage.task, text=f"undecided: baseline with the vendored Bridge, {one.kind}")
                done = self.outcomes[one.task] if self.reuse(one) else self.execute(one)
                if done.verdict is not Verdict.PASS:
                    break
        except UserError as error:
            self.tell("progress", stage.task, text=f"no baseline: {error}")

    def bring(self, task: str) -> bool:
        """Do now what a planned case needs, a suite, a gate or a config; return whether it is a Pass."""
        kind, _, name = task.partition(":")
        if task not in self.early and task not in self.outcomes:
            if kind == "gate":
                done = self.do_gate(name) is True
            elif kind in ("unit", "config"):
                stage = self.unit(self.levels.suites[name]) if kind == "unit" else self.config(self.case(name))
                done = self.do(stage) is True
            else:
                return False
            self.early.add(task)
            return done
        outcome = self.outcomes.get(task)
        return outcome.verdict is Verdict.PASS if outcome else kind == "gate"  # a gate that opened leaves none

    def do_repeat(self, case: Case) -> bool | TaskFailed:
        """Run the case n times: doit's action."""
        from tasks import repeat

        try:
            return self._to_doit(repeat.perform(self, case))
        except (UserError, OSError) as error:
            return self._to_doit(self.block(f"repeat:{case.id}", error))

    def do_sync(self) -> bool | TaskFailed:
        """Do the sync stage: doit's action."""
        try:
            self.sync()
        except (UserError, OSError) as error:
            return self._to_doit(self.block("sync", error))
        return True

    def gates(self, case: Case) -> list[str]:
        """Return the task that must not fail before `case` may have GPUs: the CPU proof of its model's family."""
        family = proof.family_of(case.model or "") if self._gating else None
        return [f"gate:{family}"] if family else []

    @cached_property
    def _gating(self) -> bool:
        chosen = self.settings.proof
        if chosen == "off" or not self._has_checkouts or self.workspace.demo:
            return False
        return chosen != "auto" or cpu.ready(self.settings.build / "cpu") is not None

    def do_gate(self, family: str) -> bool | TaskFailed:
        """Prove the family before a level's case: doit's action. Only a Fail stops the case; a gap is shown."""
        stage = proof.stage(self, family)
        self.do(stage)
        outcome = self.outcomes[stage.task]
        if outcome.verdict in (Verdict.PASS, Verdict.FAIL) and stage.task not in self.planned:
            self.planned.append(stage.task)
        if outcome.verdict is not Verdict.FAIL or self.settings.proof == "warn":
            self.tell("progress", stage.task, text=f"{outcome.verdict}; {GOES_ON[outcome.verdict is Verdict.PASS]}")
            return True
        self.outcomes[f"gate:{family}"] = outcome
        return self._to_doit(outcome)

    def do_cpu(self) -> bool | TaskFailed:
        """Build the CPU environment of the rehearsals, or the image of it, if it is not there: doit's action."""
        contained = "cpu" in self.requested or "probe-cpu" in self.planned  # a proof runs on this machine
        try:
            made = self.rehearsal_place if contained else self.cpu_place
            self.outcomes["cpu"] = Outcome(Verdict.PASS if made else Verdict.BLOCKED)
        except (UserError, OSError) as error:
            return self._to_doit(self.block("cpu", error))
        return True

    def prune_cpu(self, dryrun: bool) -> None:
        """Remove CPU environments that are no longer used: what `doit clean cpu` calls."""
        from tasks.cpu_prune import prune

        prune(self.settings.build / "cpu", print, dry=dryrun)

    @staticmethod
    def _to_doit(outcome: Outcome) -> bool | TaskFailed:
        if outcome.verdict is Verdict.PASS:
            return True
        from doit.exceptions import TaskFailed

        return TaskFailed("; ".join(r.text for r in outcome.reasons) or outcome.verdict, report=False)

    # for the console ------------------------------------------------------------------------------------------------

    def begin(self, requested: Iterable[str], planned: Mapping[str, Iterable[str]]) -> None:
        """Take the workspace, stop what dead runs left, and write a report in which nothing has run yet.

        `planned` maps each task, in order, to those it waits for.
        """
        self.requested, self.planned, self.needs = list(requested), list(planned), planned
        root = self.workspace.root
        self._publish(None)
        self._held.enter_context(
            records.lock(
                root / "lock",
                self.settings.wait_s,
                "one run a workspace",
                lambda t: self.tell("progress", "lock", text=t),
            )
        )
        if self.settings.runtime in ("docker", "podman") or any(t.startswith("run:rehearse") for t in self.planned):
            for line in self.collect_orphans():
                self.tell("progress", "orphans", text=line)
        if not (self.workspace.report / "report.json").exists():
            self.write_report()

    def collect_orphans(self) -> list[str]:
        """Stop what provably dead runs of ours left behind; an engine that does not answer is the probe's to report."""
        found = []
        for name in sorted({"local", self.settings.runtime} - {"slurm"}):
            with suppress(UserError):
                found += choose(name, workspace=self.workspace.name).collect_orphans()
        return found

    def execute(self, stage: Stage) -> Outcome:
        """Do the stage; before the first one the old report gives way to one in which nothing has run yet.

        A call that finds everything fresh never gets here: it neither renders a skeleton nor needs one.
        """
        self.write_report()
        if stage.kind == "run":
            ahead.submit(self, stage)
        return super().execute(stage)

    def depend(self, task: str, root: str) -> None:
        """Keep that `task` was not done because `root` was not a Pass."""
        self.roots[task] = root

    def write_report(self) -> None:
        """Write the report of what is known now; a later call replaces it. Equal content is not rendered again."""
        now = answer.compose(self)
        if now != self.report:
            from tasks import report

            report.write(now, self.workspace.root)
            self.report = now

    def _publish(self, folder: Path | None) -> None:
        """Put the reports of `folder` where `reports=` says; None takes old ones away from there."""
        if self.settings.reports:
            from tasks import report

            report.publish(folder, self.settings.reports)

    def finish(self) -> tuple[Verdict, str]:
        """Write the last report, give the workspace back, and return the answer with its sentence."""
        if self.stop.is_set():
            ahead.let_go(self)
        self.write_report()
        self._publish(self.workspace.report)
        self._held.close()
        found = self.report or {}
        return Verdict(found["result"]), found["sentence"]


_current: list[Invocation] = []


def current() -> Invocation:
    """Return the invocation of this process, made from the command line on first use."""
    if not _current:
        from doit import doit_cmd

        flags = tuple(
            word for word in sys.argv[1:] if settings.is_override(word) and word[:1] in "~+" and "=" not in word
        )
        _current.append(Invocation(settings.load(doit_cmd._CMDLINE_VARS or {}, flags)))  # noqa: SLF001 - get_var asks one
    return _current[0]
