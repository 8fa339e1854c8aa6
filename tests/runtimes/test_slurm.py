"""A job is submitted once, followed, left and picked up; the cluster is made of shell scripts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tasks import attempts, inflight
from tasks.runtimes import choose, slurm, slurm_commands, slurm_submission
from tasks.runtimes.slurm import Slurm
from tasks.runtimes.slurm_commands import Site, site_of
from tasks.settings import ROOT
from tests.runtimes.slurm_cluster import ACCEPT, LISTED


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
