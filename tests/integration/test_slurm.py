"""The Slurm runtime against a real slurmctld and two slurmd (.ci/slurm.sh); srun's container options by a stand-in.

The stand-in for pyxis is .ci/srun: the node's own programs in a mount namespace with the job's mounts, no image.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tasks import inflight, local_copy, runs
from tasks.files import sha256_file
from tasks.runtimes import slurm_commands
from tasks.runtimes.job import Ended, Job, Mount
from tasks.runtimes.slurm import Slurm
from tasks.runtimes.slurm_commands import Site
from tests.conftest import run_git
from tests.integration.conftest import ROOT, lacking
from tests.miniature import Miniature

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CLUSTER = Path(os.environ.get("SLURM_CONF") or "/nonexistent/slurm.conf").parent
CONF = (CLUSTER / "slurm.conf").read_text() if (CLUSTER / ".e2e-slurm").exists() else ""
NODES = re.findall(r"^NodeName=(\S+)", CONF, re.MULTILINE) or ["n1", "n2"]
pytestmark = pytest.mark.slurm


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """Put the stand-in for pyxis first on PATH; skip, in CI fail, without a cluster of .ci/slurm.sh."""
    if not (CLUSTER / ".e2e-slurm").exists():  # never a cluster that somebody works on
        lacking(
            "no Slurm: eval what `.ci/slurm.sh start DIR` prints, exported (it installs Slurm from Debian's archive)"
        )
    patch = pytest.MonkeyPatch()
    patch.setenv("PATH", f"{CLUSTER / 'bin'}:{os.environ['PATH']}")
    control("start")
    yield
    control("start")  # whatever a test stopped
    patch.undo()


def control(*words: str, **env: str) -> None:
    verb, *daemon = words
    argv = ["bash", str(ROOT / ".ci/slurm.sh"), verb, str(CLUSTER), *daemon]
    subprocess.run(argv, check=True, capture_output=True, timeout=60, env={**os.environ, **env})


def ask(*argv: str) -> str:
    return subprocess.run(argv, check=True, capture_output=True, text=True, timeout=30).stdout.strip()


class Runner:
    """A runtime with short patience, and one agent job in a folder of its own."""

    def __init__(self, home: Path, *argv: str, site: Site | None = None, gpus: int = 0, image: str = "i.sqsh") -> None:
        self.folder = home / f"20261201-000000-{os.urandom(4).hex()}"
        self.folder.mkdir()
        self.said: list[str] = []
        self.runtime = Slurm(image, site=site, say=self.said.append)
        self.runtime.latency_s, self.runtime.settle_s, self.runtime.look_s = 5.0, 2.0, 0.5
        self.job = Job(
            self.folder.name, ("/e2e/agent/agent.py", "/e2e/attempt/spec.json"), "python3",
            (Mount(self.folder, "/e2e/attempt", read_only=False), Mount(ROOT / "containers", "/e2e/agent", read_only=True)),
            {}, (), gpus, 600.0, 0, {inflight.TASK: "run:c", inflight.KEY: "k"}, network=False, folder=self.folder,
        )  # fmt: skip
        spec = {
            "schema": 1, "id": self.job.id, "argv": ["bash", "-c", argv[0], "case", *argv[1:]], "cwd": "/e2e/attempt",
            "env": {"PATH": os.environ["PATH"]}, "log": "/e2e/attempt/run.log", "exit": "/e2e/attempt/exit.json",
            "timeout_s": 300, "term_grace_s": 1.0,
        }  # fmt: skip
        (self.folder / "spec.json").write_text(json.dumps(spec))

    def run(self, poll: Callable[[], None] = lambda: None) -> Ended:
        return self.runtime.run(self.job, stop=threading.Event(), poll=poll)

    def once(self, act: Callable[[], Any]) -> Callable[[], None]:
        """Return a poll that does `act` once the agent runs its command."""
        left = [act]
        return lambda: left.pop()() if left and (self.folder / "run.log").exists() else None

    @property
    def exit(self) -> dict[str, Any]:
        return json.loads((self.folder / "exit.json").read_text())

    @property
    def number(self) -> str:
        return str(json.loads((self.folder / "slurm.json").read_text())["job"])

    def jobs(self) -> int:
        return len(self.runtime.controller.look(f"e2e:{self.job.id}"))


@pytest.fixture(scope="module")
def limited(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Start a job of one minute, Slurm's shortest limit, while the other tests run."""
    runner = Runner(tmp_path_factory.mktemp("limit"), "sleep 300", site=Site((f"--nodelist={NODES[1]}",), time_s=60.0))
    found: dict[str, Any] = {"runner": runner}
    thread = threading.Thread(target=lambda: found.update(ended=runner.run()))
    thread.start()
    found["thread"] = thread
    yield found
    if thread.is_alive():
        subprocess.run(["scancel", f"--name=e2e:{runner.job.id}"], check=False)
        thread.join(30)


def test_a_command_runs_in_its_mounts_with_its_gpus_and_its_rc_comes_back(limited, tmp_path):
    script = "echo $CUDA_VISIBLE_DEVICES:$PWD; touch /e2e/agent/x; ls /tmp; exit 7"
    runner = Runner(tmp_path, script, gpus=2)
    ended = runner.run()
    assert (ended.reason, runner.exit["reason"], runner.exit["rc"]) == ("exited", "exited", 7)
    log = (runner.folder / "run.log").read_text().splitlines()
    assert log[0] == ":/e2e/attempt"  # the command's environment is the spec's, whatever Slurm sets
    assert "Read-only file system" in log[1]
    assert len(log) == 2  # the stand-in's /tmp is empty: only mounts are shared
    assert ask("squeue", "-h", "-t", "all", "-n", f"e2e:{runner.job.id}", "-o", "%b") == "gres:gpu:2"


def test_offered_gpus_are_counted_and_too_many_are_refused(tmp_path):
    offer = slurm_commands.Controller(Site()).offered()
    assert offer.nodes == (("fake", 2), ("fake", 2))
    ended = Runner(tmp_path, "true", gpus=5).run()
    assert ended.reason == "not_started"
    assert "node configuration is not available" in ended.detail


def test_a_container_that_cannot_be_had_is_not_started_and_its_node_is_avoided(tmp_path):
    runner = Runner(tmp_path, "true", image="missing.sqsh")
    ended = runner.run()
    assert ended.reason == "not_started"
    assert "failed to import docker image" in ended.detail
    assert runner.runtime.bad <= set(NODES)
    assert runner.runtime.bad


def test_a_job_cancelled_by_somebody_else_says_so_and_the_agent_stopped_its_tree(tmp_path):
    runner = Runner(tmp_path, "echo up; sleep 300")
    ended = runner.run(runner.once(lambda: ask("scancel", runner.number)))
    assert ended.reason == "cancelled"
    assert runner.exit["survivors"] == 0
    assert runs.how_it_ended(runner.exit, ended.reason) == "cancelled"  # exit.json itself may say rc -15, exited


def test_a_requeued_job_never_runs_twice_in_one_attempt(tmp_path):
    runner = Runner(tmp_path, "echo up >>count; sleep 300")

    def requeue() -> None:
        ask("scontrol", "update", f"JobId={runner.number}", "Requeue=1")
        ask("scontrol", "requeue", runner.number)

    ended = runner.run(runner.once(requeue))
    assert ended.reason == "requeued"
    assert (runner.folder / "count").read_text() == "up\n"


def test_a_controller_that_is_killed_and_comes_back_costs_nothing(tmp_path):
    runner = Runner(tmp_path, "echo up; until [ -e go ]; do sleep 0.1; done; exit 3")

    def kill() -> None:
        began, until = time.time(), time.monotonic() + 20
        ask("scontrol", "update", f"JobId={runner.number}", "Comment=saved")
        while (CLUSTER / "state/job_state").stat().st_mtime <= began:  # a job that was not saved is lost for Slurm, too
            assert time.monotonic() < until
            time.sleep(0.05)
        control("stop", "slurmctld", SIGNAL="KILL")
        (runner.folder / "go").touch()  # the job ends while nobody answers
        threading.Timer(1.5, control, ("start",)).start()

    ended = runner.run(runner.once(kill))
    assert (ended.reason, runner.exit["rc"]) == ("exited", 3)
    assert runner.jobs() == 1


def test_a_submission_that_timed_out_after_it_was_accepted_is_not_doubled(tmp_path, monkeypatch):
    monkeypatch.setattr(slurm_commands, "CALL_S", 1.0)
    late = tmp_path / "bin"
    late.mkdir()
    (late / "sbatch").write_text('#!/bin/bash\n/usr/bin/sbatch "$@" >/dev/null\nexec sleep 30\n')
    (late / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{late}:{os.environ['PATH']}")
    runner = Runner(tmp_path, "sleep 1")
    assert runner.run().reason == "exited"
    assert runner.jobs() == 1


def test_a_stopped_controller_that_answers_late_gets_one_submission(tmp_path, monkeypatch):
    monkeypatch.setattr(slurm_commands, "CALL_S", 1.0)
    pid = int((CLUSTER / "slurmctld.pid").read_text())
    runner = Runner(tmp_path, "true")
    submit, left = runner.runtime.controller.submit, [pid]

    def submit_to_a_stopped_one(self: object, *args: Any, **kwargs: Any) -> str:
        if left:
            os.kill(left.pop(), signal.SIGSTOP)
            threading.Timer(1.5, os.kill, (pid, signal.SIGCONT)).start()
        return submit(*args, **kwargs)

    monkeypatch.setattr(slurm_commands.Controller, "submit", submit_to_a_stopped_one)
    assert runner.run().reason == "exited"
    assert runner.jobs() == 1


def test_a_node_that_is_drained_lets_its_job_end_and_takes_no_other(tmp_path):
    runner = Runner(tmp_path, "echo up; until [ -e go ]; do sleep 0.1; done")

    def drain() -> None:
        node = ask("squeue", "-h", "-n", f"e2e:{runner.job.id}", "-o", "%N")
        ask("scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=test")
        try:
            assert len(slurm_commands.Controller(Site()).offered().nodes) == 1
        finally:
            ask("scontrol", "update", f"NodeName={node}", "State=UNDRAIN")
        (runner.folder / "go").touch()

    assert runner.run(runner.once(drain)).reason == "exited"


def test_a_node_that_goes_down_is_named_and_avoided(tmp_path):
    runner = Runner(tmp_path, "echo up; sleep 300", site=Site((f"--nodelist={NODES[0]}",)))
    nodes: list[str] = []

    def down() -> None:
        nodes.append(ask("squeue", "-h", "-n", f"e2e:{runner.job.id}", "-o", "%N"))
        ask("scontrol", "update", f"NodeName={nodes[0]}", "State=DOWN", "Reason=test")

    try:
        ended = runner.run(runner.once(down))
    finally:
        for node in nodes:
            # it may have come back by itself: ReturnToService
            subprocess.run(["scontrol", "update", f"NodeName={node}", "State=RESUME"], check=False, capture_output=True)
    assert ended.reason == "node_fail"
    assert runner.runtime.bad == set(nodes)


def test_too_much_memory_is_told_apart(tmp_path):
    script = "python3 -c 'x = bytearray(b\"x\") * (600 << 20); import time; time.sleep(60)'"
    ended = Runner(tmp_path, script, site=Site(("--mem=200",))).run()
    assert ended.reason == "oom"


def test_a_full_disk_on_the_node_is_the_runs_own_failure_with_its_words(tmp_path):
    runner = Runner(tmp_path, "dd if=/dev/zero of=/dev/full bs=1k count=1")
    assert runner.run().reason == "exited"
    assert runner.exit["rc"] == 1
    assert "No space left on device" in (runner.folder / "run.log").read_text()


@pytest.fixture
def mini(tmp_path: Path) -> Miniature:
    made = Miniature(tmp_path)
    made.levels.write_text(
        made.levels.read_text().replace("suites: [mapping]", "suites: []").replace("gpus: 0", "gpus: 2")
    )
    (tmp_path / "image.sqsh").write_text("one")
    return made


def test_a_level_passes_and_fails_on_the_cluster_and_a_detached_one_is_picked_up(mini):
    words = ("level0", "runtime=slurm", f"image={mini.home / 'image.sqsh'}")
    good = mini.doit(*words)
    assert good.rc == 0, good.out
    assert "GPU-hours" in good.out
    assert "/opt/Megatron-Bridge/src/megatron/bridge/__init__.py" in "".join(
        path.read_text() for path in (mini.attempts()[0] / "origins").glob("*.jsonl")
    )
    # the same trees, another override: only the run is new; it is left, found again, and judged
    slow = (*words, "+run.mode=sleep", "timeout=100s")
    left = mini.doit(*slow, "detach=1")
    assert left.rc == 2, left.out
    assert "in flight: job" in left.report["sentence"]
    assert "in flight: job" in mini.doit("status", *words[1:]).out
    again = mini.doit(*slow, "detach=1")
    assert "picking up" in again.out
    attempt = mini.attempts()[-1]
    assert len(mini.attempts()) == 2
    ask("scancel", str(json.loads((attempt / "slurm.json").read_text())["job"]))
    taken = mini.doit(*slow, "retries=0")
    assert taken.rc == 2, taken.out
    assert "cancelled by somebody else" in taken.out
    assert len(mini.attempts()) == 2
    # a broken Bridge is a Fail here as anywhere
    (mini.bridge / "src/megatron/bridge/mapping.py").write_text("FACTOR = 1.5\n")
    broken = mini.doit(*words)
    assert broken.rc == 1, broken.out
    assert "1.5" in broken.case["reasons"][0]["text"]
    run_git(mini.bridge, "checkout", "-q", ".")
    assert mini.doit(*words).case["cached"] is True


def test_a_runner_that_is_killed_loses_nothing(mini):
    words = ("level0", "runtime=slurm", f"image={mini.home / 'image.sqsh'}", "+run.mode=sleep", "timeout=100s")
    first = mini.start(*words)
    until = time.monotonic() + 60
    while not list(mini.build.glob("*/attempts/level0.train/*/started")):
        assert time.monotonic() < until
        time.sleep(0.1)
    first.kill()
    first.communicate(timeout=20)
    second = mini.start(*words)
    for line in second.stdout or ():
        if "picking up" in line:
            break
    second.send_signal(signal.SIGTERM)  # nobody is at a terminal: cancelled
    assert "in flight" not in second.communicate(timeout=60)[0]
    assert second.returncode == 143
    assert len(mini.attempts()) == 1
    assert json.loads((mini.attempts()[0] / "slurm.json").read_text())["state"] == "over"
    assert "in flight" not in mini.doit("status", *words[1:3]).out


LOCAL = """import sys, tasks.settings
tasks.settings._site = lambda path: ({}, {"local_copy": "/tmp"})
from doit.doit_cmd import DoitMain
sys.exit(DoitMain().run(sys.argv[1:]))
"""


CASE = """      {name}:
        {what}
        repo: nemo_rl
        gpus: 2
        timeout: 60s
        steps: 2
        logs: logs
        backend: megatron
"""
WAITS = 'command: [python, train.py]\n        overrides: [run.mode=wait, "run.until={attempt}/go"]'
BAD = "script: tests/functional/mini.sh\n        overrides: [no.such.key=1]"


def test_cases_wait_in_the_queue_side_by_side_and_a_signal_ends_all_of_them(mini):
    """With Core copied to the nodes, because a level of its own would cost ten seconds more."""
    text = mini.levels.read_text()
    cases = [CASE.format(name=name, what=what) for name, what in (("first", WAITS), ("second", WAITS), ("bad", BAD))]
    mini.levels.write_text(text[: text.index("      train:")] + "".join(cases))
    words = ("level0", "runtime=slurm", f"image={mini.home / 'image.sqsh'}", "fresh=1", "max_gpu_hours=99")

    def running() -> list[Path]:
        """Wait until both cases run at the same time; return their attempts."""
        until = time.monotonic() + 90
        while time.monotonic() < until:
            found = [
                mini.attempts(f"level0.{name}") if list(mini.build.glob("*/report")) else []
                for name in ("first", "second")
            ]
            newest = [paths[-1] for paths in found if paths and (paths[-1] / "run.log").exists()]
            if len(newest) == 2 and not any((path / "exit.json").exists() for path in newest):
                return newest
            time.sleep(0.1)
        call.kill()
        pytest.fail(call.communicate()[0])

    def start() -> subprocess.Popen[str]:
        argv = [sys.executable, "-c", LOCAL, *mini.argv(*words)[3:]]  # after `python -m doit`
        env = {**mini.environment(), "PYTHONPATH": str(ROOT)}
        return subprocess.Popen(argv, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    call = start()
    attempts = running()
    assert not mini.attempts("level0.bad")  # its config is Blocked: it must not have GPUs
    call.send_signal(signal.SIGTERM)
    assert call.communicate(timeout=90)[0]
    assert call.returncode == 143
    for path in attempts:
        assert json.loads((path / "slurm.json").read_text())["state"] == "over"
        assert ask("squeue", "-h", "-n", f"e2e:{path.name}") == ""
    call = start()
    first, second = running()
    for path in (second, first):  # the second has its result before its turn: fresh=1 must not run it again
        (path / "go").touch()
        while not (path / "exit.json").exists():
            time.sleep(0.1)
    out = call.communicate(timeout=90)[0]
    assert call.returncode == 2, out
    verdicts = {case["case"]: case["verdict"] for case in mini.report()["cases"]}
    assert verdicts == {"first": "Pass", "second": "Pass", "bad": "Blocked"}, out
    assert [len(mini.attempts(f"level0.{name}")) for name in ("first", "second", "bad")] == [2, 2, 0]
    core = f"/tmp/e2e-{second.name}/mcore/megatron/core/__init__.py"
    assert core in "".join(path.read_text() for path in (second / "origins").glob("*.jsonl"))
    assert [json.loads(path.read_text())["files"] for path in (second / "copies").iterdir()] == [2]
    assert not (second / "work/mcore").exists()


def test_slurms_time_limit_is_told_apart_from_the_agents(limited):
    limited["thread"].join(90)
    assert limited["ended"].reason == "time_limit"
    assert runs.how_it_ended(limited["runner"].exit, "time_limit") == "time_limit"


RAY = """#!/bin/bash
# Stub: units and sessions are files of one folder; `ray start --block` stays like the real one.
home=/e2e/attempt/ray; mkdir -p $home
case "$1 $*" in
start*--block*) touch $home/$SLURMD_NODENAME.$$; exec sleep 300 ;;
start*) touch $home/head ;;
status*) echo " 0.0/$(($(ls $home | wc -l) * 2)).0 worker_units" ;;
esac
"""


@pytest.mark.real
def test_several_nodes_go_through_the_real_ray_sub(tmp_path):
    """ray.sub of the checkout as it is; only `ray` is a stub. Core is copied on both. Last: it wants both nodes."""
    if not os.environ.get("NEMO_RL_REPO"):
        lacking("no NeMo-RL checkout: set NEMO_RL_REPO")
    stub, tree = tmp_path / "stub", tmp_path / "rl"
    for path in (stub, tree):
        path.mkdir()
    (stub / "ray").write_text(RAY)
    (stub / "ray").chmod(0o755)
    (tree / "ray.sub").write_bytes((Path(os.environ["NEMO_RL_REPO"]) / "ray.sub").read_bytes())
    site = slurm_commands.site_of({"account": "a", "partition": "main"})
    runner = Runner(tmp_path, "ls /e2e/attempt/ray; pwd; cat /tmp/copy/mcore/ray; exit 5", site=site, gpus=4)
    shutil.copytree(ROOT / "containers", tmp_path / "agent")  # ray.sub splits words, and ROOT may hold a blank
    mounts = (
        runner.job.mounts[0], Mount(tmp_path / "agent", "/e2e/agent", read_only=True),
        Mount(tree, "/opt/nemo-rl", read_only=False), Mount(stub, "/usr/local/sbin", read_only=True),
        Mount(stub, local_copy.SOURCE, read_only=True),
    )  # fmt: skip
    (runner.folder / local_copy.LIST).write_text(json.dumps({"ray": ["100755", sha256_file(stub / "ray")]}))
    (runner.folder / local_copy.NOTES).mkdir()
    copying = local_copy.arguments("/e2e/attempt", "/tmp/copy/mcore")
    runner.job = dataclasses.replace(runner.job, nodes=2, mounts=mounts, local_copy=copying)
    ended = runner.run()
    assert ended.reason == "exited", (ended, runner.said)
    assert runner.exit["rc"] == 5
    assert "through Ray" in runner.said[0] or "ray.sub" in runner.said[0]
    seen = (runner.folder / "run.log").read_text().split()
    assert (
        len([word for word in seen if word.startswith("n")]) == 1
    )  # the worker of the second node; the head is "head"
    assert "/e2e/attempt" in seen
    assert "sessions" in seen  # of the copy
    assert {path.stem for path in (runner.folder / local_copy.NOTES).iterdir()} == set(NODES)
    assert local_copy.unproved(runner.folder, 2) is None
