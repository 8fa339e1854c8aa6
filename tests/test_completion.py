"""Shell completion: what is offered, by the shells themselves where they are installed."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tasks import completion, settings
from tests.miniature import Miniature

NAMES = ("level0", "level0.train", "level1", "levels", "rehearse:level0.train", "unit:mapping", "why")


def offered(line: str, folder: Path) -> list[str]:
    """Return what the bash function puts into COMPREPLY; compopt exists only while readline asks."""
    ask = '\ncompopt() { :; }\nCOMP_LINE=$1 COMP_POINT=${#1}\n_nemo_rl_e2e\nprintf "%s\\n" "${COMPREPLY[@]}"'
    argv = ["bash", "--norc", "-euc", completion.script("bash", NAMES) + ask, "bash", line]
    env = {"PATH": os.environ["PATH"], "LC_ALL": "C"}
    done = subprocess.run(argv, capture_output=True, text=True, check=True, cwd=folder, env=env)
    assert done.stderr == ""
    return done.stdout.split("\n")[:-1] if done.stdout.strip() else []


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("doit lev", ["level0", "level0.train", "level1", "levels", "levels="]),
        ("./doitw level0.", ["level0.train"]),
        ("doit level0 runtime=p", ["podman"]),
        ("doit level0 runt", ["runtime="]),
        ("doit rehearse:l", ["level0.train"]),
        ("doit unit:mapping uni", ["unit:mapping"]),
        ("doit why level1", ["level1"]),
        ("doit level0 build=a", ["a folder"]),
        ("doit nonsense", []),
        ("doit level0 timeout=", []),
        ("doit level0 'x *", []),
    ],
)
def test_bash_offers(line: str, expected: list[str], tmp_path: Path) -> None:
    (tmp_path / "a folder").mkdir()
    got = [word.removeprefix("build=") for word in offered(line, tmp_path)]
    assert got == expected


def test_bash_completes_at_a_terminal(tmp_path: Path) -> None:
    """Press TAB in a real interactive bash: names with a colon and values after = are completed in place."""
    (tmp_path / "completion").write_text(completion.script("bash", NAMES))
    child, terminal = pty.fork()
    if child == 0:
        os.environ.update(PS1="$ ", TERM="dumb", INPUTRC="/dev/null")
        os.execvp("bash", ["bash", "--norc", "--noprofile", "-i"])  # noqa: S606
    shown = b""
    try:
        os.write(terminal, f". {tmp_path}/completion; doit() {{ echo got-\"$*\"; }}; echo rea''dy\n".encode())
        for line, wanted in (
            (b"", b"ready\r\n"),
            (b"doit reh\tx\n", b"got-rehearse:level0.train x\r\n"),
            (b"doit rehearse:l\tx\n", b"got-rehearse:level0.train x\r\n"),
            (b"doit runtime=loc\tx\n", b"got-runtime=local x\r\n"),
            (b"doit runt\tdocker\n", b"got-runtime=docker\r\n"),
        ):
            os.write(terminal, line)
            shown = b""
            deadline = time.monotonic() + 20
            while wanted not in shown:
                assert select.select([terminal], [], [], max(0, deadline - time.monotonic()))[0], (line, shown)
                shown += os.read(terminal, 4096)
    finally:
        os.close(terminal)
        os.waitpid(child, 0)


@pytest.mark.skipif(not shutil.which("fish"), reason="fish is not installed")
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("doit level0.", ["level0.train"]),
        ("doit rehearse:l", ["rehearse:level0.train"]),
        ("doit level0 runtime=p", ["runtime=podman"]),
        ("doitw build=a", ["build=a folder/"]),
    ],
)
def test_fish_offers(line: str, expected: list[str], tmp_path: Path) -> None:
    (tmp_path / "a folder").mkdir()
    argv = ["fish", "--no-config", "-c", f'{completion.script("fish", NAMES)}\ncomplete -C "{line}"']
    done = subprocess.run(argv, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert [row.partition("\t")[0] for row in done.stdout.splitlines()] == expected


@pytest.mark.skipif(not shutil.which("zsh"), reason="zsh is not installed")
@pytest.mark.parametrize(
    ("prefix", "expected"),
    [("lev", "-a names\n-S  -a settings\n"), ("runtime=p", "-a values\n"), ("build=a", "compset -P *=\n_files\n")],
)
def test_zsh_asks_for_the_right_kind_of_word(prefix: str, expected: str) -> None:
    stubs = (
        'compdef() { : }\ncompadd() { print -r -- "$@" }\ncompset() { print compset "$@" }\n_files() { print _files }\n'
    )
    code = f"{stubs}{completion.script('zsh', NAMES)}\nPREFIX={prefix}\n_nemo_rl_e2e"
    done = subprocess.run(["zsh", "-f", "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == (expected, "")


def test_the_command_prints_the_names_of_this_levels_file(tmp_path: Path) -> None:
    mini = Miniature(tmp_path)
    done = mini.doit("completion", "bash")
    assert done.rc == 0
    for name in ("level0.train", "rehearse:", "baseline:level0.train", "unit:mapping", "levels", "runtime=slurm"):
        assert f"{name} " in done.out or name == "rehearse:", name
    assert "run:level0.train" not in done.out
    assert all(f" {name}=" in done.out for name in settings.SETTINGS)
    wrong = mini.doit("completion", "tcsh")
    assert wrong.rc == 2
    assert "bash|zsh|fish" in wrong.out


def test_completing_starts_no_process_of_ours_and_is_fast(tmp_path: Path) -> None:
    offered("doit lev", tmp_path)
    started = time.monotonic()
    offered("doit lev", tmp_path)
    assert time.monotonic() - started < 0.3 or "COV_CORE_SOURCE" in os.environ
    assert sys.executable not in completion.script("bash", NAMES)
