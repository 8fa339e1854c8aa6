"""`doitw` makes its environment once, whole or not at all, wherever and however often it is called; pip is played."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tasks.installed import PATHS, VARIABLES
from tasks.settings import ROOT

# A python that makes "environments" whose pip writes a line to $INSTALLS and whose doit prints its arguments.
PYTHON = """#!/bin/bash
case "$1 $2" in
  "-m venv") mkdir -p "$3/bin" "$3/lib"; cp "$0" "$3/bin/python"; : >"$3/pyvenv.cfg" ;;
  "-m pip") echo x >>"$INSTALLS"; while [ -e "$HOLD" ]; do sleep 0.05; done ;;
  "-c import sysconfig"*) echo "$(dirname "$(dirname "$0")")/lib" ;;
  "-c import sys"*) exit 0 ;;
  "--version "*) echo "Python 3.12.0" ;;
  *) shift; echo "doit: $*"; pwd; for name in ${SHOW-}; do echo "${!name}"; done ;;
esac
"""


class Project:
    """A copy of the launcher in a folder with a blank."""

    def __init__(self, home: Path) -> None:
        self.root = home / "my project"
        self.root.mkdir()
        shutil.copy(ROOT / "doitw", self.root)
        shutil.copytree(ROOT / "requirements", self.root / "requirements")
        (home / "python").write_text(PYTHON)
        (home / "python").chmod(0o755)
        self.hold, self.installs = home / "hold", home / "installs"
        self.env = {
            **os.environ,
            "PYTHON": str(home / "python"),
            "HOLD": str(self.hold),
            "INSTALLS": str(self.installs),
        }

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Start the launcher from another folder, in a process group of its own."""
        return subprocess.Popen(
            [str(self.root / "doitw"), *words], cwd="/", env=self.env, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def call(self, *words: str) -> tuple[int, str]:
        """Run the launcher to its end."""
        with self.start(*words) as process:
            out, _ = process.communicate(timeout=60)
        return process.returncode, out

    def installed(self) -> int:
        """Return how often pip was called."""
        return len(self.installs.read_text().splitlines()) if self.installs.exists() else 0


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def until(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def test_the_first_call_installs_says_so_and_runs_in_the_project_with_all_arguments(project):
    rc, out = project.call("level0", "a b", "policy.x=y z")
    assert rc == 0
    assert "first call: creating .venv" in out
    assert "doit: level0 a b policy.x=y z" in out
    assert str(project.root) in out
    assert project.call("again") == (0, f"doit: again\n{project.root}\n")
    assert project.installed() == 1


def test_relative_paths_are_the_callers_and_every_other_word_stays(project, tmp_path):
    project.call("first")
    (tmp_path / "from here").mkdir()
    words = [f"{name}=x y" for name in PATHS] + ["a.bridge=x", "bridge=/x", "build=~/x", "level0", "image=x", "levels="]
    whole = [f"{name}={tmp_path}/from here/x y" for name in PATHS] + words[len(PATHS) :]
    env = {**project.env, **dict.fromkeys(VARIABLES, "x"), "SHOW": " ".join(VARIABLES)}
    done = subprocess.run(
        [project.root / "doitw", *words],
        cwd=tmp_path / "from here",
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[0] == f"doit: {' '.join(whole)}"
    assert done.stdout.splitlines()[2:] == [f"{tmp_path}/from here/x"] * len(VARIABLES)


def test_two_first_calls_at_once_install_once(project):
    project.hold.touch()
    with project.start("one") as first:
        until(lambda: project.installed() == 1)
        with project.start("two") as second:
            project.hold.unlink()
            outs = [p.communicate(timeout=60)[0] for p in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0], outs
    assert project.installed() == 1


def test_an_interrupted_first_call_leaves_nothing_that_is_believed(project):
    project.hold.touch()
    with project.start("one") as first:
        until(lambda: project.installed() == 1)
        os.killpg(first.pid, signal.SIGKILL)
        first.communicate()
    assert not (project.root / ".venv").exists()
    project.hold.unlink()
    rc, out = project.call("two")
    assert (rc, "doit: two" in out) == (0, True)
    assert sorted(p.name for p in project.root.glob(".venv*")) == [".venv", ".venv.lock"]


def test_changed_requirements_make_a_new_environment(project):
    project.call()
    with (project.root / "requirements/dev.txt").open("a") as pins:
        pins.write("# another pin\n")
    project.call()
    assert project.installed() == 2


def test_without_a_usable_python_it_says_what_to_install(project, tmp_path):
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("bash", "env", "cat", "sha256sum", "cut", "flock", "rm", "dirname", "readlink", "grep"):
        (tools / name).symlink_to(shutil.which(name) or name)
    project.env |= {"PATH": str(tools), "PYTHON": ""}
    rc, out = project.call("level0")
    assert rc == 2
    assert "no Python 3.11 to 3.13" in out
    assert "Result: Blocked" in out
