"""The answer of a report, the published schema, and the four files as they are written."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tasks import report as reports
from tasks.errors import UserError
from tasks.reason import Verdict
from tasks.report import answer, html
from tests import report_samples as samples

ROOT = Path(__file__).resolve().parent.parent
SCHEMA = json.loads((ROOT / f"docs/schema/report-{reports.SCHEMA_VERSION}.json").read_text())


def violations(value: Any, schema: dict[str, Any], at: str = "$", *, closed: bool = False) -> list[str]:
    """Return how `value` breaks `schema`: the part of JSON Schema that ours uses, any other keyword is an error.

    `closed`: a key that the schema does not describe is one, too, though readers must expect new ones.
    """
    known = {
        "$ref",
        "const",
        "enum",
        "type",
        "required",
        "properties",
        "items",
        "additionalProperties",
        "minimum",
        "minLength",
    }
    assert set(schema) - known <= {"$schema", "$id", "title", "description", "$defs"}, at
    if "$ref" in schema:
        return violations(value, SCHEMA["$defs"][schema["$ref"].removeprefix("#/$defs/")], at, closed=closed)
    kinds = {
        "object": dict,
        "array": list,
        "string": str,
        "integer": int,
        "number": (int, float),
        "boolean": bool,
        "null": type(None),
    }
    wanted = schema.get("type", [])
    wanted = [wanted] if isinstance(wanted, str) else wanted
    is_flag = isinstance(value, bool)
    if wanted and not any(isinstance(value, kinds[k]) and (not is_flag or k == "boolean") for k in wanted):
        return [f"{at}: {value!r} is not {wanted}"]
    found = [f"{at}: {value!r}" for k in ("const",) if k in schema and value != schema[k]]
    found += [f"{at}: {value!r}" for k in ("enum",) if k in schema and value not in schema[k]]
    if isinstance(value, (int, float)) and value < schema.get("minimum", -math.inf):
        found.append(f"{at}: {value} is too small")
    if isinstance(value, str) and len(value) < schema.get("minLength", 0):
        found.append(f"{at}: empty")
    if isinstance(value, dict):
        found += [f"{at}.{key} is missing" for key in schema.get("required", []) if key not in value]
        for key, item in value.items():
            inner = schema.get("properties", {}).get(key, schema.get("additionalProperties"))
            if inner is None and closed and "properties" in schema:
                found.append(f"{at}.{key} is not described")
            found += violations(item, inner or {}, f"{at}.{key}", closed=closed)
    if isinstance(value, list):
        for n, item in enumerate(value):
            found += violations(item, schema.get("items", {}), f"{at}[{n}]", closed=closed)
    return found


@pytest.mark.parametrize(
    ("report", "verdict", "words"),
    [
        pytest.param(samples.report(samples.case()), "Pass", "1 case of level0 passed", id="pass"),
        pytest.param(samples.full_report(), "Fail", "unit.bridge-refit failed", id="fail wins over blocked"),
        pytest.param(samples.report(samples.blocked_case(), samples.dependent_case()), "Blocked", r"noncolocated is blocked: .* \(and 1 more\)", id="blocked"),
        pytest.param(samples.report(samples.dependent_case(), samples.blocked_case()), "Blocked", "noncolocated is blocked: OSError", id="the root is named, not the dependant"),
        pytest.param(samples.report(samples.case(), samples.skipped_case()), "Pass", "skipped: level3.tp4_pp2", id="optional skipped"),
        pytest.param(samples.report(samples.case(), samples.quarantined_case()), "Pass", "failed in quarantine: level3.eval", id="quarantine"),
        pytest.param(samples.report(samples.rehearsal_case()), "Pass", "1 rehearsal passed on stand-ins, no level was run", id="rehearsal"),
        pytest.param(samples.report(requested=["unit"]), "Pass", "1 unit suite passed", id="unit alone"),
        pytest.param(samples.report(requested=["probe"], suites=[]), "Pass", "imports the Bridge under test", id="probe alone"),
        pytest.param(samples.report(requested=["proof:qwen2"], suites=[], proofs=[samples.proof()]), "Pass", "1 CPU proof passed", id="proof alone"),
        pytest.param(samples.report(proofs=[samples.proof(verdict="Fail")]), "Fail", "proof.qwen2 failed", id="failed proof"),
        pytest.param(samples.report(suites=[samples.suite(verdict="Blocked")]), "Blocked", "no reason was recorded", id="silent"),
        pytest.param(samples.report(samples.case(), probe={"verdict": "Fail"}), "Fail", "probe failed", id="probe counts"),
        # Nothing executed is not a Pass, however it comes about.
        pytest.param(samples.report(suites=[], probe=None), "Blocked", "nothing was executed", id="empty"),
        pytest.param({}, "Blocked", "nothing was executed", id="no keys"),
        pytest.param(samples.report(samples.skipped_case()), "Blocked", "nothing that was requested was shown", id="all cases skipped"),
        pytest.param(samples.report(samples.quarantined_case()), "Blocked", "nothing that was requested was shown", id="only quarantine"),
        pytest.param(samples.report(requested=["level2"]), "Blocked", "level2 was requested", id="requested level absent"),
        pytest.param(samples.report(samples.case(), requested=["level0", "vlm"]), "Blocked", "vlm was requested", id="variant absent"),
        pytest.param(samples.report(samples.case(), requested=["level5"], groups={"level5": ["level0.grpo_megatron"]}), "Pass", "1 case of level0 passed", id="included case"),
        pytest.param(samples.report(samples.case(), requested=["level0"], groups={"level0": ["level0.grpo_megatron", "level0.b"]}), "Blocked", "has no level0.b", id="required case absent"),
        pytest.param(samples.report(samples.rehearsal_case(), requested=["level1"]), "Blocked", "level1 was requested", id="rehearsal answers for no level"),
        pytest.param(samples.report(samples.baseline_case(), requested=["level0"]), "Blocked", "level0 was requested", id="nor does a baseline"),
        pytest.param(samples.report(requested=["run:level0.x"]), "Blocked", "records and does not judge", id="run alone"),
        pytest.param(samples.report(samples.case(), requested=["level0.grpo"]), "Blocked", "level0.grpo was requested", id="prefix is not a name"),
        pytest.param(samples.report(samples.case(verdict="pass")), "Blocked", "no reason", id="misspelt verdict"),
        pytest.param(samples.report(samples.not_run_case()), "Blocked", "1 of 3 deliverables have not run yet", id="skeleton"),
    ],
)  # fmt: skip
def test_overall(report: dict[str, Any], verdict: str, words: str) -> None:
    found, sentence = reports.overall(report)
    assert found == verdict
    assert re.search(words, sentence), sentence
    assert "\n" not in sentence


@pytest.mark.parametrize(
    "asked", ["rehearse", "rehearse:level1.sft_megatron", "rehearse:level1", "check:rehearse.level1.sft_megatron"]
)
def test_names_of_rehearsals_are_found(asked: str) -> None:
    assert reports.overall(samples.report(samples.rehearsal_case(), requested=[asked]))[0] is Verdict.PASS


@pytest.mark.parametrize(
    ("said", "case", "expected"),
    [
        ("Pass", samples.failing_case(), "Fail"),
        ("Pass", samples.blocked_case(), "Blocked"),
        ("Blocked", samples.failing_case(), "Fail"),
        ("Skipped", samples.case(), "Pass"),
        ("Blocked", samples.case(), "Blocked"),
        ("Fail", samples.case(), "Fail"),
        ("nonsense", samples.case(), "Pass"),
    ],
)
def test_a_report_never_claims_more_than_its_deliverables(said: str, case: dict[str, Any], expected: str) -> None:
    report = samples.report(case, result=said, sentence="all is well")
    assert answer.headline(report)[0] == expected
    assert reports.complete(report)["result"] == expected
    if said == "Pass":
        assert "all is well" not in answer.headline(report)[1]


@pytest.mark.parametrize(
    "report",
    [
        samples.full_report(),
        samples.report(),
        samples.report(samples.not_run_case()),
        samples.report(samples.cached_case(), demo=True),
    ],
)
def test_reports_follow_the_published_schema(report: dict[str, Any]) -> None:
    done = json.loads(json.dumps(reports.complete(report)))
    assert violations(done, SCHEMA) == []
    assert SCHEMA["properties"]["schema"]["const"] == reports.SCHEMA_VERSION


def test_schema_refuses_what_is_no_report() -> None:
    done = reports.complete(samples.full_report())
    for change in (
        {"result": "Skipped"},
        {"cases": [{}]},
        {"schema": 2},
        {"demo": "no"},
        {"limitations": [1]},
        {"sentence": ""},
    ):
        assert violations({**done, **change}, SCHEMA), change
    missing = {k: v for k, v in done.items() if k != "provenance"}
    assert violations(missing, SCHEMA) == ["$.provenance is missing"]


def test_contract_keys_are_all_required_by_the_schema() -> None:
    assert set(SCHEMA["required"]) == {
        "schema", "result", "sentence", "workspace", "demo", "requested", "provenance", "suites", "cases", "proofs", "limitations", "follow_ups",
    }  # fmt: skip
    case = {
        "level",
        "case",
        "rehearsal",
        "verdict",
        "reasons",
        "cached",
        "attempts",
        "steps",
        "checks",
        "command",
        "metrics",
        "baseline",
    }
    assert set(SCHEMA["$defs"]["case"]["required"]) == case
    assert set(SCHEMA["$defs"]["check"]["required"]) == {"expr", "verdict", "value", "limit", "text"}


def test_four_files_are_written_and_agree(tmp_path: Path) -> None:
    report = samples.full_report()
    samples.write_evidence(tmp_path, report)
    folder = reports.write(report, tmp_path)
    assert folder == tmp_path / "report"
    assert sorted(p.name for p in folder.iterdir()) == sorted(reports.NAMES)
    stored = json.loads((folder / "report.json").read_bytes())
    assert stored["result"] == "Fail"
    assert (folder / "summary.md").read_text().startswith(f"Result: Fail - {stored['sentence']}")
    assert "<title>Fail: " in (folder / "index.html").read_text()
    assert 'name="nemo-rl-e2e"' in (folder / "junit.xml").read_text()
    assert reports.render_all(report, tmp_path) == {n: (folder / n).read_bytes() for n in reports.NAMES}


def test_an_unchanged_report_is_touched_not_rendered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = reports.write(samples.full_report(), tmp_path)
    newer = (folder / "junit.xml").stat().st_mtime_ns + 10**9
    for name in reports.NAMES:  # a time that is surely not now, still newer than the source
        os.utime(folder / name, ns=(newer, newer))
    monkeypatch.setattr(html, "render", lambda *_: pytest.fail("rendered again"))
    reports.write(samples.full_report(), tmp_path)
    assert (folder / "junit.xml").stat().st_mtime_ns != newer


@pytest.mark.parametrize("damage", ["changed report", "missing page", "older than the program"])
def test_a_report_that_may_be_stale_is_rendered(damage: str, tmp_path: Path) -> None:
    report = samples.report(samples.case())
    folder = reports.write(report, tmp_path)
    (folder / "summary.md").write_text("old")
    if damage == "changed report":
        report = samples.report(samples.blocked_case())
    elif damage == "missing page":
        (folder / "index.html").unlink()
    else:
        os.utime(folder / "report.json", ns=(1, 1))
    reports.write(report, tmp_path)
    assert (folder / "summary.md").read_text().startswith("Result: ")
    assert (folder / "index.html").exists()


def test_a_failed_write_leaves_no_half_file_and_raises(tmp_path: Path) -> None:
    folder = reports.write(samples.report(samples.case()), tmp_path)
    before = {n: (folder / n).read_bytes() for n in reports.NAMES}
    (folder / "index.html").unlink()
    (folder / "index.html").mkdir()
    (folder / "index.html" / "x").touch()
    with pytest.raises(OSError, match="directory"):
        reports.write(samples.report(samples.blocked_case()), tmp_path)
    assert (folder / "report.json").read_bytes() == before["report.json"]
    assert not [p for p in folder.iterdir() if p.name.startswith(".")]


def test_numbers_that_json_lacks_become_words(tmp_path: Path) -> None:
    case = samples.failing_case(checks=[samples.check(verdict="Fail", value=math.nan, limit=math.inf)])
    case["checks"][0]["margin_percent"] = -math.inf
    files = reports.render_all(samples.report(case), tmp_path)
    check = json.loads(files["report.json"])["cases"][0]["checks"][0]
    assert (check["value"], check["limit"], check["margin_percent"]) == ("NaN", "Infinity", "-Infinity")


def test_importing_the_package_loads_no_renderer() -> None:
    code = "import sys, tasks.report; print(*sorted({'jinja2', 'junit_xml', 'lxml', 'tasks.report.html', 'tasks.report.junit'} & set(sys.modules)))"
    root = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == ""


def test_somebody_elses_page_is_not_taken_for_an_earlier_report(tmp_path: Path) -> None:
    page = tmp_path / "index.html"
    page.write_text("mine")
    with pytest.raises(UserError, match="not ours"):
        reports.publish(None, tmp_path)
    assert page.read_text() == "mine"
    ours = reports.write(samples.report(samples.case()), tmp_path / "workspace")
    for _ in range(2):  # a folder of an earlier run is emptied and filled
        reports.publish(None, tmp_path / "out")
        assert not [name for name in reports.NAMES if (tmp_path / "out" / name).exists()]
        reports.publish(ours, tmp_path / "out")
        assert {p.name for p in (tmp_path / "out").iterdir()} == set(reports.NAMES)
