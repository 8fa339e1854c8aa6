"""GPUs are asked of nvidia-smi before anything starts; each way it can disappoint has its own words."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks import gpus

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
