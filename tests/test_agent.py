"""The agent as a runtime starts it: a real process with a real spec, judged by exit.json and run.log alone."""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

AGENT = Path(__file__).resolve().parent.parent / "containers" / "agent.py"
_spec = importlib.util.spec_from_file_location("agent_under_test", AGENT)
assert _spec
assert _spec.loader
agent = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(agent)

# A daemon as Ray starts them: forked twice, a session of its own, holding the command's output open.
DAEMON = """
import os, signal, sys, time
if os.fork(): os._exit(0)
os.setsid()
if os.fork(): os._exit(0)
if "stubborn" in sys.argv: signal.signal(signal.SIGTERM, signal.SIG_IGN)
with open(sys.argv[1] + ".part", "w") as out: out.write(str(os.getpid()))
os.rename(sys.argv[1] + ".part", sys.argv[1])
time.sleep(300)
"""


def until(look: Callable[[], Any], seconds: float = 15) -> Any:
    end = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)
    return found


def alive(pid: int) -> bool:
    try:
        return agent.process(pid)[0] not in "ZX"
    except OSError:
        return False


class Started:
    """An agent process and its results."""

    def __init__(self, folder: Path, spec: dict[str, Any], environ: dict[str, str], words: tuple[str, ...]) -> None:
        self.folder = folder
        (folder / "spec.json").write_text(json.dumps(spec))
        with (folder / "agent.out").open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-E", "-s", "-S", "-B", AGENT, *words, folder / "spec.json"],
                stdin=subprocess.PIPE, stdout=out, stderr=out, start_new_session=True, cwd=folder,
                env={"PATH": os.environ["PATH"], **environ},
            )  # fmt: skip

    def end(self, seconds: float = 30) -> dict[str, Any]:
        """Wait for the end; return exit.json, the agent's own exit status under "status"."""
        status = self.process.wait(seconds)
        assert self.process.stdin
        self.process.stdin.close()
        assert b"Traceback" not in (self.folder / "agent.out").read_bytes()
        return {**json.loads((self.folder / "exit.json").read_bytes()), "status": status}

    def log(self) -> bytes:
        return (self.folder / "run.log").read_bytes()

    def written(self, name: str) -> str:
        """Return the content of a file that the command makes, as soon as it is there."""
        path = self.folder / name
        return str(until(lambda: path.read_text() if path.exists() else ""))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Started]]:
    started: list[Started] = []

    def _start(*argv: str, environ: dict[str, str] | None = None, words: tuple[str, ...] = (), **keys: Any) -> Started:
        spec = {
            "schema": 1, "id": "a1", "argv": argv, "cwd": str(tmp_path), "env": {"PATH": os.environ["PATH"]}, "secrets": [],
            "log": str(tmp_path / "run.log"), "exit": str(tmp_path / "exit.json"), "timeout_s": 60.0,
            "done_pattern": None, "grace_s": 60.0, "term_grace_s": 5.0, "silence_s": None, "owner": None, "give_back": [],
        }  # fmt: skip
        started.append(Started(tmp_path, {**spec, **keys}, environ or {}, words))
        return started[-1]

    yield _start
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
            one.process.wait()
        if one.process.stdin:
            one.process.stdin.close()


@pytest.mark.parametrize(
    ("script", "rc", "status"),
    [("exit 0", 0, 0), ("exit 3", 3, 3), ("false | true", 1, 1), ("kill -9 $$", -9, 137), ("kill -TERM $$", -15, 143)],
)
def test_the_commands_own_status_is_recorded_and_repeated(
    start: Callable[..., Started], script: str, rc: int, status: int
) -> None:
    ended = start("bash", "-c", script).end()
    assert (ended["rc"], ended["reason"], ended["status"]) == (rc, "exited", status)


def test_exit_record_is_complete_and_the_log_hash_is_true(start: Callable[..., Started]) -> None:
    one = start("bash", "-c", "echo one; echo two >&2; printf three")
    ended = one.end()
    assert one.log() == b"one\ntwo\nthree"
    assert ended["log_sha256"] == hashlib.sha256(one.log()).hexdigest()
    assert (ended["id"], ended["schema"], ended["lines"], ended["done_seen"]) == ("a1", 1, 2, False)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", ended["started"])
    assert ended["environment"]["cpus"] >= 1
    assert ended["environment"]["disk_free_bytes"] > 0
    assert ended["environment"]["subreaper"] is True
    assert not list(one.folder.glob("*.part"))


def test_the_command_sees_no_terminal_an_empty_stdin_and_only_the_specs_environment(
    start: Callable[..., Started],
) -> None:
    script = "import os,sys; print(sys.stdin.read() == '', sys.stdout.isatty(), sorted(os.environ), os.getsid(0) == os.getpid())"
    one = start(
        sys.executable, "-c", script, environ={"FOREIGN": "1", "HF_TOKEN": "tok-12345"}, secrets=["HF_TOKEN", "UNSET"]
    )
    one.end()
    names = sorted({"PATH", "HF_TOKEN", "LC_CTYPE"})
    assert one.log().decode().strip() == f"True False {names} True"


@pytest.mark.parametrize("argv", [["/no/such/program"], ["/etc"], ["bad\0word"]])
def test_a_command_that_cannot_start_says_why(start: Callable[..., Started], argv: list[str]) -> None:
    one = start(*argv)
    ended = one.end()
    assert (ended["rc"], ended["reason"], ended["status"]) == (None, "spawn_failed", 127)
    assert ended["detail"]
    assert b"cannot start" in one.log()


def test_a_missing_working_directory_is_a_failed_start(start: Callable[..., Started]) -> None:
    ended = start("true", cwd="/no/such/folder").end()
    assert ended["reason"] == "spawn_failed"
    assert "/no/such/folder" in ended["detail"]


@pytest.mark.parametrize(
    "spec",
    ["", "[]", '{"schema": 2, "id": "x"}', '{"schema": 1}', "\0"],
    ids=["empty", "list", "future", "bare", "nul"],
)
def test_an_unusable_spec_is_one_line_and_status_2(tmp_path: Path, spec: str) -> None:
    (tmp_path / "spec.json").write_text(spec)
    run = subprocess.run([sys.executable, AGENT, tmp_path / "spec.json"], capture_output=True, check=False)
    assert run.returncode == 2
    assert len(run.stderr.splitlines()) == 1


def test_an_invalid_done_pattern_is_refused_before_anything_starts(start: Callable[..., Started]) -> None:
    one = start("touch", "started", done_pattern="(")
    assert one.process.wait(10) == 2
    assert not (one.folder / "started").exists()


# limits


def test_time_limit_stops_the_whole_tree_also_a_stubborn_double_forked_daemon(start: Callable[..., Started]) -> None:
    script = f"python3 -c '{DAEMON}' \"$PWD/pid\" stubborn; sleep 300".replace("python3", f"'{sys.executable}'")
    one = start("bash", "-c", script, timeout_s=1.0, term_grace_s=0.5)
    daemon = int(one.written("pid"))
    ended = one.end()
    assert (ended["reason"], ended["status"], ended["survivors"]) == ("timeout", 124, 0)
    assert ended["rc"] == -15
    assert not alive(daemon)


def test_a_daemon_that_outlives_its_command_is_stopped_and_counted(start: Callable[..., Started]) -> None:
    one = start(sys.executable, "-c", DAEMON, "pid")
    ended = one.end()
    assert (ended["rc"], ended["reason"], ended["leftover"], ended["survivors"]) == (0, "exited", 1, 0)
    assert not alive(int(one.written("pid")))


def test_a_tee_in_the_background_may_finish_its_last_lines(start: Callable[..., Started]) -> None:
    one = start("bash", "-c", "exec > >(sleep 0.3; cat); echo late")
    ended = one.end()
    assert (one.log(), ended["leftover"]) == (b"late\n", 0)


def test_done_then_hang_ends_after_the_grace_and_says_so(start: Callable[..., Started]) -> None:
    one = start(
        "bash",
        "-c",
        "echo '(x pid=1) [after training is done]'; sleep 300",
        done_pattern="training is done",
        grace_s=0.3,
    )
    ended = one.end(10)
    assert (ended["reason"], ended["done_seen"], ended["status"]) == ("hang", True, 124)


def test_done_then_a_timely_end_is_a_normal_end(start: Callable[..., Started]) -> None:
    ended = start("bash", "-c", "echo all done; exit 0", done_pattern="^all done$", grace_s=30.0).end()
    assert (ended["reason"], ended["done_seen"], ended["rc"]) == ("exited", True, 0)


def test_the_grace_replaces_the_long_limit_once_done_was_seen(start: Callable[..., Started]) -> None:
    ended = start("bash", "-c", "echo done; sleep 1; exit 0", done_pattern="done", timeout_s=0.7, grace_s=30.0).end()
    assert (ended["reason"], ended["rc"]) == ("exited", 0)


def test_silence_ends_a_run_and_output_without_a_newline_is_no_silence(start: Callable[..., Started]) -> None:
    script = "for i in 1 2 3 4 5 6 7 8; do printf .; sleep 0.1; done; sleep 300"
    ended = start("bash", "-c", script, silence_s=0.5).end(10)
    assert (ended["reason"], ended["status"]) == ("silent", 124)
    assert ended["duration_s"] > 1.0


# being stopped


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_stops_the_tree_within_the_grace(start: Callable[..., Started], number: int) -> None:
    one = start("bash", "-c", "trap 'echo got TERM; exit 9' TERM; touch up; while :; do sleep 0.05; done")
    until((one.folder / "up").exists)
    one.process.send_signal(number)
    ended = one.end(5)
    assert (ended["reason"], ended["rc"], ended["status"]) == ("terminated", 9, 143)
    assert b"got TERM" in one.log()


def test_a_second_signal_cuts_the_grace_short(start: Callable[..., Started]) -> None:
    one = start("bash", "-c", "trap '' TERM; touch up; while :; do sleep 0.05; done", term_grace_s=60.0)
    until((one.folder / "up").exists)
    one.process.terminate()
    end = time.monotonic() + 15
    while one.process.poll() is None and time.monotonic() < end:  # two equal signals at once would be one: repeat
        one.process.terminate()
        time.sleep(0.05)
    ended = one.end(0.1)
    assert (ended["reason"], ended["rc"]) == ("terminated", -9)


def test_a_signal_before_the_command_starts_still_leaves_a_record(
    start: Callable[..., Started], tmp_path: Path
) -> None:
    slow = tmp_path / "bin" / "nvidia-smi"  # what the agent asks before it starts the command
    slow.parent.mkdir()
    slow.write_text("#!/bin/bash\ntouch asked; for i in 1 2 3 4 5; do sleep 0.1; done; echo NVIDIA H100, 570.86.15\n")
    slow.chmod(0o755)
    one = start("touch", "started", environ={"PATH": f"{slow.parent}:{os.environ['PATH']}"})
    until((tmp_path / "asked").exists)
    one.process.terminate()
    ended = one.end(10)
    assert (ended["rc"], ended["reason"], ended["environment"]["gpus"]) == (None, "terminated", ["NVIDIA H100"])
    assert ended["environment"]["driver"] == "570.86.15"
    assert not (tmp_path / "started").exists()


def test_death_of_the_runner_stops_everything_through_the_lifeline(start: Callable[..., Started]) -> None:
    one = start("bash", "-c", f"'{sys.executable}' -c '{DAEMON}' \"$PWD/pid\"; sleep 300")
    daemon = int(one.written("pid"))
    assert one.process.stdin
    one.process.stdin.close()  # what the kernel does for a runner that was killed
    one.process.wait(10)
    ended = json.loads((one.folder / "exit.json").read_bytes())
    assert ended["reason"] == "runner_gone"
    assert not alive(daemon)


def test_without_a_pipe_as_stdin_there_is_no_lifeline(tmp_path: Path, start: Callable[..., Started]) -> None:
    start("bash", "-c", "sleep 0.3; exit 5").end()
    argv = [sys.executable, AGENT, tmp_path / "spec.json"]
    assert subprocess.run(argv, stdin=subprocess.DEVNULL, check=False, timeout=20).returncode == 5


# the log


def test_arbitrary_bytes_and_very_long_lines_are_kept_as_they_are(start: Callable[..., Started]) -> None:
    script = "import sys; o = sys.stdout.buffer; o.write(bytes(range(256)) * 40); o.write(b'x' * 3_000_000); o.write(b'\\nend done\\n')"
    one = start(sys.executable, "-c", script, done_pattern="^end done$", grace_s=5.0)
    ended = one.end()
    assert one.log() == bytes(range(256)) * 40 + b"x" * 3_000_000 + b"\nend done\n"
    assert ended["done_seen"]


def test_the_log_can_be_read_while_the_command_runs(start: Callable[..., Started]) -> None:
    one = start("bash", "-c", "echo step 1/2; while [ ! -e go ]; do sleep 0.02; done; echo step 2/2")
    until(lambda: (one.folder / "run.log").exists() and one.log() == b"step 1/2\n")
    (one.folder / "go").touch()
    one.end()
    assert one.log() == b"step 1/2\nstep 2/2\n"


def test_secrets_never_reach_the_log(start: Callable[..., Started]) -> None:
    script = 'echo "a ${HF_TOKEN}b $WANDB_API_KEY"; printf %s "${HF_TOKEN:0:5}"; sleep 0.2; printf "%s\\n" "${HF_TOKEN:5}"; printf %s "$HF_TOKEN"'
    secrets = {"HF_TOKEN": "hf_secretvalue", "WANDB_API_KEY": "hf_secret", "SHORT": "ab"}
    one = start("bash", "-c", script, secrets=list(secrets), environ=secrets)
    one.end()
    assert one.log() == b"a ***b ***\n***\n***"
    assert b"hf_sec" not in (one.folder / "exit.json").read_bytes()


@given(
    parts=st.lists(
        st.sampled_from([b"hf_abc", b"hf_abcdef", b"hf_", b"abc", b"x", b"\n", b"def", b"\xff", b"hf_abchf_abc"]),
        max_size=20,
    ),
    cuts=st.lists(st.integers(0, 120), max_size=8),
)
def test_masking_does_not_depend_on_where_the_stream_is_cut(parts: list[bytes], cuts: list[int]) -> None:
    data = b"".join(parts)
    mask = agent.Mask(["hf_abc", "hf_abcdef\n", ""])
    edges = sorted({0, *(c for c in cuts if c < len(data)), len(data)})
    out = b"".join(mask.feed(data[a:b]) for a, b in itertools.pairwise(edges)) + mask.feed(b"", final=True)
    assert out == re.sub(b"hf_abcdef|hf_abc", b"***", data)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root for a small file system")
def test_a_full_disk_loses_log_lines_but_neither_the_run_nor_its_record(
    start: Callable[..., Started], tmp_path: Path
) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "none", small], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount: {mounted.stderr.decode()}")
    try:
        script = "for i in {1..3000}; do echo 0123456789012345678901234567890123456789; done; touch ../finished; exit 4"
        one = start("bash", "-c", script, log=str(small / "run.log"), exit=str(small / "exit.json"), cwd=str(small))
        assert one.process.wait(20) == 4
        ended = json.loads((small / "exit.json").read_bytes())
        assert (ended["rc"], ended["reason"], ended["lines"]) == (4, "exited", 3000)
        assert "No space left" in ended["log_error"]
        assert ended["log_lost_bytes"] > 60_000
        assert ended["log_sha256"] == hashlib.sha256((small / "run.log").read_bytes()).hexdigest()
        assert (tmp_path / "finished").exists()
    finally:
        subprocess.run(["umount", small], check=True)


# giving files back


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to change owners")
@pytest.mark.parametrize("mode", ["run", "killed"])
def test_files_made_by_root_are_given_back_to_the_caller(
    start: Callable[..., Started], tmp_path: Path, mode: str
) -> None:
    foreign = tmp_path.parent / f"{tmp_path.name}-foreign"
    foreign.write_text("not ours")
    results = tmp_path / "results"
    script = f"mkdir -p results/a; touch results/a/f; ln -s {foreign} results/link; exit 1"
    keys: dict[str, Any] = {"owner": [1234, 4321], "give_back": [str(results)]}
    one = start("bash", "-c", script, **(keys if mode == "run" else {}))
    assert one.end()["rc"] == 1
    if mode == "killed":
        assert start("bash", "-c", script, words=("give-back",), **keys).process.wait(10) == 0
    found = {
        p: (p.lstat().st_uid, p.lstat().st_gid) for p in (results, results / "a", results / "a" / "f", results / "link")
    }
    assert set(found.values()) == {(1234, 4321)}
    assert foreign.stat().st_uid == 0


def test_a_rootless_engine_keeps_the_owner(start: Callable[..., Started], tmp_path: Path) -> None:
    before = tmp_path.stat().st_uid
    start("true", owner=[1234, 4321], give_back=[str(tmp_path)], environ={"NEMO_RL_E2E_ROOTLESS": "1"}).end()
    assert tmp_path.stat().st_uid == before


def test_probe_is_handed_to_the_file_beside_the_agent(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_bytes(AGENT.read_bytes())
    (tmp_path / "probe.py").write_text("def main(argv):\n    print(argv)\n    return 7\n")
    run = subprocess.run([sys.executable, tmp_path / "agent.py", "probe", "x.json"], capture_output=True, check=False)
    assert (run.returncode, run.stdout) == (7, b"['x.json']\n")
