"""The whole pipeline with its stages in containers: the Bridge mounted first, files given back, faults found."""

from __future__ import annotations

import json
import os

import pytest

from tests.conftest import run_git
from tests.integration.conftest import HOST, REF
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


def test_an_image_is_built_once_for_its_inputs_and_tells_what_is_inside(mini, client):
    files = {
        "docker/Dockerfile": "ARG BASE_IMAGE\nFROM ${BASE_IMAGE}\nARG NEMO_RL_COMMIT\n"
        "ENV NEMO_RL_COMMIT=${NEMO_RL_COMMIT}\nCOPY docker/METADATA /opt/torch-2.0.dist-info/METADATA\n",
        "docker/METADATA": "Name: torch\nVersion: 2.0\nLicense-Expression: BSD-3-Clause\n",
    }
    for name, text in files.items():
        (mini.nemo_rl / name).parent.mkdir(exist_ok=True)
        (mini.nemo_rl / name).write_text(text)
    words = ("image", "build", "runtime=docker", f"args=BASE_IMAGE={REF}", f"build={mini.build}")
    first = mini.doit(*words, DOCKER_HOST=HOST)
    assert first.rc == 0, first.out
    (known,) = (mini.build / "images").glob("*/provenance.json")
    components = json.loads((known.parent / "sbom.json").read_text())["components"]
    (torch,) = (c for c in components if c["name"] == "torch")
    assert (torch["version"], "BSD-3-Clause" in json.dumps(torch["licenses"])) == ("2.0", True)
    built = json.loads(known.read_text())
    made = client.images.get(built["id"])
    assert made.id[:19] in first.out
    assert f"NEMO_RL_COMMIT={run_git(mini.nemo_rl, 'rev-parse', 'HEAD').strip()}" in made.attrs["Config"]["Env"]
    before = known.stat().st_mtime_ns
    assert mini.doit(*words, DOCKER_HOST=HOST).rc == 0
    assert known.stat().st_mtime_ns == before, "built once for its inputs"
    (mini.nemo_rl / "docker/METADATA").write_text("Name: torch\nVersion: 2.1\n")
    assert mini.doit(*words, DOCKER_HOST=HOST).rc == 0
    assert len(list((mini.build / "images").glob("*/provenance.json"))) == 2
    (mini.nemo_rl / "docker/Dockerfile").write_text("ARG BASE_IMAGE\nFROM ${BASE_IMAGE}\nRUN false\n")
    broken = mini.doit(*words, DOCKER_HOST=HOST)
    assert (broken.rc, "Result: Blocked - " in broken.out) == (2, True), broken.out
