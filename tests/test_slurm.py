"""Slurm without Slurm: states and texts as values, and the whole protocol against scripted sbatch, squeue and scancel."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from tasks import attempts, inflight, runs, slurm_image
from tasks.errors import UserError
from tasks.reason import Verdict
from tasks.runtimes import choose, slurm, slurm_commands, slurm_submission
from tasks.runtimes.job import Ended, Job, Mount
from tasks.runtimes.slurm import Slurm
from tasks.runtimes.slurm_commands import Offer, Site, site_of
from tasks.runtimes.slurm_states import Seen, gpus_of, judge, parse
from tasks.settings import load
from tasks.verdict import Evidence, Expectation, decide

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parent.parent
LISTED = "17|RUNNING|None|n1|2026-12-01T00:00:00"
ACCEPT = f"echo 17; echo '{LISTED}' >$home/queue; mkdir -p $home/attempt/slurm; : >$home/attempt/slurm/started.json"
FAKE = """#!/bin/bash
home=$(dirname -- "$(dirname -- "$0")"); me=${0##*/}
printf '%s\\n' "$me $*" >>"$home/calls"
if [ -e "$home/$me.sh" ]; then . "$home/$me.sh"; fi
"""


class Cluster:
    """A Slurm whose commands are bash snippets over one folder; `queue` is what squeue prints."""

    def __init__(self, home: Path) -> None:
        self.home, self.folder, self.said = home, home / "attempt", list[str]()
        for path in (home / "bin", self.folder, home / "src"):
            path.mkdir()
        for name in ("sbatch", "squeue", "scancel", "sinfo", "sacct"):
            (home / "bin" / name).write_text(FAKE)
            (home / "bin" / name).chmod(0o755)
        self.does(sbatch=ACCEPT, squeue="cat $home/queue 2>/dev/null || true")
        self.does(scancel="sed -i 's/|[A-Z]*|/|CANCELLED|/' $home/queue 2>/dev/null || true")

    def does(self, **snippets: str) -> None:
        for name, text in snippets.items():
            (self.home / f"{name}.sh").write_text(text)

    def calls(self, name: str) -> list[str]:
        lines = (self.home / "calls").read_text().splitlines() if (self.home / "calls").exists() else []
        return [line for line in lines if line.startswith(name + " ")]

    def queue(self, line: str) -> None:
        (self.home / "queue").write_text(line + "\n")

    def ends(self, state: str = "COMPLETED", rc: int | None = 0, reason: str = "exited") -> None:
        self.queue(f"17|{state}|None|n1|N/A")
        if rc is not None:
            (self.folder / "exit.json").write_text(json.dumps({"rc": rc, "reason": reason}))

    def job(self, **changes: Any) -> Job:
        mount = Mount(self.home / "src", "/opt/nemo-rl", read_only=False)
        job = Job(
            "20261201-000000-abcd", ("/e2e/agent/agent.py", "/e2e/attempt/spec.json"), "python3", (mount,), {}, (), 2,
            600.0, 0, {inflight.TASK: "run:c", inflight.KEY: "k"}, network=False, folder=self.folder,
        )  # fmt: skip
        return dataclasses.replace(job, **changes)

    def runtime(self, **options: Any) -> Slurm:
        made = Slurm("i.sqsh", say=self.said.append, **options)
        made.latency_s, made.settle_s, made.second_thought_s = 0.05, 0.06, 0.07
        made.refuse_s, made.lost_s, made.look_s = 0.3, 20.0, 0.01
        return made

    def run(self, runtime: Slurm, after: Callable[[int], None] = lambda _: None, job: Job | None = None) -> Ended:
        polls = iter(range(10_000))
        stop = threading.Event()
        return runtime.run(job or self.job(), stop=stop, poll=lambda: after(next(polls)))


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    made = Cluster(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr(slurm, "POLL_S", 0.005)
    for name in [n for n in os.environ if n.startswith(("SBATCH_", "SLURM_"))]:
        monkeypatch.delenv(name)
    return made


# --- words ----------------------------------------------------------------------------------------------------------

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


# --- what is submitted ------------------------------------------------------------------------------------------------


def test_site_options_are_argv_and_time_is_a_cap(cluster):
    site = site_of({"partition": "a b", "qos": "high", "exclusive": True, "time": "1h"})
    assert site.options == ("--partition=a b", "--qos=high", "--exclusive")
    assert "--time=40" in slurm_submission.options(cluster.job(), site, "i", ())
    assert "--time=60" in slurm_submission.options(cluster.job(timeout_s=1e5), site, "i", ())


@pytest.mark.parametrize(
    "given", [{"job-name": "x"}, {"--qos": "x"}, {"gres": "gpu:4"}, {"qos": ["a"]}, {"time": "soon"}]
)
def test_site_options_that_are_ours_or_no_options_are_refused(given):
    with pytest.raises(UserError, match="slurm: "):
        site_of(given)


def test_site_yaml_and_command_line_reach_the_settings(tmp_path):
    (tmp_path / "site.yaml").write_text("runtime: slurm\nslurm: {partition: p, gres: false}\n")
    found = load({"detach": "1", "max_gpu_hours": "12.5"}, environ={}, root=tmp_path)
    assert (dict(found.slurm), found.detach, found.max_gpu_hours) == ({"partition": "p", "gres": False}, True, 12.5)
    with pytest.raises(UserError, match="max_gpu_hours=much"):
        load({"max_gpu_hours": "much"}, environ={}, root=tmp_path)
    (tmp_path / "site.yaml").write_text("slurm: p\n")
    with pytest.raises(UserError, match="must be a mapping"):
        load({}, environ={}, root=tmp_path)


def test_one_node_goes_through_srun_with_mounts_and_never_a_secret(cluster, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    job = cluster.job(secrets=("HF_TOKEN",))
    argv = slurm_submission.options(job, Site(), "i.sqsh", {"n3", "n2"})
    assert {"--gres=gpu:2", "--exclude=n2,n3", "--no-requeue", "--dependency=singleton", "--nodes=1"} < set(argv)
    inside = argv[argv.index(str(slurm_submission.STEP)) + 1 :]
    assert f"--container-mounts={cluster.home / 'src'}:/opt/nemo-rl" in inside
    assert "--input=none" in inside  # else the agent takes the end of srun's pipe for its runner's death
    assert "hf_secret" not in " ".join(argv)
    assert slurm_submission.environment(job, "i.sqsh")["HF_TOKEN"] == "hf_secret"
    assert "1.3 GPU-hours" in slurm_submission.plan(job, Site())


def test_several_nodes_go_through_the_checkouts_ray_sub(cluster):
    ray = {"RAY_X": "1", "RAY_ADDRESS": "local", "RAY_TMPDIR": "/tmp", "OTHER": "2"}
    job, site = cluster.job(nodes=2, gpus=16, env=ray), site_of({"account": "a", "partition": "p"})
    assert "no ray.sub" in slurm_submission.refusal(job, site)
    (cluster.home / "src/ray.sub").write_text("")
    assert "account" in slurm_submission.refusal(job, Site())
    assert slurm_submission.refusal(job, site) == ""
    assert slurm_submission.options(job, site, "i.sqsh", ())[-1] == str(cluster.home / "src/ray.sub")
    assert "ray.sub" in slurm_submission.plan(job, site)
    env = slurm_submission.environment(job, "i.sqsh")
    assert (env["GPUS_PER_NODE"], env["CONTAINER"]) == ("8", "i.sqsh")
    assert [name for name in ray if name in env] == ["RAY_X"]  # for `ray start`, before the agent gives the rest
    assert env["MOUNTS"].endswith(f",{cluster.folder}/slurm:{cluster.folder}/slurm")  # ray.sub's logs, same path
    assert env["COMMAND"].endswith("python3 -E -s -S -B /e2e/agent/agent.py /e2e/attempt/spec.json")


def test_a_local_copy_is_made_before_the_agent_and_under_ray_sub_on_every_node_before_ray(cluster):
    (cluster.home / "src/ray.sub").write_text("")
    job = cluster.job(local_copy=("/l", "/s", "/t", "/n"))
    argv = " ".join(slurm_submission.options(job, Site(), "i.sqsh", ()))
    assert "local_copy.py /l /s /t /n python3 -E -s -S -B /e2e/agent/slurm_start.py" in argv
    env = slurm_submission.environment(dataclasses.replace(job, nodes=2, gpus=16), "i.sqsh")
    assert env["SETUP_COMMAND"].endswith("local_copy.py /l /s /t /n || kill -TERM $PPID")
    assert "local_copy.py --proved 2 /l /n python3 -E -s -S -B /e2e/agent/slurm_start.py" in env["COMMAND"]


def test_paths_that_pyxis_cannot_name_are_refused(cluster):
    odd = cluster.home / "a:b"
    odd.mkdir()
    job = cluster.job(mounts=(Mount(odd, "/opt/x", read_only=True),))
    assert "cannot name" in slurm_submission.refusal(job, Site())
    assert cluster.run(cluster.runtime(), job=job).reason == "not_started"
    assert not cluster.calls("sbatch")


# --- following ----------------------------------------------------------------------------------------------------------


def test_a_job_is_submitted_followed_and_its_exit_is_believed(cluster):
    ended = cluster.run(cluster.runtime(), lambda n: cluster.ends(rc=0) if n == 3 else None)
    assert (ended.rc, ended.reason) == (0, "exited")
    assert len(cluster.calls("sbatch")) == 1
    assert any("GPU-hours" in line for line in cluster.said)
    assert any("job 17 RUNNING on n1" in line for line in cluster.said)


def test_a_submission_that_was_accepted_without_an_answer_is_not_doubled(cluster, monkeypatch):
    monkeypatch.setattr(slurm_commands, "CALL_S", 1.0)
    cluster.does(sbatch=f"{ACCEPT}; exec sleep 9")
    ended = cluster.run(
        cluster.runtime(), lambda _: cluster.ends() if any("RUNNING" in line for line in cluster.said) else None
    )
    assert ended.reason == "exited"
    assert len(cluster.calls("sbatch")) == 1


def test_a_submission_that_never_arrived_is_made_again(cluster):
    first = "[ -e $home/once ] || { : >$home/once; echo 'Unable to contact slurm controller (connect failure)' >&2; exit 1; }"
    cluster.does(sbatch=f"{first}; {ACCEPT}")
    ended = cluster.run(cluster.runtime(), lambda _: cluster.ends() if len(cluster.calls("sbatch")) == 2 else None)
    assert ended.reason == "exited"


def test_a_job_that_was_accepted_twice_loses_its_second(cluster):
    def later(n: int) -> None:
        if n == 3:
            cluster.queue(f"{LISTED}\n18|PENDING|Dependency||N/A")
        elif cluster.calls("scancel"):
            cluster.ends()

    cluster.does(scancel="")
    assert cluster.run(cluster.runtime(), later).reason == "exited"
    assert cluster.calls("scancel")[0] == "scancel 18"


@pytest.mark.parametrize("text", ["Unable to contact slurm controller (connect failure)", "Munge encode failed"])
def test_a_controller_that_does_not_answer_is_waited_for(cluster, text):
    def later(n: int) -> None:
        if n == 3:
            cluster.does(squeue=f"echo '{text}' >&2; exit 1")
        if n == 20:
            cluster.does(squeue="cat $home/queue")
            cluster.ends()

    assert cluster.run(cluster.runtime(), later).reason == "exited"
    assert any("waiting for the controller" in line for line in cluster.said)


def test_nodes_are_given_back_as_soon_as_the_agent_has_ended_under_ray_sub(cluster):
    (cluster.home / "src/ray.sub").write_text("")

    def later(n: int) -> None:
        if n == 3:
            (cluster.folder / "exit.json").write_text('{"rc": 0, "reason": "exited"}')

    runtime = cluster.runtime(site=site_of({"account": "a", "partition": "p"}))
    assert cluster.run(runtime, later, cluster.job(nodes=2, gpus=16)).reason == "exited"
    assert len(cluster.calls("scancel")) == 1


def test_a_controller_that_never_comes_back_leaves_the_job_in_flight(cluster):
    silent = "echo 'Unable to contact slurm controller' >&2; exit 1"
    runtime = cluster.runtime()
    runtime.lost_s = 0.3
    ended = cluster.run(runtime, lambda n: cluster.does(squeue=silent) if n == 3 else None)
    assert ended.reason == "detached"
    assert "job 17" in ended.detail
    assert (json.loads((cluster.folder / "slurm.json").read_text()))["state"] == "submitted"


def test_without_a_controller_nothing_is_submitted_and_it_is_said(cluster):
    cluster.does(squeue="echo 'Unable to contact slurm controller (connect failure)' >&2; exit 1")
    ended = cluster.run(cluster.runtime())
    assert (ended.reason, cluster.calls("sbatch")) == ("not_started", [])
    assert not (cluster.folder / "slurm.json").exists()


def test_without_slurm_nothing_is_waited_for(cluster, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    ended = cluster.run(cluster.runtime(), lambda _: pytest.fail("waits for a command that is not there"))
    assert (ended.reason, "squeue is not on PATH" in ended.detail) == ("not_started", True)


def test_a_refused_submission_is_not_started_with_slurms_words(cluster):
    cluster.does(sbatch="echo 'sbatch: error: Invalid partition name specified' >&2; exit 1")
    ended = cluster.run(cluster.runtime())
    assert ended.reason == "not_started"
    assert "Invalid partition" in ended.detail
    assert json.loads((cluster.folder / "slurm.json").read_text())["state"] == "over"


@pytest.mark.parametrize(
    ("line", "reason"), [("17|PENDING|BeginTime||N/A", "requeued"), ("17|REQUEUE_HOLD|x||N/A", "requeued")]
)
def test_a_job_that_goes_back_into_the_queue_is_cancelled_not_run_twice(cluster, line, reason):
    ended = cluster.run(cluster.runtime(), lambda n: cluster.queue(line) if n == 3 else None)
    assert ended.reason == reason
    assert cluster.calls("scancel")


def test_a_job_that_can_never_start_is_cancelled(cluster):
    cluster.does(sbatch="echo 17; echo '17|PENDING|PartitionTimeLimit||N/A' >$home/queue")
    ended = cluster.run(cluster.runtime())
    assert (ended.reason, len(cluster.calls("scancel"))) == ("not_started", 1)


def test_a_job_that_slurm_forgot_is_explained_by_the_accounting(cluster):
    cluster.does(sacct="echo '17|NODE_FAIL|None|n1|2026-12-01T00:00:00'")
    runtime = cluster.runtime()
    ended = cluster.run(runtime, lambda n: cluster.queue("") if n == 3 else None)
    assert ended.reason == "node_fail"
    assert runtime.bad == {"n1"}
    assert "--exclude=n1" in slurm_submission.options(cluster.job(), Site(), "i", runtime.bad)


def test_exit_json_may_come_late_but_not_for_ever(cluster):
    runtime = cluster.runtime()
    runtime.latency_s = 0.3

    def later(n: int) -> None:
        if n == 3:
            cluster.ends(rc=None)
        if n == 15:
            cluster.ends(rc=0)

    assert cluster.run(runtime, later).reason == "exited"
    (cluster.folder / "exit.json").unlink()
    lost = cluster.run(cluster.runtime())
    assert lost.reason == "engine_lost"
    assert "shared file system" in lost.detail


# --- letting go and picking up ------------------------------------------------------------------------------------------


def test_detach_leaves_the_job_and_the_next_call_submits_nothing(cluster):
    detached = cluster.run(cluster.runtime(detach=True))
    assert detached.reason == "detached"
    assert "in flight: job 17" in detached.detail
    assert cluster.run(cluster.runtime(detach=True)).reason == "detached"
    cluster.ends()
    assert cluster.run(cluster.runtime(detach=True)).reason == "exited"
    assert len(cluster.calls("sbatch")) == 1
    assert not cluster.calls("scancel")


@pytest.mark.parametrize("accepted", [True, False])
def test_a_submission_ahead_is_followed_by_nobody_and_a_refused_one_leaves_no_attempt(cluster, accepted):
    runtime = cluster.runtime()
    runtime.ahead = True
    if not accepted:
        cluster.does(sbatch="echo 'error: QOSMaxSubmitJobPerUserLimit' >&2; exit 1")
    assert cluster.run(runtime).reason == "detached"
    assert (len(cluster.calls("sbatch")), inflight.is_open(cluster.folder)) == (1, accepted)


@pytest.fixture
def interrupted(cluster, monkeypatch):
    """Return a function that runs a job, raises `error` at its third poll, and says what was cancelled."""

    def interrupt(error: type[BaseException], *, tty: bool, detach: bool = False, again: bool = False) -> list[str]:
        runtime = cluster.runtime()

        def sleep(seconds: float) -> None:
            if again and seconds == runtime.second_thought_s:
                raise KeyboardInterrupt

        def poll(n: int) -> None:
            if n == 3:
                runtime.detach = detach
                raise error

        monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: tty))
        monkeypatch.setattr(slurm, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
        with pytest.raises(error):
            cluster.run(runtime, poll)
        return cluster.calls("scancel")

    return interrupt


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_without_a_terminal_a_signal_cancels_the_job(cluster, interrupted, error):
    assert interrupted(error, tty=False)
    assert json.loads((cluster.folder / "slurm.json").read_text())["state"] == "over"


def test_a_signal_with_the_first_word_that_is_said_cancels_the_job_that_is_picked_up(cluster, monkeypatch):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: False))
    assert cluster.run(cluster.runtime(detach=True)).reason == "detached"
    runtime = cluster.runtime()

    def said(text: str) -> None:
        if text.startswith("picking up"):
            raise SystemExit

    runtime.say = said
    with pytest.raises(SystemExit):
        cluster.run(runtime)
    assert cluster.calls("scancel")
    assert not inflight.is_open(cluster.folder)


def test_detach_keeps_the_job_when_the_runner_is_told_to_stop(interrupted):
    assert not interrupted(SystemExit, tty=False, detach=True)


def test_at_a_terminal_the_first_interrupt_leaves_the_job_and_says_so(cluster, interrupted):
    assert not interrupted(KeyboardInterrupt, tty=True)
    assert any("the same command picks it up" in line for line in cluster.said)
    assert json.loads((cluster.folder / "slurm.json").read_text())["state"] == "submitted"


def test_at_a_terminal_a_second_interrupt_cancels(interrupted):
    assert interrupted(KeyboardInterrupt, tty=True, again=True)


def test_a_stop_in_another_thread_cancels_too(cluster, monkeypatch):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: False))
    stop = threading.Event()
    ended = cluster.runtime().run(cluster.job(), stop=stop, poll=stop.set)
    assert ended.reason == "stopped"


# --- around the runtime -------------------------------------------------------------------------------------------------


def test_the_agent_is_started_once_for_an_attempt(tmp_path):
    argv = [sys.executable, ROOT / "containers/slurm_start.py", tmp_path / "started.json", "cat"]
    read, write = os.pipe()  # a standard input that is neither closed nor empty must not reach the agent
    first = subprocess.run(argv, stdin=read, check=False, timeout=20)
    second = subprocess.run(argv, stdin=read, capture_output=True, text=True, check=False, timeout=20)
    os.close(read)
    os.close(write)
    assert (first.returncode, second.returncode) == (0, 75)
    assert "started before" in second.stderr


@pytest.mark.parametrize("verb", ["start", "stop", "status"])
def test_the_private_cluster_touches_no_folder_that_is_not_its_own(tmp_path, verb):
    foreign = tmp_path / "etc"
    foreign.mkdir()
    (foreign / "slurm.conf").write_text("somebody's\n")
    argv = ["bash", str(ROOT / ".ci/slurm.sh"), verb, str(foreign)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=20)
    assert (done.returncode, "nothing was done" in done.stderr) == (2, True)
    assert [path.name for path in foreign.iterdir()] == ["slurm.conf"]
    assert (foreign / "slurm.conf").read_text() == "somebody's\n"


def test_an_attempt_in_flight_is_found_by_task_and_key_until_it_is_over(tmp_path):
    folder = tmp_path / "level4.x" / "20261201-000000-abcd"
    folder.mkdir(parents=True)
    inflight.close(folder)
    assert not (folder / "slurm.json").exists()
    inflight.note(folder, state="submitted", task="run:level4.x", key="k", job="17", submitted="now", seen="PENDING")
    assert inflight.find(tmp_path, "run:level4.x", "k") == folder
    assert inflight.find(tmp_path, "run:level4.x", "other key") is None
    assert inflight.rows(tmp_path)[0]["state"] == "PENDING"
    (folder / "exit.json").write_text("{}")
    assert inflight.rows(tmp_path)[0]["state"] == "has a result to take"
    assert inflight.find(tmp_path, "run:level4.x", "k", finished=False) is None  # fresh=1 wants a new run
    inflight.close(folder)
    assert inflight.find(tmp_path, "run:level4.x", "k") is None


def test_the_clusters_own_files_are_no_evidence(tmp_path):
    for name in ("run.log", "slurm.json", "slurm/job.out"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    assert set(attempts.evidence_files(tmp_path, tmp_path)) == {"run.log"}


def test_gpu_hours_over_the_limit_are_refused_before_anything_is_started():
    case: Any = SimpleNamespace(id="level4.x", gpus=8, minutes=60)
    pipe: Any = SimpleNamespace(settings=SimpleNamespace(max_gpu_hours=12.0), gpu_hours=0.0)
    assert runs.over_budget(pipe, case) is None
    pipe.gpu_hours = 8.0
    assert "max_gpu_hours=12" in str(runs.over_budget(pipe, case))


def test_an_image_that_could_change_unseen_is_refused(tmp_path):
    with pytest.raises(UserError, match="REPO@sha256"):
        slurm_image.resolve("nvcr.io/nvidia/nemo-rl:v1", tmp_path / "c.json")
    digest = "sha256:" + "a" * 64
    image, name = slurm_image.resolve(f"nvcr.io/nvidia/nemo-rl@{digest}", tmp_path / "c.json")
    assert (image.id, name) == (digest, f"nvcr.io#nvidia/nemo-rl@{digest}")
    squashed = tmp_path / "i.sqsh"
    squashed.write_text("one")
    first = slurm_image.resolve(str(squashed), tmp_path / "c.json")[0].id
    squashed.write_text("two and more")
    assert slurm_image.resolve(str(squashed), tmp_path / "c.json")[0].id != first
    with pytest.raises(UserError, match="No such file"):
        slurm_image.resolve(str(tmp_path / "absent.sqsh"), tmp_path / "c.json")


def test_choose_makes_a_slurm_runtime_that_says_when_there_is_no_slurm(cluster, monkeypatch):
    runtime = choose("slurm", site={"qos": "x"}, detach=True)
    assert isinstance(runtime, Slurm)
    assert (runtime.site.options, runtime.detach, runtime.target("attempt", Path("/x"))) == (
        ("--qos=x",),
        True,
        "/e2e/attempt",
    )
    monkeypatch.setenv("PATH", "/nowhere")
    assert "sinfo is not on PATH" in str(runtime.available())
