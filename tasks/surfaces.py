"""Which part of the Bridge a path belongs to, and what a change there calls for: tasks/surfaces.yaml as data.

Rules are ordered, the first that matches decides; a path that none knows is `unknown` and calls for more, never for
less. `definitions` of a rule only ever add: a changed definition that matches them calls for further variants.
"""

from __future__ import annotations

import fnmatch
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tasks.marked_yaml import Marked, Place

SHIPPED = Path(__file__).with_name("surfaces.yaml")
_LISTS = frozenset(("paths", "levels", "variants", "suites"))


@dataclass(frozen=True, slots=True)
class Extra:
    """Groups that a change of certain definitions (patterns such as `*MTP*`) calls for in addition."""

    definitions: tuple[str, ...]
    groups: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Surface:
    """A component: its paths, the groups ("level0", "vlm") and suites that a change calls for, and why.

    `probe` asks for the import probe only. With no group, no suite and no probe, `why` says why nothing is called for.
    """

    component: str
    paths: tuple[str, ...]
    groups: tuple[str, ...]
    suites: tuple[str, ...]
    probe: bool
    why: str
    also: tuple[Extra, ...]
    line: int = 0

    def matches(self, path: str) -> bool:
        """Tell whether `path` belongs here."""
        return any(_regex(glob).fullmatch(path) for glob in self.paths)

    def extra_groups(self, definitions: Iterable[str]) -> tuple[str, ...]:
        """Return what the changed definitions call for beside `groups`."""
        names = tuple(definitions)
        return tuple(
            group
            for extra in self.also
            if any(fnmatch.fnmatchcase(name, pattern) for name in names for pattern in extra.definitions)
            for group in extra.groups
        )


@dataclass(frozen=True, slots=True)
class Surfaces:
    """The whole map."""

    rules: tuple[Surface, ...]
    unknown: Surface

    def of(self, path: str) -> Surface:
        """Return the component of `path`."""
        return next((rule for rule in self.rules if rule.matches(path)), self.unknown)


def load(path: Path = SHIPPED) -> Surfaces:
    """Read a map of surfaces. Raises FileError with lines for every mistake."""
    from tasks.marked_yaml import FileError, read

    marked = read(path)
    value = marked.value if isinstance(marked.value, dict) else {}
    problems = [
        (marked.line((key,)), f"unknown key {key!r}; known: schema, unknown, rules")
        for key in value
        if key not in {"schema", "unknown", "rules"}
    ]
    if value.get("schema") != 1:
        problems.append((1, "schema: must be 1"))
    listed = value.get("rules")
    rules = [
        _surface(r, ("rules", i), marked, problems) for i, r in enumerate(listed if isinstance(listed, list) else [])
    ]
    unknown = _surface(value.get("unknown"), ("unknown",), marked, problems)
    if not rules:
        problems.append((1, "rules: must be a list of components"))
    if not unknown.groups:
        problems.append(
            (marked.line(("unknown",)), "unknown: must call for levels; an unknown path widens, never narrows")
        )
    if problems:
        raise FileError(path, problems)
    return Surfaces(tuple(rules), unknown)


def _surface(value: Any, place: Place, marked: Marked, problems: list[tuple[int, str]]) -> Surface:
    line = marked.line(place)
    rule = value if isinstance(value, dict) else {}
    known = {"component", "paths", "levels", "variants", "suites", "probe", "why", "also"}
    for key in rule:
        if key not in known:
            problems.append((marked.line((*place, key)), f"unknown key {key!r}; known: {', '.join(sorted(known))}"))
        if key in _LISTS and not isinstance(rule[key], list):
            problems.append((marked.line((*place, key)), f"{key}: must be a list"))
    if not isinstance(rule.get("component"), str):
        problems.append((line, "component: its name is missing"))
    groups = _groups(rule)
    empty = not groups and not rule.get("suites") and not rule.get("probe")
    if empty and not rule.get("why"):
        problems.append((line, f"{rule.get('component')}: calls for nothing and does not say why"))
    if place[0] == "rules" and not rule.get("paths"):
        problems.append((line, f"{rule.get('component')}: has no paths"))
    also = tuple(
        Extra(tuple(e.get("definitions") or ()), _groups(e)) for e in rule.get("also") or () if isinstance(e, dict)
    )
    return Surface(
        str(rule.get("component")), tuple(rule.get("paths") or ()), groups, tuple(rule.get("suites") or ()),
        bool(rule.get("probe")), str(rule.get("why") or ""), also, line,
    )  # fmt: skip


def _groups(rule: dict[str, Any]) -> tuple[str, ...]:
    levels, variants = rule.get("levels"), rule.get("variants")
    numbered = [f"level{n}" for n in levels] if isinstance(levels, list) else []
    return (*numbered, *(variants if isinstance(variants, list) else ()))


@cache
def _regex(glob: str) -> re.Pattern[str]:
    """Return the expression of a glob in which `**` crosses folders and `*`, `?` do not; `x/**` is x itself, too."""
    out = ""
    for part in re.split(r"(/\*\*$|\*\*/|\*\*|\*|\?)", glob):
        out += {"/**": "(/.*)?", "**/": "(.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}.get(part, re.escape(part))
    return re.compile(out, re.DOTALL)
