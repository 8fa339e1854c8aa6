"""The whole pipeline with its stages in containers: the Bridge mounted first, files given back, faults found."""

from __future__ import annotations

import os

import pytest

from tests.conftest import run_git
from tests.integration.conftest import HOST
from tests.miniature import Miniature

pytestmark = pytest.mark.docker


@pytest.fixture
def mini(tmp_path, image) -> Miniature:
    made = Miniature(tmp_path)
    made.levels.write_text(made.levels.read_text().replace("suites: [mapping]", "suites: []"))
    made.image = image
    return made


def test_a_level_runs_in_a_container_and_finds_a_broken_mapping(mini):
    words = ("level0", "runtime=docker", f"image={mini.image}")
    good = mini.doit(*words, DOCKER_HOST=HOST)
    assert good.rc == 0, good.out
    assert good.report["provenance"]["image"]["id"] == mini.image
    attempt = mini.attempts()[0]
    origins = "".join(p.read_text() for p in (attempt / "origins").glob("*.jsonl"))
    assert "/opt/Megatron-Bridge/src/megatron/bridge/__init__.py" in origins
    for path in (attempt, *attempt.rglob("*")):
        assert path.lstat().st_uid == os.getuid(), path
    (mini.bridge / "src/megatron/bridge/mapping.py").write_text("FACTOR = 1.5\n")
    broken = mini.doit(*words, DOCKER_HOST=HOST)
    assert broken.rc == 1, broken.out
    assert "1.5" in broken.case["reasons"][0]["text"]
    run_git(mini.bridge, "checkout", "-q", ".")
    assert mini.doit(*words, DOCKER_HOST=HOST).case["cached"] is True
    assert run_git(mini.nemo_rl, "status", "--porcelain", "--ignored") == ""


def test_a_missing_image_is_blocked_with_a_remedy(mini):
    done = mini.doit("level0", "runtime=docker", "image=nemo-rl-e2e/not-there:1", DOCKER_HOST=HOST)
    assert done.rc == 2
    assert "not-there" in done.report["sentence"]


def test_without_an_engine_it_is_blocked_and_says_where_it_looked(mini):
    done = mini.doit("level0", "runtime=docker", f"image={mini.image}", DOCKER_HOST="unix:///does/not/exist.sock")
    assert done.rc == 2
    assert "/does/not/exist.sock" in done.out
