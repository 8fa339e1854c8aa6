"""What is said may get lost; what is done and the exit status may not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.faces import Plain, Undisturbed
from tests.miniature import ROOT, Miniature


def test_a_reader_that_has_gone_takes_words_and_nothing_else():
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as out:
        face = Plain(Undisturbed(out), colour=False)
        face.show("done", "probe", "", verdict="Pass")
        face.show("result", "result", "Result: Pass")  # and closing flushes what is left without an error


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_behind_a_redirection_takes_words_and_nothing_else():
    with Path("/dev/full").open("w", encoding="utf-8") as out:
        Plain(Undisturbed(out), colour=False).show("result", "result", "Result: Pass")


def test_without_a_stream_nothing_is_said():
    Plain(Undisturbed(None), colour=False).show("result", "result", "Result: Pass")


@pytest.mark.slow
@pytest.mark.parametrize("words", [("level0",), ("level0", "--json", "fresh=1")])
def test_a_run_whose_reader_goes_is_run_to_its_end(tmp_path, words):
    mini = Miniature(tmp_path)
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        mini.argv(*words), cwd=ROOT, env=mini.environment(), stdout=write, stderr=subprocess.PIPE, check=False
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")
    assert mini.report()["result"] == "Pass"


@pytest.mark.slow
def test_a_look_at_a_build_folder_that_cannot_be_made_is_one_line(tmp_path):
    mini = Miniature(tmp_path)
    (tmp_path / "file").write_text("")
    looked = subprocess.run(
        [sys.executable, "-m", "doit", "levels", f"build={tmp_path / 'file/x'}", f"bridge={mini.bridge}"],
        cwd=ROOT, env=mini.environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert looked.returncode == 2, looked
    assert "Traceback" not in looked.stderr
    assert "file/x" in looked.stdout
