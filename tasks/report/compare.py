"""compare.html: two attempts, or the newest attempts of two Bridge revisions, side by side; `doit report compare=A,B`.

`find` names attempts by id (or its beginning) or by revision or digest of the Bridge that they ran; `view` is what the
template shows. Nothing is run and nothing is judged: every verdict is that of the attempt's own verdict.json.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from tasks.digests import difference
from tasks.errors import UserError
from tasks.files import read_json
from tasks.report import facts, html, pages
from tasks.report.curves import curve, number, read_series
from tasks.report.text import one_line

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from tasks.workspace import Workspace

MAX_CURVES = 120  # of all pairs, and 12 of one
MAX_FILES = 40  # that differ between two trees
MAX_PAIRS = 50
ALWAYS = ("Attempt", "Started", "Duration")  # differ without meaning anything
_REVISION = re.compile(r"[0-9a-f]{7,64}")
TREES = (("bridge", "Bridge"), ("mcore", "Megatron-LM"), ("nemo_rl", "NeMo-RL"))

Attempt = dict[str, Any]


def attempts(workspace: Workspace) -> Iterator[Attempt]:
    """Yield every attempt of a case that has left its facts, oldest first, with its verdict, checks and path."""
    for path in sorted(workspace.attempts.glob("*/*/attempt.json"), key=lambda p: p.parent.name):
        known, judged = read_json(path), read_json(path.with_name("verdict.json")) or {}
        if isinstance(known, dict):
            checks = facts.rows(read_json(path.with_name("checks.json")))
            yield {**judged, **known, "case": path.parts[-3], "checks": checks}


def find(workspace: Workspace, words: str) -> list[tuple[Attempt, Attempt]]:
    """Return the pairs that `A,B` names: two attempts, or for two revisions the newest of each case that both ran."""
    names = [word.strip() for word in words.split(",")]
    if len(names) != 2 or not all(names):
        raise UserError(f"compare={words}: name two attempts or two Bridge revisions: compare=A,B")
    known = list(attempts(workspace))
    left, right = (_named(known, name) for name in names)
    if len(left) == len(right) == 1:
        return [(next(iter(left.values())), next(iter(right.values())))]  # also of two cases
    both = [case for case in left if case in right]
    if not both:
        raise UserError(f"compare={words}: no case ran with both: {', '.join(left)} and {', '.join(right)}")
    return [(left[case], right[case]) for case in both[:MAX_PAIRS]]


def _named(known: list[Attempt], name: str) -> dict[str, Attempt]:
    """Return case -> attempt of an attempt's id, its path, or a Bridge revision or digest."""
    plain = name.removeprefix("sha256:").rstrip("/").rpartition("/")[2]
    found = {one["id"]: one for one in known if str(one["id"]).startswith(plain)}
    if len(found) == 1:
        return {one["case"]: one for one in found.values()}
    if len(found) > 1:
        raise UserError(f"{name} is the beginning of {len(found)} attempts: {', '.join(list(found)[:4])} ...")
    revised = {one["case"]: one for one in known if _REVISION.fullmatch(plain) and _ran(one, plain)}  # the newest last
    if not revised:
        newest = ", ".join(f"{one['case']} {one['id']}" for one in known[:-4:-1]) or "none yet"
        raise UserError(f"no attempt and no Bridge revision {name} in this workspace; newest: {newest}")
    return revised


def _ran(one: Attempt, revision: str) -> bool:
    tree = facts.table(facts.table(one.get("trees")).get("bridge"))
    return any(str(tree.get(key) or "").removeprefix("sha256:").startswith(revision) for key in ("sha", "digest"))


def render(workspace: Workspace, words: str) -> str:
    """Return the page; UserError where `words` name nothing."""
    found = find(workspace, words)
    curves = min(12, MAX_CURVES // len(found))
    pairs = [view(workspace, *pair, curves=curves) for pair in found]
    return pages.template("compare.html.j2").render(pairs=pairs, workspace=one_line(workspace.name)) + "\n"


def view(workspace: Workspace, a: Attempt, b: Attempt, *, curves: int) -> dict[str, Any]:
    """Return what the template shows of one pair: B is drawn, A is what it is compared with."""
    words = [facts.verdict_of(one).value for one in (a, b)]
    same = a["case"] == b["case"]
    return {
        "title": a["case"] if same else f"{a['case']} and {b['case']}",
        "verdicts": words,
        "sentence": f"both {words[0]}" if words[0] == words[1] else f"{words[0]} with A, {words[1]} with B",
        "reasons": [[one_line(r.get("text") or "") for r in facts.rows(one.get("reasons"))[:5]] for one in (a, b)],
        "rows": [(label, x, y, x != y and label not in ALWAYS) for label, x, y in _rows(a, b)],
        "checks": _checks(a["checks"], b["checks"]),
        "curves": _curves(workspace.root, a, b, curves),
        "files": [(title, _files(workspace.snapshots, kind, a, b)) for kind, title in TREES],
        "command": f"diff {a['path']}/run.log {b['path']}/run.log",
    }


def _rows(a: Attempt, b: Attempt) -> Iterator[tuple[str, str, str]]:
    """Yield label, A and B of everything that describes an attempt."""

    def steps(one: Attempt) -> str:
        known = facts.table(one.get("steps"))
        return f"{known.get('reached') or 0}/{known.get('requested')}" if known else "unknown"

    def tree(one: Attempt, kind: str) -> str:
        known = facts.table(facts.table(one.get("trees")).get(kind))
        return f"{str(known.get('sha') or 'no commit')[:12]} {str(known.get('digest') or '')[:19]}".strip()

    image = [facts.table(one.get("image")) for one in (a, b)]
    pair = (a, b)
    lines = (
        ("Attempt", [one["id"] for one in pair]),
        ("Case", [one["case"] for one in pair]),
        ("Started", [facts.stamp(when) if (when := facts.started(one)) else "unknown" for one in pair]),
        ("Steps", [steps(one) for one in pair]),
        ("Exit", [f"{one.get('rc')} ({one.get('reason') or 'unknown'})" for one in pair]),
        ("Duration", [html.duration(facts.seconds(one.get("duration_s"))) for one in pair]),
        *((title, [tree(one, kind) for one in pair]) for kind, title in TREES),
        ("Image", [one.get("digest") or one.get("id") or one.get("ref") or "unknown" for one in image]),
        ("Runtime", [one.get("runtime") or "unknown" for one in pair]),
        ("GPUs", [facts.gpu_text(one.get("gpus")) or "none" for one in pair]),
        ("Overrides", [" ".join(map(str, one.get("overrides") or ())) or "none" for one in pair]),
    )
    for label, (x, y) in lines:
        yield label, one_line(x), one_line(y)


def _checks(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return each check of either attempt with both values and their difference."""
    left, right = ({c.get("expr"): c for c in one} for one in (a, b))
    found = []
    for expr in dict.fromkeys([*left, *right]):
        both = left.get(expr, {}), right.get(expr, {})
        x, y = (facts.finite(c.get("value")) for c in both)
        change = f"{y - x:+.4g}" if x is not None and y is not None else ""
        percent = f" ({(y - x) / abs(x) * 100:+.3g} %)" if x and y is not None else ""
        limit = next((c["limit"] for c in both[::-1] if c.get("limit") is not None), None)
        found.append({
            "expr": one_line(expr or "?"),
            "verdicts": [facts.verdict_of(c).value if c else "not there" for c in both],
            "shown": [number(c["value"]) if c.get("value") is not None else "none" for c in both],
            "limit": number(limit) if limit is not None else "none",
            "change": change + percent,
            "bar": html.bar(both[1].get("value"), limit, [x]),
        })  # fmt: skip
    return found


def _curves(root: Path, a: Attempt, b: Attempt, most: int) -> list[Any]:
    """Return the curves of B with A beneath: asserted tags first, then the others that both have."""
    before, after = (read_series(root, f"{one['path']}/metrics.json") for one in (a, b))
    limits: dict[str, list[float]] = {}
    for check in b["checks"] or a["checks"]:
        for tag in (tags := facts.check_tags(check)):
            limit = facts.finite(check.get("limit")) if len(tags) == 1 else None
            limits.setdefault(tag, []).extend([] if limit is None else [limit])
    common = [tag for tag in sorted(after) if tag in before and tag not in limits]
    drawn = (
        curve(one_line(tag), facts.table(after.get(tag)), facts.table(before.get(tag)), limits.get(tag, []), 60)
        for tag in [*limits, *common][:most]
    )
    return [found for found in drawn if found is not None]


def _files(snapshots: Path, kind: str, a: Attempt, b: Attempt) -> list[str]:
    """Return how the trees differ, file by file, as long as both snapshots are there."""
    digests = [str(facts.table(facts.table(one.get("trees")).get(kind)).get("digest")) for one in (a, b)]
    if digests[0] == digests[1]:
        return []
    files: dict[str, Mapping[str, Any]] = {}
    for path in snapshots.glob(f"{kind}-*/manifest.json"):
        known = json.loads(path.read_bytes())
        files[known.get("digest")] = known.get("files") or {}
    if not all(digest in files for digest in digests):
        return ["the trees differ; a snapshot is gone, so that the files are unknown"]
    lines = difference(files[digests[0]], files[digests[1]])
    return lines[:MAX_FILES] + ([f"and {len(lines) - MAX_FILES} more"] if len(lines) > MAX_FILES else [])
