"""The words of Slurm: states, reasons and offers, and what they mean for the verdict."""

from __future__ import annotations

import pytest

from tasks import runs
from tasks.reason import Verdict
from tasks.runtimes import slurm_commands
from tasks.runtimes.slurm_commands import Offer, Site
from tasks.runtimes.slurm_states import Seen, gpus_of, judge, parse
from tasks.verdict import Evidence, Expectation, decide

GOOD, HALF = {"rc": 0, "reason": "exited"}, {"rc": None, "reason": "terminated"}


@pytest.mark.parametrize(
    ("state", "record", "started", "output", "reason"),
    [
        ("COMPLETED", GOOD, True, "", "exited"),
        ("FAILED", {"rc": 7, "reason": "exited"}, True, "", "exited"),
        ("NODE_FAIL", None, True, "", "node_fail"),
        ("BOOT_FAIL", None, False, "", "node_fail"),
        ("PREEMPTED", HALF, True, "", "preempted"),
        ("TIMEOUT", HALF, True, "CANCELLED DUE TO TIME LIMIT", "time_limit"),
        ("DEADLINE", None, True, "", "time_limit"),
        ("CANCELLED", HALF, True, "", "cancelled"),
        ("OUT_OF_MEMORY", GOOD, True, "", "oom"),  # a child was killed, the command went on: Slurm alone knows
        ("FAILED", None, True, "slurmstepd: error: Exceeded job memory limit", "oom"),
        ("FAILED", GOOD, True, "slurmstepd-n1: error: Detected 1 oom-kill event(s) in StepId=1.0.", "oom"),
        ("COMPLETED", GOOD, True, "a log that speaks of an oom-kill event", "exited"),
        ("FAILED", None, True, "slurm_start: this attempt was started before; a", "requeued"),
        ("FAILED", None, False, "pyxis: failed to import docker image", "not_started"),
        ("FAILED", None, True, "", "killed"),
        ("COMPLETED", None, True, "", "engine_lost"),
        (None, None, True, "", "engine_lost"),
        (None, GOOD, True, "", "exited"),
    ],
)
def test_each_end_has_a_reason_of_its_own(state, record, started, output, reason):
    seen = Seen("17", state, nodes="n1") if state else None
    ended = judge(seen, record, started=started, output=output, waited_s=30)
    assert ended.reason == reason
    assert ended.detail.startswith("job 17" if seen else "the job, of which Slurm")


@pytest.mark.parametrize("reason", ["preempted", "time_limit", "node_fail", "requeued", "cancelled", "oom"])
def test_what_the_cluster_did_is_blocked_never_the_changes_fault(reason):
    decision = decide(Expectation(), Evidence(exit={"rc": 1, "reason": reason}, facts=None))
    assert (decision.verdict, decision.failure_class) == (Verdict.BLOCKED, "infrastructure")


@pytest.mark.parametrize(
    ("own", "rc", "engine", "said"),
    [
        ("exited", 0, "exited", "exited"), ("exited", 1, "exited", "exited"), ("timeout", None, "killed", "timeout"),
        ("exited", -15, "cancelled", "cancelled"),  # Slurm's TERM killed the command before the agent heard of it
        ("exited", 0, "preempted", "preempted"),  # a command that takes TERM for a reason to end well
        ("exited", 0, "oom", "oom"), ("exited", 143, "stopped", "stopped"), ("exited", 0, "stopped", "exited"),
        ("terminated", None, "time_limit", "time_limit"), ("no_exit", None, "killed", "killed"),
    ],
)  # fmt: skip
def test_an_end_that_the_cluster_brought_about_is_not_taken_for_the_commands_own(own, rc, engine, said):
    assert runs.how_it_ended({} if own == "no_exit" else {"reason": own, "rc": rc}, engine) == said


def test_squeue_and_sacct_are_read_alike_and_noise_is_skipped():
    text = "Slurm accounting storage is disabled\n9|CANCELLED by 1000|None|None assigned|Unknown\n 8 |PENDING|Resources||N/A\n"
    assert parse(text) == [Seen("8", "PENDING", "Resources"), Seen("9", "CANCELLED", "None")]
    assert str(parse(text)[0]) == "job 8 PENDING (Resources)"


@pytest.mark.parametrize(
    ("gres", "found"),
    [
        ("gpu:h100:8(S:0-1)", ("h100", 8)), ("gpu:4", ("gpu", 4)), ("nvme:1,gpu:a:2,gpu:a:2", ("a", 4)), ("(null)", ("", 0)),
    ],
)  # fmt: skip
def test_gpus_are_read_from_a_nodes_gres(gres, found):
    assert gpus_of(gres) == found


def test_an_offer_counts_nodes_that_are_large_enough():
    offer = Offer((("h", 8), ("h", 8), ("a", 2)))
    assert offer.lacking(16, 2) is None
    assert "needs 3 nodes of 8 GPUs: Slurm offers 2" in (offer.lacking(24, 3) or "")
    assert offer.gpus().label() == "8x slurm h"
    assert "sinfo is not on PATH" in (Offer((), "sinfo is not on PATH").lacking(1, 1) or "")


def test_sinfo_makes_the_offer_without_nodes_that_are_down(cluster):
    cluster.does(sinfo="printf 'n1|gpu:h:8|idle\\nn2|gpu:h:8|down*\\nn3|gpu:h:8|drained\\nn4|(null)|mixed\\n'")
    assert slurm_commands.Controller(Site(given={"partition": "p"})).offered().nodes == (("h", 8), ("", 0))
    assert cluster.calls("sinfo") == ["sinfo -h -N -p p -o %N|%G|%T"]
