"""summary.md: the block that goes into a pull request, at most 60 lines, every deliverable named.

The first line is the answer. Nothing is left implicit: what was not asked for says "Not requested", a Pass from an
earlier record says when and where it ran, and what ended before the Bridge built a model says so.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from tasks import refit
from tasks.reason import Verdict
from tasks.report import answer, facts
from tasks.report.text import one_line

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tasks.report.facts import Deliverable

MAX_LINES = 60
NOT_REQUESTED = "Not requested"
_ORDER = (Verdict.FAIL, Verdict.BLOCKED, Verdict.PASS, Verdict.SKIPPED)
_LEVEL = re.compile(r"level[0-6]$")
# What GitHub or GitLab would read as markup, a mention or a link to an issue inside one line of a list.
_MARKDOWN = re.compile(r"[`*\\]|(?<!\w)_|_(?!\w)|<(?=[A-Za-z/!?])|\]\(|[@!]\w|#\d|~~|^[-+#>]|^\d+[.)]")


def render(report: Mapping[str, Any]) -> str:
    """Return summary.md for `report`."""
    verdict, sentence = answer.headline(report)
    every = facts.deliverables(report)
    cases = [d for d in every if d.kind == "case"]
    asked = report.get("requested")
    coverage = ", ".join(map(str, asked)) if isinstance(asked, (list, tuple)) else ""
    models = dict.fromkeys(one_line(d.item["model"]) for d in cases if d.item.get("model"))
    head = [
        f"Result: {verdict} - {_inert(sentence)}",
        "",
        f"Requested coverage: {_say(coverage) or 'nothing'}",
        "",
        f"Model: {', '.join(map(_code, models)) or 'not named by any case'}",
        "",
        "Deliverables:",
        "",
        *(f"- {name}: {text}" for name, text in named_deliverables(report)),
    ]
    foot = ["", "Evidence:", "", *_evidence(report, cases)]
    for title, lines, most in (("Limitations", limitations(report), 6), ("Follow-ups", follow_ups(report), 4)):
        foot += ["", f"{title}:", "", *(f"- {line}" for line in _first([_say(x) for x in lines] or ["none"], most))]
    room = MAX_LINES - len(head) - len(foot)
    return "\n".join([*head, *_cases(cases, room), *foot]) + "\n"


def named_deliverables(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return name and answer of each deliverable of the skill's block, in its order, in Markdown."""
    every = facts.deliverables(report)
    real = [d for d in every if d.kind == "case" and not d.rehearsal and not d.id.startswith(("baseline.", "repeat."))]
    numbered = [d for d in real if _LEVEL.match(str(d.item.get("level")))]
    variants = [d for d in real if d.item.get("level") != "level0"]
    suites = [d for d in every if d.kind == "suite"]
    tests = sum(_int(d.item.get("tests")) for d in suites)
    counts = f"{answer.count(len(suites), 'suite')}, {answer.count(tests, 'test')}"
    policy = [d for d in real if d.item.get("level") == "level0"] or numbered
    return [
        ("Bridge-side checks", _answer(suites, counts)),
        ("Local Bridge import in NeMo-RL", _import(every)),
        ("NeMo-RL Megatron policy run", _answer(policy, _levels(policy))),
        ("Requested variants", _answer(variants, _levels(variants))),
        ("Metrics/log capture", _capture(real or [d for d in every if d.rehearsal])),
        ("Learning signal (level 6)", _answer([d for d in real if d.item.get("level") == "level6"], "")),
        ("CPU proof (not a level)", _answer([d for d in every if d.kind == "proof"], "")),
        ("Rehearsal on stand-ins (not a level)", _answer([d for d in every if d.rehearsal], "")),
    ]


def limitations(report: Mapping[str, Any]) -> list[str]:
    """Return what the result does not say: what the report lists, and what follows from how it was obtained."""
    every = facts.deliverables(report)
    given = report.get("limitations")
    listed = [one_line(x) for x in given] if isinstance(given, (list, tuple)) else []
    found = []
    if report.get("demo") and not any(x.startswith("demo") for x in listed):
        found.append("demo workspace: generated repositories, so nothing here is evidence about a real Bridge")
    if any(d.rehearsal for d in every) and not any(x.startswith("rehearsal") for x in listed):
        found.append("a rehearsal uses tiny models and stand-ins on a CPU: it is never a level's Pass")
    if cached := [d for d in every if d.cached]:
        found.append(f"not run now but taken from earlier records: {_ids(cached)}")
    if excused := [d for d in every if d.quarantined]:
        found.append(f"failed in quarantine, not counted: {_ids(excused)}")
    if flaky := [d for d in every if d.item.get("flaky")]:
        found.append(f"passed only after a retry: {_ids(flaky)}")
    found += listed
    if not any("learn" in x for x in found) and not any(
        d.item.get("level") == "level6" and d.verdict is Verdict.PASS for d in every
    ):
        found.append("no learning-signal claim")
    return found


def follow_ups(report: Mapping[str, Any]) -> list[str]:
    """Return what to do next: what the report lists, else one line for each cause."""
    given = report.get("follow_ups")
    if isinstance(given, (list, tuple)) and given:
        return [one_line(x) for x in given]
    found = []
    for d in facts.deliverables(report):
        if d.verdict is Verdict.FAIL and not d.quarantined:
            found.append(f"mend {d.id}: {one_line(d.reason, 160)}")
        elif d.verdict is Verdict.BLOCKED and not d.dependent:
            found.append(f"run {d.id}" if d.not_run else f"mend the environment of {d.id}: {one_line(d.reason, 160)}")
    return found


def _answer(found: Sequence[Deliverable], passed: str) -> str:
    """Return the worst verdict of `found` with its reason, or what `passed` says."""
    if not found:
        return NOT_REQUESTED
    left = [d for d in found if not d.quarantined]
    verdict = next((v for v in _ORDER if any(d.verdict is v for d in left)), Verdict.SKIPPED)
    same = [d for d in left or found if d.verdict is verdict] or list(found)
    if verdict is Verdict.PASS:
        cached = [d for d in same if d.cached]
        reused = f"; cached: {_code(cached[0].id)} from {facts.cached_text(cached[0].item)}" if cached else ""
        more = f" and {len(cached) - 1} more" if len(cached) > 1 else ""
        return f"Pass - {_say(passed or _ids(same))} ({len(same)} of {len(found)}){reused}{more}"
    first = min(same, key=lambda d: d.dependent)
    why = f"quarantined: {facts.quarantine_text(first.item)}" if first.quarantined else first.reason
    more = f" (and {len(same) - 1} more)" if len(same) > 1 else ""
    return f"{verdict} - {_code(first.id)}: {_say(why, 240)}{more}"


def _import(every: Sequence[Deliverable]) -> str:
    """Return the origin of megatron.bridge as the probe found it; a case that passed implies that one did."""
    probe = next((d for d in every if d.kind == "probe"), None)
    if probe is None:
        ran = [d for d in every if d.kind == "case" and d.verdict is Verdict.PASS]
        return "Pass - required by each case that passed" if ran else f"{NOT_REQUESTED} (no probe in this report)"
    if probe.verdict is not Verdict.PASS:
        return _answer([probe], "")
    if probe.reason:
        return f"Pass - {_say(probe.reason)}"
    origins = facts.table(probe.item.get("origins"))
    paths = dict.fromkeys(str(facts.table(o).get("megatron.bridge") or "") for o in origins.values())
    return f"Pass - {', '.join(_code(p) for p in paths if p) or 'every interpreter imports the tree under test'}"


def _capture(cases: Sequence[Deliverable]) -> str:
    """Return whether logs, metrics and assertions are there, and where, for the first case that matters most."""
    ran = [d for d in cases if facts.attempts(d.item)]
    if not ran:
        return (
            f"Blocked - nothing ran, so there is no log ({answer.count(len(cases), 'case')})"
            if cases
            else NOT_REQUESTED
        )
    first = min(ran, key=lambda d: (d.quarantined, _ORDER.index(d.verdict)))
    judged = [d for d in ran if d.verdict in {Verdict.PASS, Verdict.FAIL} and not d.quarantined]
    checks = [c for d in judged for c in facts.rows(d.item.get("checks"))]
    bad = sum(facts.verdict_of(c) is not Verdict.PASS for c in checks)
    bare = [d for d in ran if not d.item.get("metrics") and not d.quarantined]
    word = "Fail" if bad else "Blocked" if bare or not checks else "Pass"
    status = f"{len(checks) - bad} of {len(checks)} assertions hold" if checks else "no assertion was evaluated"
    metrics = first.item.get("metrics")
    where = f"log {_code(facts.log_path(first.item) or 'none')}, metrics {_code(metrics) if metrics else 'none'}"
    return f"{word} - {status}; {where}" + (f"; no metrics from {_say(_ids(bare))}" if bare else "")


def _cases(cases: Sequence[Deliverable], room: int) -> list[str]:
    """Return one line a case, the worst first, in at most `room` lines; those left out are counted."""
    if not cases or room < 5:
        return []
    ranked = sorted(cases, key=lambda d: (d.quarantined, _ORDER.index(d.verdict), d.dependent))
    lines = []
    for d in ranked:
        steps = facts.table(d.item.get("steps"))
        asked, reached = steps.get("requested"), steps.get("reached")
        marks = [f"steps {reached if reached is not None else 0}/{asked}"] if asked is not None else []
        marks += [f"cached: {facts.cached_text(d.item)}"] if d.cached else []
        marks += ["rehearsal"] if d.rehearsal else []
        marks += ["flaky: passed after a retry"] if d.item.get("flaky") and d.verdict is Verdict.PASS else []
        marks += ["quarantined"] if d.quarantined else []
        marks += [told] if (told := refit.sentence(d.item.get("refit"))) else []
        text = f": {_say(d.reason, 240)}" if d.reason and d.verdict is not Verdict.PASS else ""
        if d.verdict is Verdict.BLOCKED and not d.dependent and not d.not_run and facts.before_construction(d.item):
            text += f" ({facts.NOT_EVIDENCE})"
        if baseline := _baseline(d.item):
            text += f" - {baseline}"
        notes = f" ({', '.join(marks)})" if marks else ""
        lines.append(f"- {d.verdict} {_code(d.id)}{notes}{text}")
    return ["", "Cases:", "", *_first(lines, room - 3)]


def _baseline(case: Mapping[str, Any]) -> str:
    kind, text = facts.baseline_words(case)
    sha = facts.table(case.get("baseline")).get("sha")
    return f"{f'{kind}: ' if kind else ''}{_say(text)}{f' ({_code(str(sha)[:12])})' if sha else ''}" if text else ""


def _evidence(report: Mapping[str, Any], cases: Sequence[Deliverable]) -> list[str]:
    source = facts.table(report.get("provenance"))
    lines = [_tree(title, source.get(key)) for title, key in (("Bridge", "bridge"), ("NeMo-RL", "nemo_rl"))]
    if source.get("mcore"):
        lines.append(_tree("Megatron-LM", source["mcore"]))
    image = facts.table(source.get("image"))
    where = [_code(image["ref"]) if image.get("ref") else "", _code(image["digest"]) if image.get("digest") else ""]
    gpus = facts.gpu_text(source.get("gpus")) or "no GPU"
    lines.append(
        f"- Ran on: {_say(source.get('host') or 'unknown host')}, {_say(gpus)}{''.join(f', {w}' for w in where if w)}"
    )
    ran = [d for d in cases if d.item.get("command")]
    ranked = sorted(ran, key=lambda d: (d.quarantined, _ORDER.index(d.verdict), d.dependent))
    for d in ranked[:2]:
        lines.append(f"- Command of {_code(d.id)}: {_code(one_line(facts.command_line(d.item['command']), 600))}")
        lines += [f"- Key line of {_code(d.id)}: {line}" for line in _key_lines(d.item)]
    return lines


def _key_lines(case: Mapping[str, Any]) -> list[str]:
    error = facts.table(case.get("first_error"))
    if error.get("text"):
        place = f"{error.get('file') or 'run.log'}:{error.get('line', '?')}"
        return [f"{_code(one_line(error['text'], 300))} ({_say(place)})"]
    evidence = case.get("evidence")
    given = evidence.get("key_lines") if isinstance(evidence, dict) else None
    if isinstance(given, (list, tuple)) and given:
        return [_code(one_line(line, 300)) for line in given[:2]]
    if facts.verdict_of(case) is not Verdict.PASS:
        return [_say(text, 300) for text in facts.reason_texts(case)[:2]]
    return [_say(c.get("text") or c.get("expr"), 300) for c in facts.rows(case.get("checks"))[:1]]


def _tree(title: str, value: object) -> str:
    tree = facts.table(value)
    given = tree.get("dirty")
    dirty = [one_line(x) for x in given] if isinstance(given, (list, tuple)) else []
    files = ", ".join(map(_code, dirty[:8])) + (f" and {len(dirty) - 8} more" if len(dirty) > 8 else "")
    state = f"{len(dirty)} dirty: {files}" if dirty else "clean"
    return f"- {title}: {_code(tree.get('sha') or 'unknown')} ({state})" if tree else f"- {title}: unknown"


def _first(lines: Sequence[str], most: int) -> list[str]:
    return list(lines) if len(lines) <= most else [*lines[: most - 1], f"- ... and {len(lines) - most + 1} more"]


def _levels(found: Sequence[Deliverable]) -> str:
    return ", ".join(dict.fromkeys(one_line(d.item.get("level", "?")) for d in found))


def _ids(found: Sequence[Deliverable]) -> str:
    return one_line(", ".join(d.id for d in found), 160)


def _int(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _code(text: object) -> str:
    """Return `text` as a Markdown code span that its own backticks cannot end."""
    line = one_line(text, 2000)
    fence = "`" * (max((len(run) for run in re.findall(r"`+", line)), default=0) + 1)
    pad = " " if line.startswith("`") or line.endswith("`") else ""
    return f"{fence}{pad}{line}{pad}{fence}" if line else ""


def _say(text: object, limit: int = 400) -> str:
    """Return `text` for Markdown: as it is where nothing in it is markup, else as code, so nobody gets mentioned."""
    line = one_line(text, limit)
    return _code(line) if _MARKDOWN.search(line) else line


def _inert(sentence: str) -> str:
    """Return the sentence of the first line as programs expect it, with HTML disarmed."""
    return re.sub(r"<(?=[A-Za-z/!?])", "&lt;", one_line(sentence))
