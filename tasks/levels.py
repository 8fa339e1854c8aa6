"""levels.yaml as data: what can be run, what it needs, and what it must show.

`load` checks the file through `tasks.levels_schema` (pydantic) once and keeps the result as plain JSON, keyed by the
content of the file and of the schema; a call that finds it there imports neither YAML nor pydantic. Everything that a
case inherits (from `defaults`, its `kind`, a rehearsal profile) is already merged into it: readers see whole cases.
"""

from __future__ import annotations

import datetime as dt
import hashlib
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks import files
from tasks.errors import UserError, suggest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

SOURCES = tuple(
    f"{name}.py"
    for name in (
        "levels",
        "levels_schema",
        "levels_models",
        "levels_merge",
        "levels_rules",
        "marked_yaml",
        "checks",
        "grammar",
        "weaknesses",
    )
)
"""The modules whose change makes a kept result worthless, beside the levels file itself."""


@dataclass(frozen=True, slots=True)
class Suite:
    """A set of unit tests of one checkout that runs without a GPU unless `gpus` says otherwise.

    `paths` and `args` go to pytest in the snapshot of `repo`; fewer than `min_tests` executed tests are no Pass.
    `interpreter` is the worker whose Python runs it; `reaches` names the trees whose change makes it stale.
    """

    name: str
    title: str
    repo: str
    paths: tuple[str, ...]
    min_tests: int
    args: tuple[str, ...]
    reaches: tuple[str, ...]
    timeout_s: float
    interpreter: str
    env: Mapping[str, str]
    gpus: int
    line: int


@dataclass(frozen=True, slots=True)
class Quarantine:
    """Why a case's Fail does not count for now. `until` is an ISO date; past it the levels file is in error."""

    reason: str
    owner: str
    until: str


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """How the case's own script runs on a CPU with a tiny model; values left out there are the case's own.

    `model` and `data` name what the CPU environment prepares; `{model}`, `{models}` (the folder of all) and `{data}` in
    `overrides` and `env` stand for their paths. `overrides` follow the case's. `gpus` are pretended ones, of all
    `nodes` together. `standins` are the packages that stand in for what a CPU lacks (vllm, flashinfer).
    """

    profile: str
    supported: bool
    reason: str
    overrides: tuple[str, ...]
    env: Mapping[str, str]
    gpus: int
    nodes: int
    timeout_s: float
    minutes: float
    steps: int | None
    checks: tuple[str, ...]
    expect_log: tuple[str, ...]
    forbid_log: tuple[str, ...]
    files: tuple[str, ...]
    real_work: tuple[str, ...]
    model: str
    data: str
    standins: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """One runnable unit of a level: a maintained script with Hydra overrides, or an explicit command.

    `name` is the task name, `original` the name as written. `script` (or else `command`) runs in a work tree of `repo`;
    `overrides` are appended to it. `logs` is the folder below which this case's event files appear, `also_logs` maps a
    prefix to further folders whose series are read as `PREFIX/tag`. `conversion` says how HF weights became Megatron
    ones: "fresh" (the log must not say "Skipping import."), "within_attempt" (a later phase may reuse what this attempt
    converted), "none". `real_work` are tags that must not be zero throughout. `compares` says what the checks hold
    against what; `not_mapping_evidence`, if not empty, why a Pass says nothing about weight mappings. `clean` are paths
    removed before the start, fixed ones outside the tree included. `{attempt}`, `{bridge}`, `{mcore}` and `{nemo_rl}`
    in the command, the overrides and `env` stand for the folders of the attempt.
    """

    id: str
    level: str
    name: str
    original: str
    title: str
    kind: str
    script: str | None
    command: tuple[str, ...] | None
    repo: str
    overrides: tuple[str, ...]
    env: Mapping[str, str]
    gpus: int
    nodes: int
    timeout_s: float
    minutes: float
    steps: int | None
    step_tag: str
    logs: str | None
    also_logs: Mapping[str, str]
    backend: str
    conversion: str
    checks: tuple[str, ...]
    expect_log: tuple[str, ...]
    forbid_log: tuple[str, ...]
    files: tuple[str, ...]
    clean: tuple[str, ...]
    done_pattern: str | None
    grace_s: float
    model: str
    also_models: tuple[str, ...]
    optional: bool
    quarantine: Quarantine | None
    needs: tuple[str, ...]
    compares: str
    not_mapping_evidence: str
    real_work: tuple[str, ...]
    limitations: tuple[str, ...]
    reaches: tuple[str, ...]
    rehearsal: Rehearsal | None
    no_rehearsal: str
    line: int

    def argv(self) -> tuple[str, ...]:
        """Return the command before placeholders and the user's overrides: `bash SCRIPT OVERRIDE...` or the command."""
        head = ("bash", self.script) if self.script is not None else self.command or ()
        return (*head, *self.overrides)

    def run_definition(self) -> dict[str, Any]:
        """Return what decides how the case runs, for its input digest; thresholds, words and the line are not in it."""
        return {k: v for k, v in asdict(self).items() if k in _RUN_KEYS}


_RUN_KEYS = frozenset((
    "script", "command", "repo", "overrides", "env", "gpus", "nodes", "timeout_s", "logs", "also_logs", "backend",
    "files", "clean", "done_pattern", "grace_s", "model", "also_models", "needs", "reaches",
))  # fmt: skip


@dataclass(frozen=True, slots=True)
class Level:
    """What a set of cases proves together. A group asks for its required cases (not optional) and its suites.

    `includes` names levels or variants whose required cases (`included`) and suites the group asks for as well.
    """

    id: str
    title: str
    proves: str
    does_not_prove: tuple[str, ...]
    required_when: str
    suites: tuple[str, ...]
    includes: tuple[str, ...]
    cases: tuple[Case, ...]
    line: int
    included: tuple[Case, ...] = ()

    @property
    def required(self) -> tuple[Case, ...]:
        """The cases that the level's Pass needs, its own and the included ones."""
        return (*(case for case in self.cases if not case.optional), *self.included)


@dataclass(frozen=True, slots=True)
class Levels:
    """A whole levels file. `warnings` are `FILE:LINE: text` lines about things that work but probably not as meant."""

    levels: Mapping[str, Level]
    suites: Mapping[str, Suite]
    path: Path
    warnings: tuple[str, ...] = field(default=())

    def cases(self) -> Iterator[Case]:
        """Yield every case, in the order of the file."""
        for level in self.levels.values():
            yield from level.cases

    def case(self, text: str) -> Case:
        """Return the case with this id, or level and name as written; raise UserError with a suggestion."""
        known = {case.id: case for case in self.cases()} | {f"{c.level}.{c.original}": c for c in self.cases()}
        if text in known:
            return known[text]
        raise UserError(f"{self.path}: unknown case {text!r}{suggest(text, known)} (doit levels)")

    def level(self, text: str) -> Level:
        """Return the level or variant called `text`; raise UserError with a suggestion."""
        if text in self.levels:
            return self.levels[text]
        raise UserError(f"{self.path}: unknown level {text!r}{suggest(text, self.levels)} (doit levels)")


def load(path: Path, cache: Path | None = None, *, today: dt.date | None = None) -> Levels:
    """Return the checked content of a levels file.

    `cache` is a folder for the kept JSON (a damaged or foreign file there is read past). `today` decides which
    quarantines have expired and is the local date if left out. Raises UserError; its text has a line `FILE:LINE: ...`
    per mistake.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(
            f"{path}: levels file cannot be read: {error.strerror or error} (levels=PATH names another)"
        ) from None
    key = _key(data)
    kept = cache / f"levels-{hashlib.sha256(str(path).encode()).hexdigest()[:12]}.json" if cache else None
    levels = _from_cache(kept, key, path) if kept else None
    if levels is None:
        from tasks.levels_schema import document

        plain = document(path)
        if kept:
            files.write_json(kept, {"key": key, "document": plain})
        levels = _build(plain, path)
    _refuse_expired(levels, today or dt.datetime.now().astimezone().date())
    return levels


def rehearse(case: Case) -> Case:
    """Return the case as its rehearsal runs: id `rehearse.<id>`, tiny model, pretended GPUs; placeholders still in it.

    Raises UserError with the reason if the case has no supported rehearsal.
    """
    plan = case.rehearsal
    if plan is None or not plan.supported:
        why = case.no_rehearsal if plan is None else plan.reason
        raise UserError(f"{case.id} has no rehearsal: {why}")
    return replace(
        case,
        id=f"rehearse.{case.id}",
        overrides=(*case.overrides, *plan.overrides),
        env={**case.env, **plan.env},
        gpus=plan.gpus,
        nodes=plan.nodes,
        timeout_s=plan.timeout_s,
        minutes=plan.minutes,
        steps=plan.steps,
        checks=plan.checks,
        expect_log=plan.expect_log,
        forbid_log=plan.forbid_log,
        files=plan.files,
        real_work=plan.real_work,
        model=plan.model,
        also_models=(),
        needs=(),
    )


def rows(levels: Levels, states: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return one JSON-able mapping per case for `doit levels`; `states` maps a case id to fresh, stale or never.

    Every key of the case is there, with what the level proves and does not prove, and `rehearsal` as yes or the reason
    why not.
    """
    result = []
    for level in levels.levels.values():
        for case in level.cases:
            plan = case.rehearsal
            row = asdict(case)
            row |= {
                "case": case.name,
                "level_title": level.title,
                "rehearsal": "yes" if plan and plan.supported else plan.reason if plan else case.no_rehearsal,
                "rehearsal_definition": asdict(plan) if plan else None,
                "proves": level.proves,
                "does_not_prove": level.does_not_prove,
                "required_when": level.required_when,
                "suites": level.suites,
                "gpu_minutes": case.gpus * case.minutes,
                "state": states.get(case.id, "never"),
            }
            result.append(row)
    return result


def _key(data: bytes) -> str:
    digest = hashlib.sha256(data)
    for name in SOURCES:
        digest.update(b"\0" + Path(__file__).with_name(name).read_bytes())
    return digest.hexdigest()


def _from_cache(kept: Path, key: str, path: Path) -> Levels | None:
    """Return the kept levels, or None if there are none for this key or the file is not what we wrote."""
    stored = files.read_json(kept)
    if not isinstance(stored, dict) or stored.get("key") != key:
        return None
    try:
        return _build(stored["document"], path)
    except (KeyError, TypeError, AttributeError):
        return None


def _build(plain: Mapping[str, Any], path: Path) -> Levels:
    """Make the frozen dataclasses out of the schema's plain JSON."""
    levels: dict[str, Level] = {}
    for name, values in plain["levels"].items():
        cases = tuple(_case(case) for case in values["cases"])
        levels[name] = Level(**{**_frozen(values), "cases": cases})
    for name, level in levels.items():
        if level.includes:
            levels[name] = replace(level, included=tuple(c for other in level.includes for c in levels[other].required))
    suites = {name: Suite(**_frozen(suite)) for name, suite in plain["suites"].items()}
    warnings = tuple(f"{path}:{line}: {text}" for line, text in plain["warnings"])
    return Levels(levels, suites, path, warnings)


def _case(plain: Mapping[str, Any]) -> Case:
    values = _frozen(plain)
    if plain["quarantine"] is not None:
        values["quarantine"] = Quarantine(**plain["quarantine"])
    if plain["rehearsal"] is not None:
        values["rehearsal"] = Rehearsal(**_frozen(plain["rehearsal"]))
    return Case(**values)


def _frozen(plain: Mapping[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in plain.items()}


def _refuse_expired(levels: Levels, today: dt.date) -> None:
    for case in levels.cases():
        held = case.quarantine
        if held and dt.date.fromisoformat(held.until) < today:
            raise UserError(
                f"{levels.path}:{case.line}: quarantine of {case.id} expired on {held.until} ({held.reason}); "
                f"{held.owner} mends the case or sets a new date"
            )


CASE_KEYS = tuple(f.name for f in fields(Case))
