"""summary.md: the skill's block in at most 60 lines, first line the answer, nothing implicit."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.report import summary
from tests import report_samples as samples

NAMES = (
    "Bridge-side checks",
    "Local Bridge import in NeMo-RL",
    "NeMo-RL Megatron policy run",
    "Requested variants",
    "Metrics/log capture",
    "Learning signal (level 6)",
    "CPU proof (not a level)",
    "Rehearsal on stand-ins (not a level)",
)


def answers(text: str) -> dict[str, str]:
    return {name: re.search(rf"^- {re.escape(name)}: (.*)$", text, re.MULTILINE)[1] for name in NAMES}  # type: ignore[index]


@pytest.mark.parametrize(
    ("cases", "start"),
    [
        ((samples.case(),), "Result: Pass - 1 case of level0 passed; 1 unit suite passed"),
        (
            (samples.failing_case(),),
            'Result: Fail - level0.grpo_megatron failed: max(data["train/token_mult_prob_error"])',
        ),
        ((samples.blocked_case(),), "Result: Blocked - level2.noncolocated is blocked: OSError: [Errno 28]"),
        ((samples.not_run_case(),), "Result: Blocked - 1 of 3 deliverables have not run yet"),
        ((samples.rehearsal_case(),), "Result: Pass - 1 rehearsal passed on stand-ins, no level was run"),
    ],
)
def test_first_line_is_the_answer(cases: tuple[dict[str, Any], ...], start: str) -> None:
    assert summary.render(samples.report(*cases)).startswith(start)


def test_every_deliverable_is_named_with_a_verdict() -> None:
    found = answers(summary.render(samples.full_report()))
    assert {n: t.split(" - ")[0] for n, t in found.items()} == {
        "Bridge-side checks": "Fail",
        "Local Bridge import in NeMo-RL": "Pass",
        "NeMo-RL Megatron policy run": "Fail",
        "Requested variants": "Blocked",
        "Metrics/log capture": "Fail",
        "Learning signal (level 6)": "Not requested",
        "CPU proof (not a level)": "Pass",
        "Rehearsal on stand-ins (not a level)": "Pass",
    }
    assert "/opt/Megatron-Bridge/src/megatron/bridge/__init__.py" in found["Local Bridge import in NeMo-RL"]
    assert "attempts/level0.grpo_megatron/0001/run.log" in found["Metrics/log capture"]
    nothing = answers(summary.render(samples.report(suites=[], probe=None)))
    assert all(text.startswith("Not requested") for text in nothing.values())


def test_rehearsals_and_baselines_never_answer_for_a_level() -> None:
    found = answers(summary.render(samples.report(samples.rehearsal_case(), samples.baseline_case())))
    assert found["NeMo-RL Megatron policy run"] == "Not requested"
    assert found["Requested variants"] == "Not requested"
    assert found["Rehearsal on stand-ins (not a level)"].startswith("Pass")


def test_a_blocked_run_has_no_captured_metrics_and_its_checks_do_not_count_as_failed() -> None:
    case = samples.blocked_case(checks=[samples.check(verdict="Fail", value=None)])
    found = answers(summary.render(samples.report(case)))
    assert found["Metrics/log capture"].startswith("Blocked - no assertion was evaluated")


def test_evidence_names_revisions_dirty_files_command_and_key_line() -> None:
    text = summary.render(samples.full_report())
    assert f"- Bridge: `{samples.PROVENANCE['bridge']['sha']}` (2 dirty: `src/megatron/bridge/models" in text
    assert f"- NeMo-RL: `{samples.PROVENANCE['nemo_rl']['sha']}` (clean)" in text
    assert "- Command of `level0.grpo_megatron`: `bash tests/functional/grpo_megatron.sh grpo.max_num_steps=20" in text
    assert (
        "- Key line of `level0.grpo_megatron`: `AssertionError: token_mult_prob_error 3.2071 > 1.05` (run.log:41)"
        in text
    )
    assert "2 x NVIDIA H100 80GB HBM3, `nvcr.io/nvidia/nemo-rl:v0.5.0`" in text


def test_cached_pass_says_when_where_and_on_which_gpu() -> None:
    text = summary.render(samples.report(samples.cached_case()))
    assert "cached: 2026-11-28T10:00:00Z on dgx-02, 2 x NVIDIA H200, attempt 0007" in text
    assert "1 of these from earlier records" in text.splitlines()[0]
    assert "- not run now but taken from earlier records: level1.sft_megatron" in text
    assert "cached" not in summary.render(samples.report(samples.case()))


def test_demo_and_rehearsal_are_labelled() -> None:
    demo = summary.render(samples.report(samples.case(), demo=True))
    assert demo.startswith("Result: Pass - demo workspace: ")
    assert "nothing here is evidence about a real Bridge" in demo
    rehearsal = summary.render(samples.report(samples.rehearsal_case()))
    assert "it is never a level's Pass" in rehearsal
    assert "(steps 20/20, rehearsal)" in rehearsal


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({}, True),
        ({"evidence": {"workers_started": True}}, False),
        ({"steps": {"requested": 2, "reached": 1}}, False),
        ({"reasons": [samples.reason("gpus", "2", "1 of 2 GPUs")], "attempts": []}, True),
    ],
)
def test_blocked_before_construction_is_no_evidence_against_the_provider(more: dict[str, Any], said: bool) -> None:
    text = summary.render(samples.report(samples.blocked_case(**more)))
    assert ("not evidence against the Bridge provider" in text.splitlines()[0]) is said
    assert ("(not evidence against the Bridge provider)" in text) is said


def test_baseline_flaky_and_quarantine_are_said() -> None:
    text = summary.render(samples.full_report())
    assert (
        " - new: the vendored Bridge passes the same case: the failure is new with this change (`5c4b3a295c4b`)" in text
    )
    assert "flaky: passed after a retry" in text
    assert "- failed in quarantine, not counted: level3.eval" in text
    finding = samples.failing_case(baseline={"verdict": "Fail", "finding": "pre-existing", "text": "it fails, too"})
    assert " - pre-existing: it fails, too" in summary.render(samples.report(finding))


def test_follow_ups_are_derived_where_none_are_given() -> None:
    lines = summary.render(
        samples.report(samples.failing_case(), samples.blocked_case(), samples.dependent_case())
    ).splitlines()
    ups = lines[lines.index("Follow-ups:") :]
    assert any("mend level0.grpo_megatron" in line for line in ups)
    assert any("mend the environment of level2.noncolocated:" in line for line in ups)
    assert not any("noncolocated_resume" in line for line in ups)
    assert summary.render(samples.report(samples.case())).rstrip().endswith("Follow-ups:\n\n- none")


@pytest.mark.parametrize("many", [1, 10, 50, 80])
def test_at_most_sixty_lines(many: int) -> None:
    cases = [samples.failing_case(case=f"case{n}") for n in range(many)] + [samples.case(f"ok{n}") for n in range(many)]
    report = samples.full_report(limitations=["x"] * many, follow_ups=["y"] * many)
    report["cases"] += cases
    report["suites"] += [samples.failing_suite(name=f"suite{n}") for n in range(many)]
    report["proofs"] += [samples.proof(f"family{n}", "Fail") for n in range(many)]
    report["provenance"]["bridge"]["dirty"] = [f"file{n}.py" for n in range(500)]
    text = summary.render(report)
    assert len(text.splitlines()) <= 60
    assert text.count("\n") <= 60
    if many == 80:
        assert re.search(r"^- \.\.\. and \d+ more$", text, re.MULTILINE)
        assert "and 492 more" in text


def test_markup_in_texts_is_disarmed() -> None:
    nasty = "<img src=x onerror=alert(1)> @everyone `code` #12 **bold**\n# title"
    text = summary.render(samples.report(samples.failing_case(reasons=[samples.reason("rc", "", nasty)])))
    assert "\n# title" not in text
    assert text.splitlines()[0].count("<img") == 0
    for line in text.splitlines()[1:]:
        outside = re.sub(r"(`+).*?(?<!`)\1(?!`)", "", line)
        assert "<img" not in outside
        assert "@everyone" not in outside


@given(text=st.text(max_size=80))
def test_any_text_keeps_the_block_in_form(text: str) -> None:
    case = samples.failing_case(reasons=[samples.reason(text, text, text)], model=text, command=[text], title=text)
    rendered = summary.render(samples.report(case, sentence=text, result="Fail", limitations=[text], follow_ups=[text]))
    assert rendered.startswith("Result: Fail - ")
    assert rendered.encode()
    assert len(rendered.splitlines()) <= 60
    answers(rendered)
