"""What a Dockerfile takes from outside: its base images and the files of the build context, for one target.

Pure. Only the stages that the target reaches count; `ARG` values are filled in as the builder would. What a RUN line
downloads is not seen: that is what digests of the result are for.
"""

from __future__ import annotations

import fnmatch
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tasks.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

_HEREDOC = re.compile(r"<<-?[\"']?(\w+)[\"']?")
_VARIABLE = re.compile(r"\$\{(\w+)(?::?([-+])([^}]*))?\}|\$(\w+)")
# the classic builder refuses these (seen: docker 20.10 and 28.2 without buildx)
_BUILDKIT = re.compile(r"<<-?[\"']?\w+|--(?:mount=|link\b|chmod=|exclude=|keep-git-dir|network=)")


@dataclass(slots=True)
class Stage:
    """One FROM: its base (a stage or an image), the stages it copies or mounts from, the context files it copies."""

    name: str
    base: str
    froms: list[str] = field(default_factory=list)
    copies: list[tuple[str, tuple[str, ...], tuple[str, ...]]] = field(default_factory=list)  # from, sources, excluded


@dataclass(frozen=True, slots=True)
class Needs:
    """What the target takes from outside: image references, and (sources, excluded) patterns of the context."""

    bases: tuple[str, ...]
    sources: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """Yield (instruction, rest) with continued lines joined, comments and here-documents left out."""
    lines = iter(text.splitlines())
    for line in lines:
        whole = line.strip()
        if not whole or whole.startswith("#"):
            continue
        while whole.endswith("\\"):
            more = next(lines, "").strip()
            whole = whole[:-1].rstrip() + (" " + more if not more.startswith("#") else " \\")
        word, _, rest = whole.partition(" ")
        yield word.upper(), rest.strip()
        if word.upper() in ("RUN", "COPY", "ADD"):
            for end in _HEREDOC.findall(rest):
                for body in lines:
                    if body.strip() == end:
                        break


def needs_buildkit(text: str) -> str:
    """Return the first feature of the Dockerfile that the classic builder lacks, or ''."""
    return next((m[0] for _, rest in instructions(text) for m in [_BUILDKIT.search(rest)] if m), "")


def needs(text: str, target: str = "", args: Mapping[str, str] | None = None, contexts: Iterable[str] = ()) -> Needs:
    """Return what building `target` (the last stage if empty) takes from outside.

    `contexts`: stages that the checkout itself replaces (`--build-context NAME=.`). UserError for an unknown target.
    """
    stages, given = _stages(text, args or {}), set(contexts)
    by_name = {stage.name: stage for stage in stages}
    if not stages or (target and target not in by_name):
        raise UserError(
            f"target {target!r}: no such stage in the Dockerfile; there are: {', '.join(by_name) or 'none'}"
        )
    todo, seen = [target or stages[-1].name], set[str]()
    bases, sources = set[str](), []
    while todo:
        stage = by_name[todo.pop()]
        if stage.name in seen:
            continue
        seen.add(stage.name)
        for other in (stage.base, *stage.froms, *(source for source, _, _ in stage.copies if source)):
            if other in given or other == "scratch":
                continue
            if other in by_name:
                todo.append(other)
            else:
                bases.add(other)
        sources += [(paths, excluded) for source, paths, excluded in stage.copies if not source or source in given]
    return Needs(tuple(sorted(bases)), tuple(sources))


def _stages(text: str, args: Mapping[str, str]) -> list[Stage]:
    values: dict[str, str] = {}  # global ones, for FROM and --from
    local: dict[str, str] = {}
    stages: list[Stage] = []
    for word, rest in instructions(text):
        if word == "ARG":
            name, given, default = rest.partition("=")
            value = args.get(
                name, _filled(default.strip("\"'"), {**values, **local}) if given else values.get(name, "")
            )
            (local if stages else values)[name] = value
        elif word == "FROM":
            words = [w for w in _filled(rest, values).split() if not w.startswith("--")]
            if not words:
                raise UserError(f"FROM {rest}: empty without a value; give --build-arg=NAME=VALUE")
            name = words[2] if len(words) == 3 and words[1].upper() == "AS" else str(len(stages))
            stages.append(Stage(name, words[0]))
            local = {}
        elif word in ("COPY", "ADD") and stages and "<<" not in rest:
            words = _filled(rest, {**values, **local}).strip("[]").replace('",', '" ').replace('"', "").split()
            flags = [w for w in words if w.startswith("--")]
            paths = tuple(w for w in words if not w.startswith("--"))[:-1]
            source = next((f.partition("=")[2] for f in flags if f.startswith("--from=")), "")
            source = stages[int(source)].name if source.isdecimal() and int(source) < len(stages) else source
            excluded = tuple(f.partition("=")[2] for f in flags if f.startswith("--exclude="))
            kept = tuple(p for p in paths if not re.match(r"[a-z+]+://|git@", p))
            if kept or source:
                stages[-1].copies.append((source, kept, excluded))
        elif word == "RUN" and stages:
            stages[-1].froms += re.findall(r"--mount=\S*?\bfrom=([^,\s]+)", _filled(rest, {**values, **local}))
    return stages


def _filled(text: str, values: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        name, sign, other, plain = match.groups()
        found = values.get(name or plain, "")
        if sign == "+":
            return str(other) if found else ""
        return found or str(other or "")

    return _VARIABLE.sub(value, text)


def copied(files: Iterable[str], sources: Iterable[tuple[tuple[str, ...], tuple[str, ...]]]) -> list[str]:
    """Return which of the context's files the COPY sources take; a pattern that takes none is left to the builder."""
    chosen = set()
    names = list(files)
    for patterns, excluded in sources:
        for pattern in (p.lstrip("/").removeprefix("./").rstrip("/") for p in patterns):
            for name in names:
                parts = name.split("/")
                depth = pattern.count("/") + 1
                inside = pattern in ("", ".") or fnmatch.fnmatchcase("/".join(parts[:depth]), pattern)
                relative = name if pattern in ("", ".") else "/".join(parts[depth - (name == pattern) :])
                if inside and not any(_under(relative, out) for out in excluded):
                    chosen.add(name)
    return sorted(chosen)


def _under(name: str, pattern: str) -> bool:
    pattern = pattern.removesuffix("/**").rstrip("/")
    return any(fnmatch.fnmatchcase("/".join(name.split("/")[: n + 1]), pattern) for n in range(name.count("/") + 1))
