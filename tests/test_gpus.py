"""GPUs are asked of nvidia-smi before anything starts; each way it can disappoint has its own words."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tasks import gpus
from tests.miniature import Miniature

ONE = "GPU 0: NVIDIA H200 (UUID: GPU-1)\n"


def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")


@pytest.mark.parametrize(
    ("script", "wanted", "words"),
    [
        ("exit 1", 2, "nvidia-smi failed (rc 1)"),
        ("true", 2, "0 of 2 GPUs"),
        (f"echo '{ONE.strip()}'", 2, "1 of 2 GPUs"),
        ("echo 'No devices were found'", 1, "0 of 1 GPUs"),
    ],
)
def test_a_lack_is_said_in_words(tmp_path, monkeypatch, script, wanted, words):
    fake(tmp_path, monkeypatch, script)
    assert words in gpus.lacking(wanted, gpus.visible()).text


def test_enough_is_no_reason_and_the_label_names_model_and_driver(tmp_path, monkeypatch):
    fake(
        tmp_path, monkeypatch, f'case "$1" in -L) echo "{ONE.strip()}"; echo "{ONE.strip()}";; *) echo 580.82.07;; esac'
    )
    seen = gpus.visible()
    assert gpus.lacking(2, seen) is None
    assert seen.label() == "2x NVIDIA H200, driver 580.82.07"


def test_no_nvidia_smi_is_no_gpu(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus.visible().problem == "nvidia-smi is not on PATH"
    assert gpus.lacking(0, gpus.visible()) is None


def test_a_run_on_another_driver_is_the_same_run_and_the_report_says_so(tmp_path):
    mini = Miniature(tmp_path)
    mini.levels.write_text(mini.levels.read_text().replace("suites: [mapping]", "suites: []"))
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    found = []
    for driver in ("570.86", "580.82"):
        program.write_text(f"#!/bin/sh\necho NVIDIA H200, {driver}\n")
        program.chmod(0o755)
        found.append(mini.doit("level0", "fresh=1", PATH=f"{program.parent}:{os.environ['PATH']}"))
    assert [one.case["attempts"][-1]["driver"] for one in found] == ["570.86", "580.82"]
    notes = [" ".join(one.report["limitations"]) for one in found]
    assert ["ran with GPU driver" in note for note in notes] == [False, True], notes
    assert "ran with GPU driver 580.82" in notes[1]
    assert len(list(mini.workspace.glob("records/run/level0.train/*.json"))) == 1  # equal inputs
    assert "GPU driver 580.82" in mini.doit("level0").case["chain"][-1]


@pytest.mark.parametrize(
    ("drivers", "notes"),
    [([], 0), ([None], 0), (["1"], 0), (["1", "1"], 0), (["1", "2"], 1), ([None, "2"], 0)],
)
def test_attempts_on_different_drivers_are_told_apart(drivers, notes):
    assert len(gpus.driver_notes([{"driver": one} for one in drivers], None)) == notes
