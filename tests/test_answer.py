"""report.json says what was asked and what came of it; what has not run is never a Pass."""

from __future__ import annotations

import pytest

from tests.miniature import Miniature


def test_a_single_stage_is_answered_without_cases(tmp_path):
    done = Miniature(tmp_path).doit("sync")
    assert done.rc == 0
    assert done.report["result"] == "Pass"
    assert done.report["cases"] == []
    assert done.report["provenance"]["mcore"]["digest"]


@pytest.mark.slow
def test_only_the_probe_proves_only_the_import(tmp_path):
    mini = Miniature(tmp_path)
    done = mini.doit("probe")
    assert done.rc == 0
    assert "imports the Bridge under test" in done.report["sentence"]
    (mini.bridge / "src/megatron/bridge/__init__.py").write_text("raise RuntimeError('no')\n")
    broken = mini.doit("probe")
    assert broken.rc == 1
    assert str(mini.bridge / "src/megatron/bridge/__init__.py") in broken.out  # the user's file, not the snapshot's


def test_a_core_that_is_not_checked_out_is_blocked_with_the_command(tmp_path):
    mini = Miniature(tmp_path)
    import shutil

    shutil.rmtree(mini.bridge / "3rdparty/Megatron-LM")
    (mini.bridge / "3rdparty/Megatron-LM").mkdir()
    done = mini.doit("level0")
    assert done.rc == 2
    assert "submodule update --init --recursive" in done.out
