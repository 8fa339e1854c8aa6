"""The pipeline of one invocation: stages in order, each brought up to date from its record or executed.

    image, sync -> probe -> unit:<suite>, config:<case> -> run:<case> -> metrics:<case> -> check:<case>

doit decides order and selection; whether a stage is fresh is decided here, by its input digest and its record. Every
stage leaves an `Outcome` under its task name; `answer.py` makes the report out of them.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tasks import (
    attempts,
    cpu,
    gpus,
    images,
    inflight,
    levels,
    probe,
    records,
)
from tasks.attempts import Place, Tree
from tasks.checkouts import TREES, Checkouts
from tasks.errors import UserError
from tasks.files import read_json, sha256_json, write_json
from tasks.reason import Reason, Verdict
from tasks.runtimes import choose
from tasks.stage import Done, Outcome, Stage, code

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from tasks.levels import Case, Levels, Suite
    from tasks.records import Record
    from tasks.runtimes.slurm_commands import Offer
    from tasks.settings import Settings


class Pipeline(Checkouts):
    """Everything the stages of one invocation share. Made once by dodo.py; nothing is read before it is needed."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.outcomes: dict[str, Outcome] = {}
        self.proofs: dict[str, Path] = {}  # measured with another family, not judged yet
        self.stop = threading.Event()
        self.listeners: list[Callable[[str, str, Mapping[str, Any]], None]] = []
        self._keys: dict[str, str] = {}  # task -> input digest of what is being executed
        self.sent: set[str] = set()  # run tasks whose jobs this invocation submitted before their turn
        self.gpu_hours = 0.0  # that this invocation may have used, at most
        self.planned: list[str] = []
        self.resolving = threading.Lock()
        self.resolved: dict[str, tuple[Path, list[dict[str, Any]]]] = {}

    # what the invocation is about -----------------------------------------------------------------------------------

    @cached_property
    def levels(self) -> Levels:
        """Return the checked levels file."""
        return levels.load(self.settings.levels, self.settings.build / "cache")

    @cached_property
    def records(self) -> records.Records:
        """Return the records of the workspace."""
        return records.Records(self.workspace.root)

    @cached_property
    def gpus(self) -> gpus.Gpus:
        """Return the GPUs of this host, or of the best node that Slurm offers; asked once."""
        return gpus.visible() if self.offer is None else self.offer.gpus()

    @cached_property
    def offer(self) -> Offer | None:
        """Return what Slurm offers, asked once; None for the runtimes of one machine."""
        if self.settings.runtime != "slurm":
            return None
        from tasks.runtimes.slurm_commands import Controller, site_of

        return Controller(site_of(self.settings.slurm)).offered()

    def tell(self, kind: str, subject: str, **facts: Any) -> None:
        """Pass an event on to the console and the reports."""
        for listener in self.listeners:
            listener(kind, subject, facts)

    # bringing a stage up to date ------------------------------------------------------------------------------------

    def reuse(self, stage: Stage) -> bool:
        """Return whether a record makes `stage` fresh; if so its outcome and artefact are put in place."""
        if self.settings.fresh and stage.kind in {"run", "unit"}:
            return False
        return self.recall(stage, reusable=True)

    def recall(self, stage: Stage, *, reusable: bool = False) -> bool:
        """Return whether a sound record has exactly these inputs, whatever it came to; see `reuse`."""
        record = self.records.find(stage.kind, stage.name, stage.inputs())
        if record is None or (reusable and not record.reusable):
            return False
        damage = self.records.damaged(record)
        if damage is not None:
            self.tell("stale", stage.task, reason=damage)
            return False
        self._settle(stage, record, cached=True)
        return True

    def execute(self, stage: Stage) -> Outcome:
        """Do the stage now, record it durably, and return its outcome. UserError becomes Blocked, never a traceback."""
        inputs = stage.inputs()
        why = records.why_again(self.records.latest(stage.kind, stage.name), inputs)
        started = time.monotonic()
        self._keys[stage.task] = key = records.input_digest(inputs)
        done = stage.execute()
        record = records.Record(
            stage=stage.kind,
            name=stage.name,
            inputs=inputs,
            artefact={**done.artefact, "verdict": done.verdict, "reasons": [r.as_dict() for r in done.reasons]},
            reusable=done.reusable,
            evidence=done.evidence,
            finished=records.utc_now(),
            duration_s=round(time.monotonic() - started, 3),
            host=os.uname().nodename,
            gpus=done.gpus,
        )
        self.records.save(record)
        while (taken := inflight.find(self.workspace.attempts, stage.task, key)) is not None:
            inflight.close(taken)
        return self._settle(stage, record, cached=False, why=why)

    def _settle(self, stage: Stage, record: Record, *, cached: bool, why: str = "") -> Outcome:
        write_json(self.workspace.artefact(stage.kind, stage.name), record.artefact, only_if_changed=True)
        reasons = tuple(Reason(**r) for r in record.artefact["reasons"])
        outcome = Outcome(Verdict(record.artefact["verdict"]), reasons, record, cached, why)
        self.outcomes[stage.task] = outcome
        return outcome

    def block(self, task: str, error: Exception) -> Outcome:
        """Keep that `task` could not be done for a reason that the user can mend, or that we must."""
        theirs = isinstance(error, UserError | OSError)  # a disk, a permission: its own words say what and where
        kind = "in_flight" if isinstance(error, inflight.InFlightError) else "precondition" if theirs else "internal"
        text = str(error) if theirs else f"internal error: {type(error).__name__}: {error}"
        outcome = Outcome(Verdict.BLOCKED, (Reason(kind, task, text),))
        self.outcomes[task] = outcome
        return outcome

    # sync, image and probe ------------------------------------------------------------------------------------------

    def sync(self) -> bool:
        """Scan the three checkouts, freeze them, and say what each is; always done, 50 ms when nothing changed."""
        for kind in TREES:
            self.tree(kind)
            self.revision(kind)
        self.outcomes["sync"] = Outcome(Verdict.PASS)
        return True

    @cached_property
    def place(self) -> Place:
        """Return where the levels run: runtime, interpreter and image of the settings.

        An interpreter of the CPU environment brings its stand-ins along, so that probe and unit suites can be had
        without a GPU; the label tells, and no level's case becomes a Pass by it.
        """
        chosen = self.settings
        runtime = choose(
            chosen.runtime, workspace=self.workspace.name, site=chosen.slurm, detach=chosen.detach,
            say=lambda text: self.tell("progress", "slurm", text=text),
        )  # fmt: skip
        image = images.resolve(chosen, runtime, progress=lambda text: self.tell("progress", "image", text=text))
        if chosen.runtime != "local":
            return Place(runtime, "python3", image.as_dict())
        built, its = cpu.ready(chosen.build / "cpu"), chosen.python.parent.resolve()
        same = built is not None and built.python.parent.resolve() == its
        if not same and chosen.build / "cpu" in its.parents:
            raise UserError(f"python={chosen.python} belongs to an older CPU environment: `./doitw cpu` renews it")
        return Place(runtime, os.fspath(chosen.python), image.as_dict(), built if same else None, rehearsal=False)

    @cached_property
    def cpu_place(self) -> Place:
        """Return the CPU environment of rehearsals and proofs on this machine, built on first use."""
        built = cpu.linked(self.settings.build / "cpu", lambda line: self.tell("progress", "cpu", text=line))
        image = {"ref": "CPU environment", "digest": None, "id": built.digest}
        runtime = choose("local", workspace=self.workspace.name)
        return Place(runtime, os.fspath(built.python), image, built, rehearsal=True)

    @cached_property
    def rehearsal_place(self) -> Place:
        """Return where rehearsals run: the CPU environment here, the image of it, or under Slurm the same mounted.

        Only the word on the command line counts: docker is the default of the levels, and a rehearsal needs neither an
        engine nor an image. Under Slurm the build folder is on the nodes, too, and two digests name the place: the
        image's, and the environment's beside it.
        """
        said = self.settings.origins.get("runtime") == "the command line"
        if not said or self.settings.runtime == "local":
            return self.cpu_place
        from tasks import cpu_image

        if self.settings.runtime == "slurm":
            return cpu_image.mounted(self.cpu_place, self.place)
        return cpu_image.place(self.settings, self.workspace.name, lambda line: self.tell("progress", "cpu", text=line))

    def image(self) -> Stage:
        """Return the stage that names the image and how it fits NeMo-RL, or the local interpreter's environment."""
        from tasks import fingerprint

        return fingerprint.stage(self)

    def probe(self, *, environment_name: str = "") -> Stage:
        """Return the import probe of the place where levels run, or of another environment ("cpu", "baseline")."""
        baseline = environment_name == "baseline"

        def inputs() -> dict[str, str]:
            place, trees = self.place_of(environment_name), self.trees(baseline=baseline)
            return {
                "image": sha256_json(place.image),
                "probe": code("containers/probe.py", "containers/agent.py", "tasks/probe.py"),
                **{kind: tree.components[kind] for kind, tree in trees.items()},
            }

        return Stage(
            f"probe-{environment_name}" if environment_name else "probe",
            "",
            inputs,
            lambda: self._probe(environment_name, baseline=baseline),
        )

    def place_of(self, environment_name: str) -> Place:
        """Return the place of an environment: "cpu" is the rehearsals', everything else the levels'."""
        if environment_name != "cpu":
            return self.place
        return self.rehearsal_place

    def _probe(self, name: str, *, baseline: bool) -> Done:
        place, trees = self.place_of(name), self.sound_trees(baseline=baseline)
        task = f"probe-{name}" if name else "probe"
        folder = self.folder(task, task)

        def command(paths: Mapping[str, str]) -> attempts.Command:
            result = f"{paths['attempt']}/answers.json"
            asked = probe.question(
                place.interpreter, result, in_image=place.runtime.name != "local" and not place.rehearsal
            )
            write_json(folder / "question.json", asked)
            argv = (place.interpreter, f"{paths['agent']}/probe.py", f"{paths['attempt']}/question.json")
            return attempts.Command(argv, paths["nemo_rl"], 3 * probe.TIMEOUT_S, cuda=False)

        attempt = self.perform(place, trees, folder, task, command)
        roots = {kind: place.root(kind, folder, trees) for kind in TREES}
        verdict, reasons = probe.judge(read_json(folder / "answers.json"), roots)
        if attempt.exit is None:
            reasons = [Reason("engine", "probe", attempt.engine_detail or "the agent wrote no exit.json"), *reasons]
        reasons = [_in_checkout(r, self.path_map(folder, trees, place)) for r in reasons]
        proof = attempts.evidence_files(folder, self.workspace.root)
        attempts.clear_work(folder)
        return Done(
            {"attempt": os.fspath(folder.relative_to(self.workspace.root)), "image": dict(place.image)},
            verdict, tuple(reasons), reusable=verdict is Verdict.PASS, evidence=proof,
        )  # fmt: skip

    def in_flight(self, task: str) -> Path | None:
        """Return the attempt of `task` that a cluster is at for exactly these inputs, or None."""
        finished = not self.settings.fresh or task in self.sent
        return inflight.find(self.workspace.attempts, task, self._keys.get(task, ""), finished=finished)

    def folder(self, task: str, name: str) -> Path:
        """Return the attempt folder for `task`: the one in flight, else a fresh one below `name`."""
        return self.in_flight(task) or attempts.new_folder(self.workspace.attempts, name)

    def perform(
        self,
        place: Place,
        trees: Mapping[str, Tree],
        folder: Path,
        task: str,
        command: Callable[[Mapping[str, str]], attempts.Command],
    ) -> attempts.Attempt:
        """Run one command for `task`, telling listeners where its log is while it runs."""
        self.tell("attempt", task, folder=folder)
        labels = {
            "nemo-rl-e2e.attempt": folder.name,
            inflight.TASK: task,
            inflight.KEY: self._keys.get(task, ""),
            "nemo-rl-e2e.workspace": self.workspace.name,
        }
        return attempts.perform(
            place, trees, folder, command,
            stop=self.stop, poll=lambda: self.tell("poll", task, folder=folder), labels=labels,
        )  # fmt: skip

    def path_map(self, folder: Path, trees: Mapping[str, Tree], place: Place) -> dict[str, str]:
        """Return run-time path -> the user's checkout, so that a frame names the file that the user edits."""
        return {
            place.root(kind, folder, trees): os.fspath(self.manifests[kind].root)
            for kind in TREES
            if trees[kind].path.parent.parent == self.workspace.snapshots
        }

    # suites and cases: what to do is in suites.py, runs.py and judging.py ---------------------------------------------

    def unit(self, suite: Suite) -> Stage:
        """Return the stage of a unit suite."""
        from tasks import suites

        return Stage("unit", suite.name, lambda: suites.inputs(self, suite), lambda: suites.execute(self, suite))

    def config(self, case: Case) -> Stage:
        """Return the stage in which NeMo-RL's own loader resolves the case's config, before a GPU is touched."""
        from tasks import resolution

        return Stage("config", case.id, lambda: resolution.inputs(self, case), lambda: resolution.execute(self, case))

    def run(self, case: Case) -> Stage:
        """Return the stage that executes a case and records what it left behind, judging nothing."""
        from tasks import runs

        return Stage("run", case.id, lambda: runs.inputs(self, case), lambda: runs.execute(self, case))

    def metrics(self, case: Case) -> Stage:
        """Return the stage that merges a run's event files."""
        from tasks import judging

        return Stage("metrics", case.id, lambda: judging.metrics_inputs(self, case), lambda: judging.merge(self, case))

    def check(self, case: Case) -> Stage:
        """Return the stage that decides the verdict of a case from its evidence."""
        from tasks import judging

        return Stage("check", case.id, lambda: judging.check_inputs(self, case), lambda: judging.judge(self, case))

    def case(self, text: str) -> Case:
        """Return the case called `text`; "rehearse.", "baseline.", "repeat." in front give it in that form."""
        if text.startswith("repeat."):
            return replace(self.case(text.removeprefix("repeat.")), id=text)
        for prefix in ("rehearse.", "baseline."):
            if text.startswith(prefix):
                found = self.levels.case(text.removeprefix(prefix))
                return levels.rehearse(found) if prefix == "rehearse." else replace(found, id=text)
        return self.levels.case(text)

    def environment_of(self, case: Case) -> str:
        """Return which environment a case's probe and run use: "", "cpu" or "baseline"."""
        prefix = case.id.removeprefix("repeat.").partition(".")[0]
        return {"rehearse": "cpu", "baseline": "baseline"}.get(prefix, "")


def _in_checkout(reason: Reason, path_map: Mapping[str, str]) -> Reason:
    text = reason.text
    for run_time, checkout in path_map.items():
        text = text.replace(run_time, checkout)
    return replace(reason, text=text)
