"""What a person or a program sees while doit runs: one line an event, live where there is a terminal, JSON on request.

`Reporter` is doit's reporter protocol; it writes the report after every task and the answer at the end, and it stops
what runs when the process is told to stop. A face only prints.
"""

from __future__ import annotations

import os
import re
import statistics
import sys
import time
from typing import TYPE_CHECKING, Any, ClassVar, TextIO

from tasks.faces import Face, Json, Plain, Undisturbed
from tasks.reason import Verdict

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from doit.exceptions import BaseFail
    from doit.task import Task

    from tasks.invocation import Invocation
    from tasks.stage import Outcome

TAIL_BYTES = 8192
STEP = re.compile(rb"=+ Step (\d+)/(\d+) =+")
LOG_LINES = 10  # of a failed stage
PROGRESS_S = 1.0  # a log's end is read at most this often


def face(out: TextIO, *, as_json: bool) -> Face:
    """Return the face for this output: JSON on request, live on a terminal, lines elsewhere (NO_COLOR: no colours)."""
    if as_json:
        return Json(out)
    if out.isatty() and os.environ.get("TERM", "dumb") != "dumb" and not os.environ.get("NO_COLOR"):
        from tasks.live import Live

        return Live(out)
    return Plain(out, colour=False)


def look_at(log: Path) -> tuple[str, str]:
    """Return ("step 1/2", last line) from the end of a growing log; empty strings while there is nothing."""
    try:
        with log.open("rb") as source:
            source.seek(0, os.SEEK_END)
            source.seek(max(0, source.tell() - TAIL_BYTES))
            tail = source.read()
    except OSError:
        return "", ""
    steps = STEP.findall(tail)
    lines = [line for line in tail.replace(b"\r", b"\n").split(b"\n") if line.strip()]
    last = lines[-1].decode("utf-8", "replace")[:160] if lines else ""
    last = re.sub(r"\x1b\[[0-9;]*[A-Za-z]|[\x00-\x08\x0b-\x1f]", "", last)
    return (f"step {int(steps[-1][0])}/{int(steps[-1][1])}" if steps else ""), last


def failure(now: Invocation, task: str) -> list[str]:
    """Return what a reader of a failed stage wants next: ten lines of its log, the cause among them, and a command."""
    from tasks.report.text import read_around, read_tail

    kind, _, name = task.partition(":")
    records = [found.record for one in (task, f"run:{name}") if (found := now.outcomes.get(one))]
    facts: dict[str, Any] = {}
    for record in filter(None, records):
        facts = {**record.artefact, **facts}
    path = facts["attempts"][-1]["path"] if facts.get("attempts") else facts.get("attempt")
    if path is None:
        return []  # it had no turn: the reason is all there is
    log = now.workspace.root / path / "run.log"
    line = (facts.get("first_error") or {}).get("line")
    tail = read_tail(log, max_lines=LOG_LINES)
    rows = [f"{'>' if n == line else ' '} {n:6}  {text}" for n, text in read_around(log, line or 0, before=4, after=5)]
    rows = rows or [f"  {text}" for text in (tail.lines if tail else ())]
    shown = name if kind == "check" else task
    again = [] if now.workspace.demo else [f"  next: ./doitw why {shown}"]
    return [f"  {log}", *(row[:200] for row in rows), *again]


def told(task: str, outcome: Outcome) -> tuple[str, str]:
    """Return (verdict, text) of a finished task: its first reason; a run that ended well is recorded, not judged."""
    verdict = "" if outcome.verdict is Verdict.PASS and task.startswith("run:") else str(outcome.verdict)
    if not outcome.reasons:
        return verdict, "" if verdict else "recorded, reused" if outcome.cached else "recorded"
    first, *others = outcome.reasons
    return verdict, first.text.partition("\n")[0] + (f" (and {len(others)} more)" if others else "")


class Reporter:
    """doit's reporter: doit calls, this passes on; its words are Pass, Fail, Blocked, Skipped."""

    desc = "verdicts, live or as lines"
    as_json: ClassVar[bool] = False

    def __init__(self, outstream: TextIO, _options: Mapping[str, Any]) -> None:
        from tasks import invocation

        self.now: Invocation = invocation.current()
        heard: Any = Undisturbed(outstream)
        self.face = face(heard, as_json=type(self).as_json)
        self.now.listeners.append(self._heard)
        self.begun = False
        self._looked: dict[str, tuple[float, str]] = {}
        self.answer: tuple[Verdict, str] | None = None

    # what the pipeline tells ----------------------------------------------------------------------------------------

    def _heard(self, kind: str, subject: str, facts: Mapping[str, Any]) -> None:
        if kind == "progress":
            self.face.show("progress", subject, facts["text"])
        elif kind == "row":
            self.face.show("row", subject, facts["text"])
        elif kind == "stale":
            self.face.show("progress", subject, f"stale: {facts['reason'].text}")
        elif kind == "poll":
            when, before = self._looked.get(subject, (0.0, ""))
            if time.monotonic() - when < PROGRESS_S:
                return
            step, last = look_at(facts["folder"] / "run.log")
            self._looked[subject] = (time.monotonic(), step or before)
            if self.face.live or (step and step != before):
                self.face.show("step", subject, step or before, last=last)

    # what doit tells ------------------------------------------------------------------------------------------------

    def initialize(self, tasks: Mapping[str, Task], selected: list[str]) -> None:
        """Begin: everything that the selected tasks need is the plan of the report."""
        planned: dict[str, list[str]] = {}

        def add(name: str) -> None:
            if name not in planned and name in tasks:
                for needed in tasks[name].task_dep:
                    add(needed)
                if tasks[name].actions:
                    planned[name] = tasks[name].task_dep

        for name in selected:
            add(name)
        self.now.begin(selected, planned)
        self.begun = True

    def get_status(self, task: Task) -> None:
        """Notice that doit asks whether a task is fresh."""

    def execute_task(self, task: Task) -> None:
        """Show that a task starts."""
        if task.actions and not task.name.startswith(("metrics:", "check:", "image", "sync")):
            self.face.show("start", task.name, "", **self._forecast(task.name))

    def _forecast(self, task: str) -> dict[str, Any]:
        """Return how many seconds the stage took in earlier records, and whether it uses GPUs of this host."""
        kind, _, name = task.partition(":")
        spent = [record.duration_s for record in self.now.records.history(kind, name) if record.reusable]
        here = kind == "run" and self.now.settings.runtime != "slurm" and not name.startswith("rehearse.")
        return {"usual_s": statistics.median(spent) if spent else None, "gpus": self.now.case(name).gpus if here else 0}

    def _finished(self, task: Task) -> None:
        outcome = self.now.outcomes.get(task.name)
        if outcome is not None:
            verdict, text = told(task.name, outcome)
            self.face.show("done", task.name, text, verdict=verdict, cached=outcome.cached)
            if outcome.verdict in (Verdict.FAIL, Verdict.BLOCKED):
                for row in failure(self.now, task.name):
                    self.face.show("row", task.name, row)
        if outcome is None or (outcome.record and not outcome.cached) or outcome.verdict is not Verdict.PASS:
            self.now.write_report()  # not after sync, which is always done: a no-op call renders nothing

    def add_success(self, task: Task) -> None:
        """Show a finished task."""
        self._finished(task)

    def skip_uptodate(self, task: Task) -> None:
        """Show a reused task."""
        self._finished(task)

    def skip_ignore(self, task: Task) -> None:
        """Show a task that the user told doit to ignore: it is not done, so it is no Pass."""
        self.face.show("progress", task.name, "ignored by `doit ignore`; `doit forget` takes that back")

    def add_failure(self, task: Task, fail: BaseFail) -> None:
        """Show a task that is no Pass; one that had no turn names the root that stopped it."""
        if task.name not in self.now.outcomes and type(fail).__name__ == "UnmetDependency":
            parents = [dep for dep in task.task_dep if dep in self.now.roots or self._is_bad(dep)]
            root = self.now.roots.get(parents[0], parents[0]) if parents else "an earlier stage"
            self.now.depend(task.name, root)
            return
        if task.name not in self.now.outcomes:
            cause = getattr(fail, "exception", None) or RuntimeError(fail.get_msg().strip().splitlines()[-1])
            self.now.block(task.name, cause)
            self._keep_traceback(task, fail)
        self._finished(task)

    def _is_bad(self, name: str) -> bool:
        outcome = self.now.outcomes.get(name)
        return outcome is not None and outcome.verdict is not Verdict.PASS

    def _keep_traceback(self, task: Task, fail: BaseFail) -> None:
        path = self.now.workspace.root / "internal-error.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{task.name}\n{fail.get_msg()}\n", encoding="utf-8")
        self.face.show("progress", task.name, f"internal error, please report it: {path}")

    def cleanup_error(self, exception: BaseFail) -> None:
        """Show an error of doit's clean-up."""
        self.face.show("progress", "doit", exception.get_msg())

    def runtime_error(self, msg: str) -> None:
        """Show an error of doit itself."""
        self.face.show("progress", "doit", msg)

    def teardown_task(self, task: Task) -> None:
        """Notice a teardown; no task of ours has one."""

    def complete_run(self) -> None:
        """Write the last report and say the answer, also after Ctrl-C and SIGTERM."""
        if not self.begun:
            self.face.close()
            return
        verdict, sentence = self.now.finish()
        interrupted = isinstance(sys.exc_info()[1], (KeyboardInterrupt, SystemExit)) or self.now.stop.is_set()
        if interrupted and verdict is Verdict.PASS:
            verdict, sentence = Verdict.BLOCKED, "interrupted"
        self.answer = (verdict, sentence)
        if not interrupted:  # whoever stopped the run knows, and waits for its end
            from tasks import notify

            for warning in notify.tell(self.now.report or {}, self.now.workspace.report, self.now.settings.notify):
                self.face.show("note", "notify", warning)
        page = self.now.workspace.report / "index.html"
        self.face.show("result", "result", f"Result: {verdict} - {sentence}", verdict=str(verdict))
        self.face.show("result", "report", f"Report: {page}", path=str(page))
        self.face.close()
