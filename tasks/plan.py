"""Which levels a difference calls for, why, and what that costs: pure, from changed paths and two data files.

    changed(repo, since) -> changes;  plan_for(changes, surfaces, levels) -> Plan

path -> component (tasks/surfaces.yaml) -> level or variant -> its required cases. A path that the map does not know
widens the plan; a change is left out only with a reason that is shown.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from tasks.changes import Change, changed
from tasks.surfaces import Surface, Surfaces
from tasks.surfaces import load as load_surfaces

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tasks.levels import Level, Levels

__all__ = ["Change", "Plan", "Row", "Surface", "Surfaces", "Why", "changed", "load_surfaces", "plan_for"]

_SHOWN = 4  # definitions named in one line
_DEPENDENCIES = ("pyproject.toml", ".gitmodules")


@dataclass(frozen=True, slots=True)
class Why:
    """One step of reasoning: this path, in this component, calls for the row's level."""

    path: str
    component: str
    text: str
    definitions: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return the step as one line for people."""
        shown = ", ".join(self.definitions[:_SHOWN]) + (" ..." if len(self.definitions) > _SHOWN else "")
        return f"{self.path}{f' ({shown})' if shown else ''} -> {self.component}: {self.text}"


@dataclass(frozen=True, slots=True)
class Row:
    """One thing to run: `level` is "probe", "unit", a level or a variant; `cases` are its required ones, or suites.

    `gpus` is what must be free at once, `gpu_minutes` the sum over the required cases of GPUs times minutes.
    """

    level: str
    title: str
    cases: tuple[str, ...]
    optional: tuple[str, ...]
    reasons: tuple[Why, ...]
    gpus: int
    minutes: float
    gpu_minutes: float


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run, what was left out and why, and what the reader should know beside it."""

    rows: tuple[Row, ...]
    ignored: tuple[Why, ...]
    unknown: tuple[str, ...]
    notes: tuple[str, ...]
    gpus: int
    gpu_minutes: float

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as JSON has it."""
        return asdict(self)

    def tasks(self) -> tuple[str, ...]:
        """Return the task names for `doit changed`, cheapest first."""
        named = {"unit": tuple(f"unit:{s}" for row in self.rows if row.level == "unit" for s in row.cases)}
        return tuple(name for row in self.rows for name in named.get(row.level, (row.level,)))


def plan_for(changes: Iterable[Change | str], surfaces: Surfaces, levels: Levels) -> Plan:
    """Return the plan for `changes`; plain strings are paths about which nothing more is known."""
    reasons: dict[str, list[Why]] = {}
    suites: dict[str, list[Why]] = {}
    ignored: list[Why] = []
    unknown: list[str] = []
    notes: list[str] = []
    for change in (Change(c) if isinstance(c, str) else c for c in changes):
        surface = surfaces.of(change.path)
        if change.ignored:
            ignored.append(Why(change.path, surface.component, change.ignored))
            continue
        why = Why(change.path, surface.component, change.detail or surface.why, change.definitions)
        groups = dict.fromkeys((*surface.groups, *surface.extra_groups(change.definitions)))
        tested = [s.name for s in levels.suites.values() if s.repo == "bridge" and _inside(change.path, s.paths)]
        wanted = dict.fromkeys((*surface.suites, *tested))
        if surface is surfaces.unknown:
            unknown.append(change.path)
        for group in groups:
            reasons.setdefault(group, []).append(why)
        if surface.probe:
            reasons.setdefault("probe", []).append(why)
        for suite in wanted:
            suites.setdefault(suite, []).append(why)
        if not groups and not surface.probe and not wanted:
            ignored.append(why)
        if change.path in _DEPENDENCIES:
            notes.append(f"{change.path} changed: a Bridge that is only put on the path keeps the image's dependencies")
    missing = [name for name in (*reasons, *suites) if name not in levels.levels and name not in levels.suites]
    notes += [f"{name} is called for but is not in {levels.path}" for name in missing if name != "probe"]
    rows = _rows(reasons, suites, levels)
    return Plan(
        tuple(rows), tuple(ignored), tuple(unknown), tuple(dict.fromkeys(notes)),
        max((row.gpus for row in rows), default=0), sum(row.gpu_minutes for row in rows),
    )  # fmt: skip


def _rows(reasons: dict[str, list[Why]], suites: dict[str, list[Why]], levels: Levels) -> list[Row]:
    rows = []
    if "probe" in reasons:
        rows.append(Row("probe", "import probe", (), (), tuple(reasons["probe"]), 0, 0.0, 0.0))
    named = [level for name, level in levels.levels.items() if name in reasons]
    covered = {suite for level in named for suite in level.suites}
    alone = tuple(name for name in suites if name in levels.suites and name not in covered)
    if alone:
        whys = tuple(dict.fromkeys(why for name in alone for why in suites[name]))
        cost = sum(levels.suites[n].gpus * levels.suites[n].timeout_s / 60 for n in alone)
        rows.append(Row("unit", "unit suites", alone, (), whys, max(levels.suites[n].gpus for n in alone), 0.0, cost))
    rows += [_row(level, reasons[level.id]) for level in named]
    return rows


def _row(level: Level, reasons: list[Why]) -> Row:
    required = level.required
    return Row(
        level=level.id,
        title=level.title,
        cases=tuple(case.id for case in required),
        optional=tuple(case.id for case in level.cases if case.optional),
        reasons=tuple(reasons),
        gpus=max((case.gpus for case in required), default=0),
        minutes=sum(case.minutes for case in required),
        gpu_minutes=sum(case.gpus * case.minutes for case in required),
    )


def _inside(path: str, roots: tuple[str, ...]) -> bool:
    return any(path == root.rstrip("/") or path.startswith(root.rstrip("/") + "/") for root in roots)
