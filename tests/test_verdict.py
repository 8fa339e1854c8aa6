"""The one pure decision, rule by rule: what is a Pass, what takes it away, and who is to blame."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tasks.metrics import EventFile
from tasks.reason import Reason, Verdict
from tasks.triage.facts import Finding, Frame, LogFacts
from tasks.verdict import Evidence, Expectation, Origin, decide, steps_reached

TMPE = 'max(data["train/token_mult_prob_error"]) < 1.05'
ASK = Expectation(steps=2, checks=(TMPE,), real_work=("train/loss",), expect_log=("ready",), forbid_log=("oops",))
GOOD_LOG = LogFacts(
    lines=10, size_bytes=100, first=None, findings=(), bridge_frame=None, megatron_worker=True, skip_line=None,
    import_skipped=False, workers_started=True, last_step=(2, 2), training_done=True, expected={"ready": True},
    forbidden={"oops": None}, warnings=(),
)  # fmt: skip
GOOD = Evidence(
    exit={"rc": 0, "reason": "exited"},
    facts=GOOD_LOG,
    series={"train/loss": {"1": 0.5, "2": 0.4}, "train/token_mult_prob_error": {"1": 1.0, "2": 1.01}},
    event_files=(EventFile("e", 4, 1, 2, 0, None),),
    origins=(Origin("megatron.bridge", "/b/src/megatron/bridge/__init__.py", "worker", expected=True),),
    probe=Verdict.PASS,
)


def log(**changes):
    return replace(GOOD_LOG, **changes)


def found(kind, signature="s", line=3, echoes=0):
    return Finding(signature, kind, line, f"{signature} happened", "do this", echoes)


def series(**changes):
    return {**GOOD.series, **{f"train/{name}": values for name, values in changes.items()}}


def test_all_proofs_together_are_a_pass():
    assert decide(ASK, GOOD).verdict is Verdict.PASS
    assert decide(ASK, GOOD).reasons == ()


@pytest.mark.parametrize("value", ["NaN", float("nan"), float("inf"), "-Infinity"])
@pytest.mark.parametrize("ask", [{"step_tag": "sft/loss"}, {"real_work": ("train/loss", "sft/loss")}])
def test_a_series_that_proves_steps_or_work_is_finite_whatever_its_name(ask, value):
    evidence = replace(GOOD, series={**GOOD.series, "sft/loss": {"1": 0.5, "2": value}})
    assert decide(ASK, evidence).verdict is Verdict.PASS  # nobody asserted it
    assert [r.kind for r in decide(replace(ASK, **ask), evidence).reasons] == ["non_finite"]


# Each line takes away one proof; the verdict is never a Pass, and the reason says which one was missing.
@pytest.mark.parametrize(
    ("change", "verdict", "kind"),
    [
        ({"exit": None}, "Blocked", "no_exit"),
        ({"exit": {"rc": 0, "reason": "terminated"}}, "Blocked", "stopped"),
        ({"exit": {"rc": None, "reason": "spawn_failed"}}, "Blocked", "stopped"),
        ({"exit": {"rc": 0, "reason": "oom"}}, "Blocked", "stopped"),
        # a full disk: a forbidden line may be among those that are lost, or an expected one
        ({"exit": {"rc": 0, "reason": "exited", "log_lost_bytes": 7, "log_error": "No space left"}}, "Blocked", "log_lost"),
        ({"exit": {"rc": 0, "reason": "exited", "log_lost_bytes": 7}, "facts": log(expected={"ready": False})}, "Blocked", "log_lost"),
        ({"exit": {"rc": 0, "reason": "exited", "log_lost_bytes": 7}, "series": series(token_mult_prob_error={"1": 1.0, "2": 1.2})}, "Fail", "check"),
        ({"exit": {"rc": 0, "reason": "engine_lost"}}, "Blocked", "stopped"),
        ({"probe": None}, "Blocked", "probe"),
        ({"probe": Verdict.FAIL}, "Blocked", "probe"),
        ({"damage": Reason("snapshot", "bridge", "changed")}, "Blocked", "snapshot"),
        ({"facts": None}, "Fail", "no_evidence"),
        ({"event_files": ()}, "Fail", "no_evidence"),
        ({"series": {}}, "Fail", "steps"),
        ({"series": series(loss={})}, "Fail", "steps"),
        ({"series": series(loss={"1": 0.5})}, "Fail", "steps"),
        ({"series": series(loss={"1": 0.5, "2": 0.4, "3": 0.3})}, "Fail", "steps"),
        ({"series": series(grad_norm={"1": "NaN", "2": 1.0})}, "Fail", "non_finite"),
        ({"series": series(loss={"1": "NaN", "2": 0.4})}, "Fail", "non_finite"),
        ({"series": series(loss={"1": 0.5, "2": float("inf")})}, "Fail", "non_finite"),
        ({"series": series(token_mult_prob_error={"1": 1.0, "2": 1.2})}, "Fail", "check"),
        ({"series": series(token_mult_prob_error={"1": 1.0, "2": "NaN"})}, "Fail", "non_finite"),
        ({"series": {"train/loss": {"1": 0.5, "2": 0.4}}}, "Fail", "check"),
        ({"series": series(loss={"1": 0.0, "2": 0.0})}, "Fail", "no_real_work"),
        ({"event_files": (EventFile("e", 4, 1, 2, 0, "corrupt record at offset 9"),)}, "Fail", "event_file"),
        ({"event_files": (EventFile("e", 4, 1, 2, 0, "ends inside a record at offset 9"),)}, "Fail", "event_file"),
        ({"facts": log(expected={"ready": False})}, "Fail", "expect_log"),
        ({"facts": log(forbidden={"oops": 7})}, "Fail", "forbid_log"),
        ({"facts": log(megatron_worker=False)}, "Fail", "backend"),
        ({"missing_files": ("step_3/*",)}, "Fail", "file"),
        ({"origins": ()}, "Fail", "origin"),
        ({"origins": (*GOOD.origins, Origin("megatron.bridge", "/opt/other", "worker", expected=False))}, "Fail", "origin"),
        ({"foreign_conversion": "Checkpoint already exists. Skipping import."}, "Fail", "conversion_cache"),
        ({"facts": log(skip_line="SKIP: needs two GPUs", last_step=None), "series": {}}, "Blocked", "skip"),
        ({"exit": {"rc": 1, "reason": "exited"}}, "Fail", "teardown"),
        ({"exit": {"rc": None, "reason": "hang"}}, "Fail", "hang"),
        ({"exit": {"rc": None, "reason": "timeout"}}, "Fail", "hang"),
        # told to stop, it ended with rc 0: that is no end of its own
        ({"exit": {"rc": 0, "reason": "timeout"}}, "Fail", "hang"),
        ({"exit": {"rc": 0, "reason": "a word from a newer agent"}}, "Fail", "teardown"),
        # no process took the Bridge from the tree, whatever it took Core and NeMo-RL from
        ({"origins": (Origin("megatron.core", "/c/x.py", "worker", expected=True),)}, "Fail", "origin"),
        ({"origins": (Origin("nemo_rl", "/r/x.py", "worker", expected=True),)}, "Fail", "origin"),
    ],
)  # fmt: skip
def test_without_one_proof_there_is_no_pass(change, verdict, kind):
    decision = decide(ASK, replace(GOOD, **change))
    assert decision.verdict == verdict
    assert kind in [r.kind for r in decision.reasons], decision.reasons


def test_stopping_early_with_rc_0_says_how_far_it_came():
    decision = decide(replace(ASK, steps=5), replace(GOOD, series=series(loss={"1": 2.1, "2": 2.0, "3": 1.9})))
    assert decision.reasons[0].text == "target step not reached: 3 of 5"
    assert decision.steps_reached == 3


def test_a_wrong_origin_is_told_before_everything_else():
    other = Origin("megatron.bridge", "/opt/other", "worker", expected=False)
    wrong = series(loss={"1": 0.5}, token_mult_prob_error={"1": 9.0})
    for exit_facts in ({"rc": 0, "reason": "exited"}, {"rc": 1, "reason": "exited"}):
        decision = decide(
            ASK, replace(GOOD, origins=(other,), series=wrong, exit=exit_facts, facts=log(forbidden={"oops": 7}))
        )
        assert decision.verdict is Verdict.FAIL
    assert decide(ASK, replace(GOOD, origins=(other,), series=wrong)).reasons[0].kind == "origin"


def test_running_past_the_request_is_said_so():
    decision = decide(ASK, replace(GOOD, series=series(loss={"1": 0.5, "2": 0.4, "3": 0.3})))
    assert decision.reasons[0].text == "ran past the requested step: 3, asked for 2"
    assert decision.failure_class == "check"  # not an early end


def test_a_thousand_steps_are_compared_by_value():
    steps = {str(n): 0.5 for n in range(1, 1001)}
    values = {"train/loss": steps, "train/token_mult_prob_error": dict.fromkeys(steps, 1.0)}
    assert decide(replace(ASK, steps=1000), replace(GOOD, series=values)).verdict is Verdict.PASS


def test_a_series_that_is_constant_but_not_zero_is_real_work():
    assert decide(ASK, replace(GOOD, series=series(loss={"1": -0.5, "2": -0.5}))).verdict is Verdict.PASS


def test_a_false_check_tells_value_and_limit_to_programs():
    decision = decide(ASK, replace(GOOD, series=series(token_mult_prob_error={"1": 1.0, "2": 1.2})))
    assert (decision.reasons[0].old, decision.reasons[0].new) == ("1.05", "1.2")
    absent = decide(ASK, replace(GOOD, series={"train/loss": {"1": 0.5, "2": 0.4}}))
    assert [r.old for r in absent.reasons if r.kind == "check"] == [None]


@pytest.mark.parametrize(("detail", "words"), [("disk full", "disk full"), (None, "no result was measured")])
def test_a_stopped_run_says_why(detail, words):
    decision = decide(ASK, replace(GOOD, exit={"rc": None, "reason": "spawn_failed", "detail": detail}))
    assert decision.reasons[0].text == f"the command could not be started: {words}"


@pytest.mark.parametrize(
    ("loss", "verdict", "failure_class"),
    [({"1": 0.5}, "Blocked", "environment"), ({"1": 0.5, "2": 0.4}, "Fail", "check")],
)
def test_rc_0_with_an_environment_error_is_blocked_only_if_it_ended_early(loss, verdict, failure_class):
    wrong = series(loss=loss, token_mult_prob_error={"1": 9.0})
    decision = decide(ASK, replace(GOOD, series=wrong, facts=log(first=found("environment"))))
    assert (decision.verdict, decision.failure_class) == (verdict, failure_class)


@pytest.mark.parametrize(
    ("exit_facts", "failure_class"),
    [({"rc": 1, "reason": "exited"}, "undecided"), ({"rc": None, "reason": "hang"}, "hang"),
     ({"rc": None, "reason": "silent"}, "undecided")],
)  # fmt: skip
def test_without_steps_only_a_hang_behind_the_done_pattern_is_an_end_gone_wrong(exit_facts, failure_class):
    ask = replace(ASK, steps=None, checks=(), real_work=())
    decision = decide(ask, replace(GOOD, exit=exit_facts, facts=log(training_done=True)))
    assert (decision.verdict, decision.failure_class) == (Verdict.FAIL, failure_class)


@pytest.mark.parametrize(("done", "failure_class"), [(True, "hang"), (False, "teardown")])
def test_silence_after_all_steps_is_a_hang_only_if_the_log_says_that_training_is_done(done, failure_class):
    decision = decide(ASK, replace(GOOD, exit={"rc": None, "reason": "silent"}, facts=log(training_done=done)))
    assert decision.failure_class == failure_class


def test_every_check_is_shown_even_if_nothing_ran():
    decision = decide(ASK, replace(GOOD, series={}, event_files=()))
    assert [c.expr for c in decision.checks] == [TMPE]
    assert decision.checks[0].verdict is Verdict.FAIL


def test_an_optional_case_that_skips_itself_is_skipped():
    evidence = replace(GOOD, facts=log(skip_line="SKIP: x"), series={}, event_files=())
    assert decide(replace(ASK, optional=True), evidence).verdict is Verdict.SKIPPED


@pytest.mark.parametrize(
    ("facts", "rc", "verdict", "failure_class"),
    [
        (log(first=found("infrastructure", "no-space"), training_done=False), 1, "Blocked", "infrastructure"),
        (log(first=found("environment", "missing-package"), training_done=False), 1, "Blocked", "environment"),
        (log(first=found("configuration", "override"), training_done=False), 1, "Blocked", "configuration"),
        (log(first=found("change", "shape-mismatch"), training_done=False), 1, "Fail", "change"),
        (log(bridge_frame=Frame("/co/src/megatron/bridge/x.py", 7, "f"), training_done=False), 1, "Fail", "change"),
        (log(workers_started=False, training_done=False), 1, "Blocked", "environment"),
        (log(first=found("undecided", "actor-died"), training_done=False), 1, "Fail", "undecided"),
        (log(training_done=False), -9, "Fail", "undecided"),
        (log(training_done=False), 1, "Fail", "undecided"),
    ],
)
def test_a_run_that_died_is_blamed_on_its_first_cause(facts, rc, verdict, failure_class):
    evidence = replace(GOOD, exit={"rc": rc, "reason": "exited"}, facts=facts, series={"train/loss": {"1": 0.5}})
    decision = decide(ASK, evidence)
    assert (decision.verdict, decision.failure_class) == (verdict, failure_class)


@pytest.mark.parametrize(
    ("facts", "verdict", "failure_class", "quoted"),
    [
        (log(first=found("change", "shape")), "Fail", "change", "shape happened"),
        (log(first=found("undecided", "oom"), bridge_frame=Frame("b.py", 1, "f")), "Fail", "undecided", "oom happened"),
        (log(first=found("undecided", "oom"), workers_started=False), "Blocked", "environment", "before the policy"),
        (log(bridge_frame=Frame("b.py", 1, "f")), "Fail", "change", "raised in the Bridge: b.py:1 in f"),
    ],
)
def test_the_cause_comes_first_among_the_reasons(facts, verdict, failure_class, quoted):
    decision = decide(ASK, replace(GOOD, exit={"rc": 1, "reason": "exited"}, facts=facts, series={}))
    assert (decision.verdict, decision.failure_class) == (verdict, failure_class)
    assert quoted in decision.reasons[0].text


def test_a_full_disk_before_a_bridge_frame_is_blocked():
    facts = log(
        first=found("infrastructure", "no-space"), bridge_frame=Frame("b.py", 1, "f"), training_done=False
    )  # fmt: skip
    evidence = replace(GOOD, exit={"rc": 1, "reason": "exited"}, facts=facts, series={})
    assert decide(ASK, evidence).verdict is Verdict.BLOCKED


def test_a_false_check_at_the_full_step_count_is_a_fail_whatever_the_rc():
    evidence = replace(
        GOOD, exit={"rc": 1, "reason": "exited"}, series=series(token_mult_prob_error={"1": 1.0, "2": 10.6})
    )
    decision = decide(ASK, evidence)
    assert decision.verdict is Verdict.FAIL
    assert decision.failure_class == "check"
    assert "10.6" in decision.reasons[0].text


def test_teardown_death_keeps_its_steps_and_metrics_in_words():
    decision = decide(ASK, replace(GOOD, exit={"rc": 1, "reason": "exited"}))
    assert decision.reasons[0].text == "teardown: steps 2/2, metrics ok, process ended with rc 1"


def test_a_case_without_steps_passes_on_its_files_and_log():
    ask = replace(ASK, steps=None, checks=(), real_work=())
    assert decide(ask, replace(GOOD, series={}, event_files=())).verdict is Verdict.PASS
    assert decide(ask, replace(GOOD, series={}, event_files=(), missing_files=("x",))).verdict is Verdict.FAIL


def test_the_first_cause_is_quoted_with_its_echoes():
    facts = log(first=found("environment", "pybind11", line=3, echoes=15), training_done=False)
    decision = decide(ASK, replace(GOOD, exit={"rc": 1, "reason": "exited"}, facts=facts, series={}))
    assert decision.reasons[0].text == "run.log:3: pybind11 happened (15 similar); do this"


def test_a_reason_is_written_without_what_it_does_not_have():
    assert Reason("rc", "process", "t", "0").as_dict() == {"kind": "rc", "subject": "process", "text": "t", "old": "0"}


def test_seconds_of_ray_monitoring_never_count_as_steps():
    assert steps_reached({"ray/node.0": {"300": 1.0}, "train/loss": {"2": 1.0}}, "train/loss") == 2
