"""junit.xml for any CI: flat, in the profile of Jenkins' junit-10.xsd and of Surefire's schema at once.

`plan` turns a report into suites of entries, junit-xml writes them, and a guard stands on both sides of it: strings
are cleaned on the way in; on the way out the tree is corrected (attributes no schema knows, `1e-05` times) and every
planned failure is looked for, since junit-xml turns a failure without words into a pass. What is not a Pass never
yields a file without a failure or an error: a CI that reads only this file must not be green.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

from tasks.reason import Verdict
from tasks.report import answer, facts
from tasks.report.text import clean, one_line, read_around, read_tail

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from datetime import datetime

MAX_LINES = 200  # of run.log in one system-out
MAX_BYTES = 64 << 10  # of one system-out; libxml2 refuses a text node over 10 MB
MAX_LOGS = 16 << 20  # bytes of all of them; GitLab refuses a file over 30 MB
MAX_TEXT = 16 << 10  # characters of one failure's text
# Whose first reason is one of these did not fail by its own doing, whatever the verdict's word.
_ERRORS = frozenset({"timeout", "infrastructure", "environment"})
_CHECK_KINDS = frozenset({"check", "checks"})


@dataclass(frozen=True, slots=True)
class Entry:
    """One testcase: `state` is pass, failure, error or skipped; `text` begins with `message`."""

    classname: str
    name: str
    time_s: float = 0.0
    state: str = "pass"
    type: str = ""
    message: str = ""
    text: str = ""
    system_out: str = ""
    flaky: tuple[str, ...] = ()


@dataclass(slots=True)
class Group:
    """One testsuite while it is collected."""

    name: str
    entries: list[Entry] = field(default_factory=list)
    properties: dict[str, str] = field(default_factory=dict)
    started: datetime | None = None


def render(report: Mapping[str, Any], root: Path) -> bytes:
    """Return junit.xml for `report`; `root` is the workspace folder, under which the attempts' logs lie."""
    from junit_xml import TestCase, TestSuite, to_xml_report_string

    groups = plan(report, root)
    suites = []
    for group in groups:
        cases = []
        for entry in group.entries:
            made = TestCase(entry.name, entry.classname, elapsed_sec=entry.time_s, stdout=entry.system_out or None)
            if entry.state == "failure":
                made.add_failure_info(entry.message, entry.text, entry.type)
            elif entry.state == "error":
                made.add_error_info(entry.message, entry.text, entry.type)
            elif entry.state == "skipped":
                made.add_skipped_info(entry.message, entry.text)
            cases.append(made)
        when = facts.stamp(group.started) if group.started else None
        suites.append(TestSuite(group.name, cases, properties=group.properties, timestamp=when))
    written = to_xml_report_string(suites, prettyprint=False, encoding="utf-8")
    tree = ET.fromstring(written)  # noqa: S314 - our own text of the line above
    _correct(tree, groups)
    tree.set("name", "nemo-rl-e2e demo" if report.get("demo") else "nemo-rl-e2e")
    ET.indent(tree)
    return bytes(ET.tostring(tree, encoding="utf-8", xml_declaration=True)) + b"\n"


def plan(report: Mapping[str, Any], root: Path) -> list[Group]:
    """Return the testsuites of `report`: probe, unit, proofs, one a level, each with the provenance as properties."""
    groups: dict[str, Group] = {}
    shared = _provenance(report)
    for found in facts.deliverables(report):
        name = {"probe": "probe", "suite": "unit", "proof": "proofs"}.get(found.kind) or facts.group_of(found)
        group = groups.setdefault(name, Group(name, properties=dict(shared)))
        if found.cached:
            group.properties[f"cached.{found.id}"] = facts.cached_text(found.item)
        if found.kind == "case":
            group.entries += _case_entries(found, root)
            times = [t for t in map(facts.started, facts.attempts(found.item)) if t]
            group.started = min([*times, *([group.started] if group.started else [])], default=None)
        else:
            group.entries += _plain_entries(found, root)
    every = [e for g in groups.values() for e in g.entries]
    verdict, sentence = answer.headline(report)
    if verdict is not Verdict.PASS and not any(e.state in {"failure", "error"} for e in every):
        entry = _say(Entry("nemo_rl_e2e", "result"), "error", "no_result", sentence)
        groups["result"] = Group("result", [entry], dict(shared))
    left = MAX_LOGS
    for group in groups.values():
        group.entries = [_within(entry, left := left - len(entry.system_out)) for entry in _distinct(group.entries)]
    return list(groups.values())


def _case_entries(found: facts.Deliverable, root: Path) -> Iterator[Entry]:
    """Yield `run` and one entry a check; the log goes with the first of them that is a failure or an error."""
    case = found.item
    checks = facts.rows(case.get("checks"))
    state, kind, message = _state(found)
    run = Entry(found.id, "run", facts.duration(case))
    details = "\n".join(facts.reason_texts(case)[1:])
    only_checks = (
        state == "failure"
        and any(facts.verdict_of(c) is not Verdict.PASS for c in checks)
        and {r.get("kind") for r in facts.rows(case.get("reasons"))} <= _CHECK_KINDS
    )
    log = _system_out(case, root) if state in {"failure", "error"} else ""
    if state == "pass":
        yield replace(run, flaky=_flaky(case))
    elif only_checks:
        yield run
    else:
        yield replace(_say(run, state, kind, message, details), system_out=log)
        log = ""
    for check in checks:
        entry = Entry(found.id, one_line(f"check: {check.get('expr', '?')}"))
        if found.verdict in {Verdict.BLOCKED, Verdict.SKIPPED}:
            # Not judged: what happened to the run is the answer, and the check's name stays in the report.
            yield _say(entry, "skipped", "", message if state == "skipped" else f"Blocked: {message}")
        elif facts.verdict_of(check) is Verdict.PASS:
            yield entry
        elif found.quarantined:
            yield _say(entry, "skipped", "", message)
        else:
            text = check.get("text") or f"{check.get('expr')}: got {check.get('value')}, limit {check.get('limit')}"
            yield replace(_say(entry, "failure", "check", text, details if only_checks else ""), system_out=log)
            log = ""


def _plain_entries(found: facts.Deliverable, root: Path) -> Iterator[Entry]:
    """Yield the entries of a probe, a unit suite (with each failed test) or a CPU proof (with each check)."""
    item = found.item
    state, kind, message = _state(found)
    entry = Entry(found.id, "tests" if found.kind == "suite" else "run", facts.seconds(item.get("duration_s")))
    details = "\n".join(facts.reason_texts(item)[1:])
    log = _system_out(item, root) if state in {"failure", "error"} else ""
    yield entry if state == "pass" else replace(_say(entry, state, kind, message, details), system_out=log)
    for test in facts.rows(item.get("failed_tests")):
        text = clean(test.get("message") or test.get("text") or "failed without a message")
        line = text.strip().partition("\n")[0]
        name = one_line(test.get("name") or "?")
        yield _say(Entry(found.id, name), "failure", "test", line, clean(test.get("text") or ""))
    for check in facts.rows(item.get("checks")):
        one = Entry(found.id, one_line(f"check: {check.get('name', '?')}"))
        text = f"{check.get('name')}: got {check.get('value')}, limit {check.get('limit')}"
        yield one if facts.verdict_of(check) is Verdict.PASS else _say(one, "failure", "check", text)


def _state(found: facts.Deliverable) -> tuple[str, str, str]:
    """Return state, type and message of a deliverable: the table of design.md, "JUnit profile"."""
    kind = facts.first_kind(found.item) or found.verdict.value.lower()
    if found.verdict is Verdict.PASS:
        return "pass", "", ""
    if found.verdict is Verdict.SKIPPED:
        return "skipped", "", f"Skipped: {found.reason}"
    if found.quarantined:
        return "skipped", "", f"Quarantined: {facts.quarantine_text(found.item)}: {found.reason}"
    if found.dependent:
        return "skipped", "", f"Blocked: {found.reason}"
    if found.verdict is Verdict.BLOCKED or kind in _ERRORS:
        return "error", kind, found.reason
    return "failure", kind, found.reason


def _say(entry: Entry, state: str, kind: str, message: object, details: str = "") -> Entry:
    """Return `entry` with words: never empty, one line as the message, repeated as the first line of the text."""
    line = one_line(message) or facts.NO_REASON
    rest = clean(details).removeprefix(line).strip("\n")
    text = f"{line}\n{rest}" if rest.strip() else line
    return replace(entry, state=state, type=one_line(kind or state, 80), message=line, text=text[:MAX_TEXT])


def _within(entry: Entry, left: int) -> Entry:
    """Return `entry`, once the file has no room left without its log but with the line that says where the log is."""
    return entry if left >= 0 else replace(entry, system_out=entry.system_out.partition("\n")[0])


def _flaky(case: Mapping[str, Any]) -> tuple[str, ...]:
    """Return one sentence for each attempt before the one that passed."""
    tries = facts.attempts(case)
    earlier = tries[:-1] if case.get("flaky") or any(t.get("rc") != 0 for t in tries[:-1]) else []
    return tuple(
        one_line(f"attempt {n} of {len(tries)}: {t.get('text') or 'exit ' + str(t.get('rc'))}")
        for n, t in enumerate(earlier, 1)
    )


def _system_out(case: Mapping[str, Any], root: Path) -> str:
    """Return the attachment line, the first error where the tail does not show it, and the end of run.log."""
    relative = facts.log_path(case)
    path = facts.inside(root, relative)
    if path is None:
        return ""
    # GitLab opens the path from the job's folder, which is where the runner was started.
    shown_path = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    head = f"[[ATTACHMENT|{one_line(shown_path.as_posix(), 2000)}]]\n"
    error = facts.table(case.get("first_error"))
    if error.get("text"):
        number = error.get("line")
        around = read_around(path, number, before=2, after=8) if isinstance(number, int) else ()
        shown = "\n".join(f"{n}: {row}" for n, row in around) or one_line(error["text"])
        head += f"first error ({one_line(error.get('file') or 'run.log')}:{number}):\n{shown}\n[...]\n"
    head = head.encode()[: MAX_BYTES // 2].decode("utf-8", "ignore")
    tail = read_tail(path, max_lines=MAX_LINES, max_bytes=MAX_BYTES - len(head.encode()) - 1)
    return head + ("\n".join(tail.lines) if tail else "run.log could not be read")


def _provenance(report: Mapping[str, Any]) -> dict[str, str]:
    """Return who ran what where, as properties: cleaned, absent values left out."""
    source = facts.table(report.get("provenance"))
    found: dict[str, object] = {"workspace": report.get("workspace"), "demo": "true" if report.get("demo") else None}
    for tree in ("bridge", "mcore", "nemo_rl", "image", "runner"):
        for key, value in sorted(facts.table(source.get(tree)).items()):
            found[f"{tree}.{key}"] = ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else value
    found["host"] = source.get("host")
    found["gpus"] = facts.gpu_text(source.get("gpus"))
    return {one_line(k): one_line(v, 2000) for k, v in found.items() if v is not None and v != ""}


def _distinct(entries: list[Entry]) -> list[Entry]:
    """Number equal (classname, name) pairs: GitLab keeps one of them, others take the second for a retry."""
    seen: set[tuple[str, str]] = set()
    made = []
    for entry in entries:
        name, number = entry.name, 1
        while (entry.classname, name) in seen:
            number += 1
            name = f"{entry.name} ({number})"
        seen.add((entry.classname, name))
        made.append(replace(entry, name=name))
    return made


def _correct(tree: ET.Element, groups: list[Group]) -> None:
    """Make what junit-xml wrote valid under both schemas and equal to the plan; counts are taken from the result."""
    total = dict.fromkeys(("tests", "failures", "errors"), 0)
    clock = 0.0
    for group, suite in zip(groups, tree.iterfind("testsuite"), strict=True):
        for entry, case in zip(group.entries, suite.iterfind("testcase"), strict=True):
            case.attrib = {"classname": entry.classname, "name": entry.name, "time": f"{entry.time_s:.3f}"}
            if entry.state != "pass" and case.find(entry.state) is None:
                case.insert(0, ET.Element(entry.state, {"message": entry.message or facts.NO_REASON}))
            for skipped in case.iterfind("skipped"):
                skipped.attrib.pop("type", None)
            for sentence in entry.flaky:
                flaky = ET.SubElement(case, "flakyFailure", {"type": "retry", "message": sentence})
                ET.SubElement(flaky, "stackTrace").text = sentence
        counts = {
            "tests": len(group.entries),
            "failures": len(suite.findall("testcase/failure")),
            "errors": len(suite.findall("testcase/error")),
        }
        spent = sum(e.time_s for e in group.entries)
        attributes = {"name": group.name, **{k: str(v) for k, v in counts.items()}}
        attributes |= {"skipped": str(len(suite.findall("testcase/skipped"))), "time": f"{spent:.3f}"}
        if suite.get("timestamp"):
            attributes["timestamp"] = suite.attrib["timestamp"]
        suite.attrib = attributes
        for key, count in counts.items():
            total[key] += count
        clock += spent
    tree.attrib = {**{k: str(v) for k, v in total.items()}, "time": f"{clock:.3f}"}
