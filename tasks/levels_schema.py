"""From a levels file to checked, merged, plain JSON; every mistake in it at once, each with its line and a suggestion.

`document(path)` is the only entry. It reads YAML with line numbers (tasks.marked_yaml), checks types
(tasks.levels_models), then whatever needs several keys (tasks.levels_rules), and merges what a case inherits
(tasks.levels_merge). Only a changed file comes here: see tasks.levels.load.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

from tasks import levels_models as models
from tasks.errors import suggest
from tasks.levels_merge import merged_case
from tasks.levels_rules import Notes, case_rules
from tasks.marked_yaml import FileError, Marked, Place, read

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

SAFE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
"""A name that doit (no "="), a folder and a JUnit class name take as it is."""

# Task names of ours that a variant or suite would hide, and doit's own commands.
RESERVED = frozenset((
    "auto", "baseline", "bench", "build", "bundle", "changed", "check", "clean", "completion", "config", "cpu",
    "demo", "doctor", "dumpdb", "fetch-models", "forget", "gate", "help", "ignore", "image", "info", "levels", "list",
    "metrics", "mutants", "plan", "probe", "proof", "rehearse", "repeat", "report", "reproduce", "reset-dep",
    "roundtrip", "run", "status", "strace", "suite", "sync", "tabcompletion", "test", "unit", "vendor",
    "why",
))  # fmt: skip
_TREES: dict[str, list[str]] = {"bridge": ["bridge", "mcore"], "nemo_rl": ["nemo_rl", "bridge", "mcore"]}


def document(path: Path) -> dict[str, Any]:
    """Return {"levels", "suites", "warnings"} of the file at `path`; raise FileError with every mistake in it."""
    marked = read(path)
    if not isinstance(marked.value, dict):
        raise FileError(path, [(1, "must be a mapping with the keys schema, suites, kinds, levels, variants")])
    try:
        model = models.FileModel.model_validate(marked.value)
    except ValidationError as error:
        raise FileError(path, [_told(e, marked) for e in error.errors()]) from None
    notes = Notes(marked)
    suites = _suites(model, notes)
    levels: dict[str, Any] = {}
    for part, named in (("levels", model.levels), ("variants", model.variants)):
        for name, level in named.items():
            identity = _level_id(part, name, levels, notes)
            levels[identity] = _level(level, (part, name), identity, model, suites=suites, notes=notes)
    _unique(levels, notes)
    _includes(model, levels, notes)
    if not any(level["cases"] or level["suites"] for level in levels.values()) and not notes.problems:
        notes.problem((), "no level has a case or a suite: nothing could ever be run")
    if notes.problems:
        raise FileError(path, notes.problems)
    return {"levels": levels, "suites": suites, "warnings": sorted(set(notes.warnings))}


def _suites(model: models.FileModel, notes: Notes) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, suite in model.suites.items():
        place = ("suites", name)
        safe = _safe(name, place, result, notes)
        result[safe] = {
            "name": safe,
            "title": suite.title or name,
            "repo": suite.repo,
            "paths": suite.paths,
            "min_tests": suite.min_tests,
            "args": suite.args,
            "reaches": suite.reaches or _TREES[suite.repo],
            "timeout_s": suite.timeout,
            "interpreter": suite.interpreter,
            "env": suite.env,
            "gpus": suite.gpus,
            "line": notes.marked.line(place),
        }
    return result


def _level_id(part: str, name: str, taken: Mapping[str, Any], notes: Notes) -> str:
    place = (part, name)
    if part == "levels":
        if not re.fullmatch(r"[0-9]{1,2}", name):
            tail = re.fullmatch(r"(?:level)?\s*([0-9]{1,2})", name)
            hint = f"write {tail[1]}" if tail else "other groups belong under `variants:`"
            notes.problem(place, f"level {name!r} is not a number; {hint}")
        return f"level{name}"
    if name in RESERVED or re.fullmatch(r"level[0-9]+", name):
        notes.problem(place, f"variant {name!r}: the name is a command or level already; choose another")
    return _safe(name, place, taken, notes)


def _level(
    level: models.LevelModel,
    place: Place,
    identity: str,
    model: models.FileModel,
    *,
    suites: Mapping[str, Any],
    notes: Notes,
) -> dict[str, Any]:
    names = []
    for i, wanted in enumerate(level.suites):
        safe = _mapped(wanted)
        if safe not in suites:
            notes.problem((*place, "suites", i), f"unknown suite {wanted!r}{suggest(wanted, list(suites))}")
        names.append(safe)
    cases: dict[str, Any] = {}
    for name, case in level.cases.items():
        at = (*place, "cases", name)
        safe = _safe(name, at, cases, notes)
        merged = merged_case(case, model, at, notes)
        cases[safe] = {
            **merged,
            "id": f"{identity}.{safe}",
            "level": identity,
            "name": safe,
            "original": name,
            "title": case.title or name,
            "line": notes.marked.line(at),
        }
        case_rules(cases[safe], at, notes)
    return {
        "id": identity,
        "title": level.title,
        "proves": level.proves,
        "does_not_prove": level.does_not_prove,
        "required_when": level.required_when,
        "suites": names,
        "includes": level.includes,
        "cases": list(cases.values()),
        "line": notes.marked.line(place),
    }


def _unique(levels: Mapping[str, Any], notes: Notes) -> None:
    """Check that no group and no case is called as another: a dot joins both, and records go by the whole name."""
    owners: dict[str, int] = {}
    named = [(level["id"], level["line"]) for level in levels.values()]
    named += [(case["id"], case["line"]) for level in levels.values() for case in level["cases"]]
    for name, line in named:
        if name in owners:
            notes.problems.append((line, f"{name!r} is called as what line {owners[name]} describes; rename one"))
        owners.setdefault(name, line)


def _includes(model: models.FileModel, levels: Mapping[str, Any], notes: Notes) -> None:
    """Check that a level includes groups that exist and have cases of their own: no chains, so no circles."""
    for part, named in (("levels", model.levels), ("variants", model.variants)):
        for name, level in named.items():
            for i, wanted in enumerate(level.includes):
                at = (part, name, "includes", i)
                if wanted not in levels:
                    notes.problem(at, f"unknown level or variant {wanted!r}{suggest(wanted, levels)}")
                elif levels[wanted]["includes"]:
                    notes.problem(at, f"{wanted!r} includes others itself; name those")
                else:
                    own = levels[f"level{name}" if part == "levels" else _mapped(name)]["suites"]
                    own += [suite for suite in levels[wanted]["suites"] if suite not in own]


def _mapped(name: str) -> str:
    return name if SAFE.fullmatch(name) else re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.")[:100]


def _safe(name: str, place: Place, taken: Mapping[str, Any], notes: Notes) -> str:
    """Return `name` as a task name; two names that become one are an error, since one would stand for the other."""
    safe = _mapped(name)
    if not safe:
        notes.problem(place, f"{name!r} has no letter or digit to make a task name of")
    elif safe in taken:
        notes.problem(place, f"{name!r} becomes the task name {safe!r}, which is taken already; rename one of them")
    elif safe != name:
        notes.warning(place, f"{name!r} is called {safe!r} on the command line")
    return safe


# -- pydantic's errors in the words and lines of the file --------------------------------------------------------------

_WANTED = {
    "list_type": "must be a list of lines `- ...`",
    "dict_type": "must be a mapping `name: ...`",
    "model_type": "must be a mapping of keys",
    "bool_type": "must be true or false",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "too_short": "must not be empty",
}
_MODELS: dict[str, type[BaseModel]] = {
    "suites": models.SuiteModel,
    "kinds": models.KindModel,
    "rehearsal_profiles": models.ProfileModel,
    "levels": models.LevelModel,
    "variants": models.LevelModel,
}


def _told(error: Any, marked: Marked) -> tuple[int, str]:
    """Return the line and the sentence for one entry of ValidationError.errors()."""
    loc: Place = tuple(error["loc"])
    kind, given = error["type"], error["input"]
    key = next((str(part) for part in reversed(loc) if not isinstance(part, int)), "the file")
    line = marked.line(loc)
    if kind == "extra_forbidden":
        return line, f"unknown key {key!r}{suggest(key, list(_known(loc[:-1])))}"
    if kind == "missing":
        return line, f"key {key!r} is missing"
    if kind == "value_error":
        return line, f"{key}: {error['ctx']['error']}"
    if kind == "list_type" and key == "command":
        return line, "command: must be a list of arguments; a shell string is never run"
    if kind in _WANTED:
        return line, f"{key}: {_WANTED[kind]}" + (", but has no value" if given is None else "")
    if kind == "string_type":
        if isinstance(given, dict):
            pair = next((f"'{k}={v}'" for k, v in given.items()), "''")
            return line, f"{key}: must be text; a colon and a blank make a mapping, so write {pair}"
        shown = "nothing" if given is None else str(given).lower() if isinstance(given, bool) else given
        return line, f"{key}: must be text but is {shown}; put it in quotes"
    if kind == "literal_error":
        allowed = re.findall(r"'([^']*)'", error["ctx"]["expected"])
        hint = suggest(str(given), allowed) if allowed else ""
        return line, f"{key}: {given!r} is not {error['ctx']['expected']}{hint}"
    return line, f"{key}: {error['msg'][0].lower()}{error['msg'][1:]}"


def _known(loc: Place) -> Iterable[str]:
    """Return the keys that may stand at `loc`."""
    model: type[BaseModel] = models.FileModel
    if len(loc) >= 2:
        model = _MODELS.get(str(loc[0]), models.FileModel)
        inner: dict[str, type[BaseModel]] = {"rehearsal": models.RehearsalModel, "quarantine": models.QuarantineModel}
        if len(loc) >= 4 and loc[2] == "cases":
            model = inner.get(str(loc[4]), models.CaseModel) if len(loc) > 4 else models.CaseModel
    return [field.alias or name for name, field in model.model_fields.items()]
