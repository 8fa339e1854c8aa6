"""junit.xml: both schemas, the profile's table, hostile text, and no way for a non-Pass to look green."""

from __future__ import annotations

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from junitparser import Error, Failure, JUnitXml, Skipped
from lxml import etree

from tasks import report as reports
from tasks.report import junit
from tasks.report.text import clean, one_line, read_around, read_tail
from tests import report_samples as samples

XSD = Path(__file__).parent / "fixtures" / "xsd"
JENKINS = etree.XMLSchema(etree.parse(XSD / "jenkins-junit-10.xsd"))
SUREFIRE = etree.XMLSchema(etree.parse(XSD / "surefire-test-report-3.0.2.xsd"))
NOWHERE = Path("nowhere")


def parsed(data: bytes) -> Any:
    """Return the tree after the checks that every file must stand: schemas, counts, unique names, messages."""
    tree = etree.fromstring(data)
    assert JENKINS.validate(tree), JENKINS.error_log
    for suite in tree:
        assert SUREFIRE.validate(suite), SUREFIRE.error_log
        assert len(suite) == 0 or suite.find("properties") is None or suite[0].tag == "properties"
        for word, tag in (("tests", "."), ("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
            cases = suite.findall("testcase")
            assert int(suite.get(word)) == sum(c.find(tag) is not None for c in cases), word
    for word in ("tests", "failures", "errors"):
        assert int(tree.get(word)) == sum(int(s.get(word)) for s in tree)
    pairs = [(c.get("classname"), c.get("name")) for c in tree.iter("testcase")]
    assert len(pairs) == len(set(pairs))
    for case in tree.iter("testcase"):
        problems = [c for c in case if c.tag in {"failure", "error", "skipped"}]
        assert len(problems) <= 1
        for found in problems:
            message = found.get("message")
            assert message.strip()
            assert "\n" not in message
            assert len(message) <= 500
            assert found.text.split("\n")[0] == message
        assert case.find("system-out") is None or problems[0].tag in {"failure", "error"}
        assert set(case.attrib) == {"classname", "name", "time"}
    again = JUnitXml.fromstring(data)
    assert (again.tests, again.failures, again.errors) == tuple(
        int(tree.get(k)) for k in ("tests", "failures", "errors")
    )
    return tree


def states(tree: Any) -> dict[str, tuple[str, str]]:
    """Return `classname/name` -> (state, message)."""
    found = {}
    for case in tree.iter("testcase"):
        problem = next((c for c in case if c.tag in {"failure", "error", "skipped"}), None)
        state = ("pass", "") if problem is None else (problem.tag, problem.get("message"))
        found[f"{case.get('classname')}/{case.get('name')}"] = state
    return found


def rendered(*cases: dict[str, Any], root: Path = NOWHERE, **more: Any) -> Any:
    return parsed(junit.render(samples.report(*cases, **more), root))


@pytest.mark.parametrize(
    ("case", "state", "message"),
    [
        pytest.param(samples.case(), "pass", "", id="pass"),
        pytest.param(samples.cached_case(), "pass", "", id="cached pass is a plain pass"),
        pytest.param(samples.flaky_case(), "pass", "", id="flaky"),
        pytest.param(samples.failing_case(), "pass", "", id="only its checks failed"),
        pytest.param(samples.failing_case(checks=[]), "failure", "max(data[", id="fail without a failed check"),
        pytest.param(
            samples.failing_case(reasons=[samples.reason("rc", "1", "rc 1 in teardown")]),
            "failure",
            "rc 1 in teardown",
            id="rc",
        ),
        pytest.param(samples.failing_case(reasons=[]), "pass", "", id="failed checks speak for themselves"),
        pytest.param(
            samples.failing_case(reasons=[samples.reason("timeout", "45m", "stopped after 45 min")]),
            "error",
            "stopped after",
            id="timeout",
        ),
        pytest.param(samples.blocked_case(), "error", "OSError: [Errno 28]", id="blocked at its root"),
        pytest.param(samples.blocked_case(reasons=[]), "error", "no reason was recorded", id="blocked without words"),
        pytest.param(samples.not_run_case(), "error", "not run yet", id="skeleton"),
        pytest.param(samples.dependent_case(), "skipped", "Blocked: level2.noncolocated is blocked", id="dependant"),
        pytest.param(samples.skipped_case(), "skipped", "Skipped: needs 8 GPUs, 2 visible", id="skipped"),
        pytest.param(
            samples.quarantined_case(reasons=[samples.reason("rc", "", "rc 1")]),
            "skipped",
            "Quarantined: flaky since",
            id="quarantine",
        ),
        pytest.param(samples.case(verdict="Passed"), "error", "no reason", id="unknown verdict is never a pass"),
    ],
)
def test_run_entry_says_what_the_verdict_says(case: dict[str, Any], state: str, message: str) -> None:
    tree = rendered(case)
    name = "level0.grpo_megatron" if case["case"] == "grpo_megatron" else f"{case['level']}.{case['case']}"
    got = states(tree)[f"{name}/run"]
    assert got[0] == state
    assert got[1].startswith(message)


def test_full_report_is_valid_and_complete(tmp_path: Path) -> None:
    report = samples.full_report()
    samples.write_evidence(tmp_path, report)
    tree = parsed(junit.render(report, tmp_path))
    found = states(tree)
    assert [s.get("name") for s in tree] == [
        "probe", "unit", "proofs", "level0", "level1", "level2", "level3", "rehearse.level1", "baseline.level0",
    ]  # fmt: skip
    assert found["level0.grpo_megatron/run"][0] == "pass"
    assert found[f"level0.grpo_megatron/check: {samples.PROB}"][0] == "failure"
    assert found["unit.bridge-refit/tests"] == ("failure", "2 of 40 tests failed")
    assert found["rehearse.level1.sft_megatron/run"][0] == "pass"
    level1 = next(s for s in tree if s.get("name") == "level1")
    properties = {p.get("name"): p.get("value") for p in level1.iter("property")}
    assert properties["cached.level1.sft_megatron"] == "2026-11-28T10:00:00Z on dgx-02, 2 x NVIDIA H200, attempt 0007"
    assert properties["bridge.sha"] == samples.PROVENANCE["bridge"]["sha"]
    assert "param_mapping.py" in properties["bridge.dirty"]
    flaky = next(level1.iter("flakyFailure"))
    assert flaky.get("message") == "attempt 1 of 2: exit 1"
    assert level1.get("timestamp") == "2026-11-29T19:02:11Z"
    assert {c.get("time") for c in tree.iter("testcase")} == {"0.000", "1261.002", "40.250", "31.416"}


def test_checks_of_a_blocked_case_are_skipped_not_failed() -> None:
    case = samples.blocked_case(checks=[samples.check(verdict="Fail", value=None)])
    assert states(rendered(case))[f"level2.noncolocated/check: {samples.PROB}"][0] == "skipped"


def test_quarantine_excuses_until_its_day_and_only_with_a_day() -> None:
    running = samples.quarantined_case()
    check = f"level3.eval/check: {samples.PROB}"
    assert states(rendered(samples.case(), running))[check][0] == "skipped"
    late = {**running, "quarantine": {**running["quarantine"], "until": "2026-11-28"}}
    endless = {**running, "quarantine": {**running["quarantine"], "until": None}}
    undated = {**running, "attempts": []}
    for case in (late, endless, undated):
        assert states(rendered(samples.case(), case))[check][0] == "failure"


@pytest.mark.parametrize(
    "report",
    [
        pytest.param(samples.report(samples.dependent_case()), id="only a dependant, its root outside the report"),
        pytest.param(samples.report(samples.skipped_case()), id="all skipped"),
        pytest.param(samples.report(samples.quarantined_case()), id="only quarantine"),
        pytest.param(samples.report(suites=[], probe=None), id="nothing at all"),
        pytest.param(
            samples.report(samples.case(), result="Blocked", sentence="interrupted"), id="report says Blocked"
        ),
        pytest.param(samples.report(requested=["level2"]), id="requested level without a case"),
    ],
)
def test_a_file_of_no_pass_is_never_green(report: dict[str, Any]) -> None:
    tree = parsed(junit.render(report, NOWHERE))
    assert int(tree.get("failures")) + int(tree.get("errors")) > 0
    assert states(tree)["nemo_rl_e2e/result"][0] == "error"


def test_pass_has_no_failure_no_output_and_no_result_entry() -> None:
    tree = rendered(samples.case())
    assert {s for s, _ in states(tree).values()} == {"pass"}
    assert tree.find(".//system-out") is None
    assert [s.get("name") for s in tree] == ["probe", "unit", "level0"]


@pytest.mark.parametrize("text", ["", " ", "\n", "\x1b[0m", None])
def test_empty_failure_message_does_not_become_a_pass(text: str | None) -> None:
    bad = samples.check(verdict="Fail", value=None, limit=None)
    case = samples.failing_case(
        checks=[{**bad, "text": text}], reasons=[{"kind": "check", "subject": "", "text": text}]
    )
    assert states(rendered(case))[f"level0.grpo_megatron/check: {samples.PROB}"][0] == "failure"
    silent = samples.blocked_case(reasons=[{"kind": "", "subject": "", "text": text}])
    assert states(rendered(silent))["level2.noncolocated/run"][0] == "error"


def test_equal_names_stay_apart() -> None:
    twice = samples.failing_case(checks=[samples.check(verdict="Fail"), samples.check(verdict="Fail")])
    found = states(rendered(twice, {**twice, "level": "level1"}))
    assert f"level0.grpo_megatron/check: {samples.PROB} (2)" in found
    assert f"level1.grpo_megatron/check: {samples.PROB}" in found


def test_colours_are_removed_and_illegal_characters_shown() -> None:
    shown = clean("\x1b[31mFAILED\x1b[0m \x00 \x07 \x0b ]]> 5%\r10% \x1b]0;title\x07 \ud800 \ufffe")
    assert shown == "FAILED #x00 #x07 #x0B ]]> 5%\n10%  #xD800 #xFFFE"
    case = samples.blocked_case(reasons=[samples.reason("x", "y", "\x1b[31mFAILED\x1b[0m \x00 ]]> \ud800\uffff")])
    assert states(rendered(case))["level2.noncolocated/run"][1] == "FAILED #x00 ]]> #xD800#xFFFF"


# Hostile text in every place a string can be, numbers of every kind where durations are.
_text = st.text(max_size=60) | st.sampled_from(
    ["\x1b[31m\x00", "]]>", "\ud800", "\ufffe", "\r\n", "&#0;", "<a b='", "\x9b1m", "\U0001ffff"]
)
_number = st.none() | st.floats() | st.integers() | st.text(max_size=3)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_text_gives_a_valid_file(data: st.DataObject) -> None:
    def word() -> str:
        return data.draw(_text)

    verdict = data.draw(st.sampled_from(["Pass", "Fail", "Blocked", "Skipped", ""]))
    checks = [samples.check(word(), data.draw(st.sampled_from(["Pass", "Fail"])), text=word()) for _ in range(2)]
    for check in checks:
        check["text"] = word()
    attempt = {
        "id": word(),
        "path": word(),
        "rc": 1,
        "started": word(),
        "duration_s": data.draw(_number),
        "gpus": [word()],
    }
    case = samples.case(
        word(), word(), verdict, reasons=[samples.reason(word(), word(), word())], checks=checks, attempts=[attempt]
    )
    case |= {"flaky": True, "first_error": {"text": word(), "line": 1, "file": word()}, "cached": True}
    failed = samples.failing_suite(name=word(), failed_tests=[{"name": word(), "text": word()}] * 2)
    report = samples.report(case, case, suites=[failed], sentence=word(), workspace=word())
    report["provenance"] = {"bridge": {word(): word()}, "host": word(), "gpus": [word()]}
    tree = parsed(junit.render(report, NOWHERE))
    assert int(tree.get("failures")) >= 1


@given(st.text())
def test_cleaning_is_idempotent_and_messages_are_one_line(text: str) -> None:
    assert clean(clean(text)) == clean(text)
    etree.fromstring(f"<a>{clean(text).replace('&', '&amp;').replace('<', '&lt;')}</a>")
    assert len(one_line(text).splitlines()) <= 1
    assert len(one_line(text)) <= 500


def test_system_out_is_bounded_and_read_from_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    case = samples.blocked_case()
    log = tmp_path / case["attempts"][0]["path"] / "run.log"
    log.parent.mkdir(parents=True)
    with log.open("wb") as out:  # 200 MB of hole, then text: reading it all would show in the time
        out.seek(200_000_000)
        out.write(b"".join(b"line %d \xff \x1b[31mred\x1b[0m\n" % n for n in range(100_000)))
    tree = rendered(case, root=tmp_path)
    text = next(tree.iter("system-out")).text
    assert text.startswith(f"[[ATTACHMENT|{case['attempts'][0]['path']}/run.log]]\nfirst error (run.log:12):\n")
    assert text.endswith("line 99999 � red")
    assert len(text.encode()) <= 64 << 10
    assert sum(row.startswith("line ") for row in text.split("\n")) == 200


def test_first_error_outside_the_tail_is_shown_with_its_lines(tmp_path: Path) -> None:
    report = samples.report(samples.failing_case())
    samples.write_evidence(tmp_path, report)
    text = next(parsed(junit.render(report, tmp_path)).iter("system-out")).text
    assert "\n41: AssertionError: token_mult_prob_error 3.2071 > 1.05\n" in text
    assert text.count("[[ATTACHMENT|") == 1


@pytest.mark.parametrize("path", ["../../etc", "/etc", "", None, 7, "a\0b"])
def test_attempt_paths_never_lead_out_of_the_workspace(path: object, tmp_path: Path) -> None:
    case = samples.blocked_case()
    case["attempts"][0]["path"] = path
    assert rendered(case, root=tmp_path).find(".//system-out") is None


def test_tail_of_long_lines_progress_bars_and_absent_files(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    log.write_bytes(b"x" * 500_000 + b"\n" + b"1%\r2%\r100%\r\n" + b"end")
    tail = read_tail(log, max_bytes=1000)
    assert tail is not None
    assert tail.lines == ("100%", "end")
    assert tail.cut
    log.write_bytes(b"")
    assert read_tail(log) is not None
    assert read_tail(tmp_path / "absent") is None
    assert read_around(tmp_path / "absent", 3) == ()
    log.write_bytes(b"one\ntwo\nthree\n")
    assert read_around(log, 2, before=0, after=5) == ((2, "two"), (3, "three"))
    assert read_around(log, 4) == ()
    assert read_around(log, 0) == ()


def test_a_failure_that_junit_xml_drops_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = junit._say
    monkeypatch.setattr(junit, "_say", lambda *a: replace(whole(*a), message="", text=""))
    tree = etree.fromstring(junit.render(samples.report(samples.blocked_case(), samples.failing_case()), NOWHERE))
    assert (tree.get("errors"), tree.get("failures")) == ("1", "2")
    assert tree.find(".//error").get("message") == "no reason was recorded"


def test_a_blocked_case_with_a_cause_of_its_own_is_no_dependant() -> None:
    both = [samples.reason("dependency", "probe", "probe is blocked"), samples.reason("disk", "/dev/shm", "no space")]
    assert states(rendered(samples.dependent_case(reasons=both)))["level2.noncolocated_resume/run"][0] == "error"


@pytest.mark.parametrize("spent", [1e308, 10**400, float("nan"), -1, True, "7", None])
def test_absurd_durations_keep_the_file_valid(spent: Any) -> None:
    case = samples.case()
    case["attempts"][0]["duration_s"] = spent
    tree = rendered(case, {**case, "case": "other"})
    assert {c.get("time") for c in tree.iter("testcase")} <= {"0.000", "31.416"}


# -- rules of CI services, as their documentation states them; schemas are in parsed() -----------------------------------

HOSTILE = "\x1b[31mFAIL\x1b[0m \x00 ]]> <b>&amp; \ud800 \u2028 \"'` 日本 "
MANY = [samples.failing_case(case=f"c{n}") if n % 2 else samples.blocked_case(case=f"b{n}") for n in range(200)]


@pytest.mark.parametrize(
    "report",
    [
        pytest.param(samples.report(samples.case()), id="pass"),
        pytest.param(samples.full_report(), id="one of everything"),
        pytest.param(samples.report(samples.failing_case(case=HOSTILE, checks=[samples.check(HOSTILE, "Fail")])), id="hostile"),
        pytest.param(samples.report(suites=[], probe=None), id="empty"),
        pytest.param(samples.report(*MANY), id="many"),
    ],
)  # fmt: skip
def test_rules_of_ci_services(report: dict[str, Any]) -> None:
    data = junit.render(report, NOWHERE)
    assert len(data) < 30_000_000  # GitLab: of one file
    tree = parsed(data)
    assert len(tree), "Azure, GitLab and dorny/test-reporter take a file without a suite for one without tests"
    for suite in tree:
        assert suite.get("name").strip()
        for case in suite.iter("testcase"):
            assert case.get("classname").strip(), "mandatory for Buildkite; half of GitLab's key"
            assert case.get("name").strip(), "mandatory for Buildkite and CircleCI"
            assert float(case.get("time")) >= 0, "CircleCI splits by it"
            assert case.find("flakyFailure") is None or case.find("failure") is None, "Surefire: passed in the end"
        for out in suite.iter("system-out"):
            attached = [row for row in out.text.splitlines() if "[[ATTACHMENT|" in row]
            assert all(re.fullmatch(r"\[\[ATTACHMENT\|[^|\]]+\]\]", row) for row in attached), "a line of its own"
    again = JUnitXml.fromstring(data)  # what EnricoMi/publish-unit-test-result-action reads with
    results = [r for suite in again for case in suite for r in case.result]
    kinds = {"failure": Failure, "error": Error, "skipped": Skipped}
    for tag, kind in kinds.items():
        mine = [found.get("message") for found in tree.iter(tag)]
        assert [r.message for r in results if type(r) is kind] == mine


def test_the_file_is_bounded_however_many_cases_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(junit, "MAX_LOGS", 300_000)
    cases = [samples.blocked_case(case=f"b{n}") for n in range(20)]
    log = tmp_path / cases[0]["attempts"][0]["path"] / "run.log"
    log.parent.mkdir(parents=True)
    log.write_text("x" * 400 + "\n" + ("y" * 400 + "\n") * 400)
    logs = [out.text for out in rendered(*cases, root=tmp_path).iter("system-out")]
    assert len(logs) == 20
    assert sum(map(len, logs)) < 310_000
    assert "yyy" in logs[0]
    assert logs[-1].startswith("[[ATTACHMENT|")
    assert logs[-1].count("\n") == 0


def test_a_reader_that_polls_sees_a_valid_file_at_every_moment(tmp_path: Path) -> None:
    skeleton = samples.report(samples.not_run_case(), samples.not_run_case(case="second"))
    file = reports.write(skeleton, tmp_path) / "junit.xml"
    seen: list[bytes] = []
    over = threading.Event()

    def poll() -> None:
        while not over.is_set():
            seen.append(file.read_bytes())  # never absent: a reader that meets no file would raise here

    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit(poll)
        for n in range(8):
            reports.write(samples.report(samples.case(), *MANY[:n], samples.not_run_case(case="second")), tmp_path)
        reports.write(samples.report(samples.case(), samples.case("second")), tmp_path)
        over.set()
        reader.result()
    states_seen = dict.fromkeys([*seen, file.read_bytes()])
    assert len(states_seen) > 1
    trees = [parsed(data) for data in states_seen]
    assert all(int(t.get("errors")) + int(t.get("failures")) for t in trees[:-1]), "nothing unfinished is green"
    assert int(trees[-1].get("errors")) + int(trees[-1].get("failures")) == 0


def test_a_case_whose_name_has_dots_belongs_to_its_level() -> None:
    tree = rendered(samples.case("qwen2.5_sft"), samples.case("1.x", "level1", rehearsal=True))
    assert [suite.get("name") for suite in tree][-2:] == ["level0", "rehearse.level1"]
    report = samples.report(samples.case("qwen2.5_sft"), requested=["level0"])
    assert "1 case of level0 passed" in reports.overall(report)[1]
