"""Every precondition on one page: what is missing is said once, with a remedy, and secrets by their presence alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.miniature import Miniature


def findings(mini: Miniature, *words: str, **env: str) -> tuple[int, dict[str, dict[str, Any]], str]:
    done = mini.doit("doctor", "--json", *words, **env)
    return done.rc, {one["subject"]: one for one in json.loads(done.out)}, done.out


@pytest.fixture
def mini(tmp_path: Path) -> Miniature:
    return Miniature(tmp_path)


def test_a_machine_that_can_run_the_levels_file_is_ready(mini: Miniature) -> None:
    rc, found, _ = findings(mini)
    assert (rc, found["bridge"]["state"], found["nemo_rl"]["state"]) == (0, "ok", "ok")
    assert ", clean" in found["mcore"]["text"]
    assert not (mini.build / "leases").exists()  # it only looks


def test_a_missing_bridge_is_said_once_and_its_core_is_not_missed_too(mini: Miniature) -> None:
    rc, found, _ = findings(mini, "bridge=")
    assert (rc, found["bridge"]["state"]) == (2, "bad")
    assert "BRIDGE_REPO is not set" in found["bridge"]["text"]
    assert "mcore" not in found


def test_a_missing_core_has_the_command_that_brings_it(mini: Miniature) -> None:
    shutil.rmtree(mini.bridge / "3rdparty")
    rc, found, _ = findings(mini)
    assert (rc, found["mcore"]["state"], found["mcore"]["remedy"][:20]) == (2, "bad", "git submodule update")


def test_gpus_that_the_levels_file_asks_for_are_missed(mini: Miniature) -> None:
    mini.levels.write_text(mini.levels.read_text().replace("gpus: 0", "gpus: 4"))
    rc, found, _ = findings(mini, PATH="/usr/bin:/bin")
    assert (rc, found["gpus"]["state"]) == (2, "bad")
    assert "levels need 4 or more" in found["gpus"]["text"]


def test_tokens_are_told_by_name_only(mini: Miniature) -> None:
    _, found, out = findings(mini, HF_TOKEN="hf_very_secret_value")
    assert "HF_TOKEN" in found["tokens"]["text"]
    assert "hf_very_secret_value" not in out
