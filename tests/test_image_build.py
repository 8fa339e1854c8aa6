"""What makes two builds the same, and what a build's words may be; real builds are in tests/integration."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tasks.errors import UserError
from tasks.files import sha256_json
from tasks.image_build import arguments, choice, inputs
from tasks.image_facts import PROGRAM, cyclonedx
from tasks.settings import load

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

A, B = (f"host/base@sha256:{letter * 64}" for letter in "ab")
DOCKERFILE = f"""\
ARG BASE={A}
FROM ${{BASE}} AS base
ARG NEMO_RL_COMMIT
  ARG indented
ARG JOBS=3
COPY uv.lock /opt/
FROM base AS release
FROM base AS cache
COPY README.md /
"""


def test_arguments_are_the_dockerfiles_own_and_the_commit_is_always_said() -> None:
    assert arguments("JOBS=4,BASE=a=b", DOCKERFILE, "c0ffee") == {
        "BASE": "a=b", "JOBS": "4", "NEMO_RL_COMMIT": "c0ffee"
    }  # fmt: skip
    assert arguments("indented=1", DOCKERFILE, "c")["indented"] == "1"
    assert arguments("", "FROM x", "c0ffee") == {}
    for wrong in ("JOBS", "JBOS=4", "=4"):
        with pytest.raises(UserError, match="write NAME=VALUE"):
            arguments(wrong, DOCKERFILE, "")
    with pytest.raises(UserError, match="^args=HF_TOKEN: a build argument can be read in the image for ever"):
        arguments("HF_TOKEN=hf_x", f"{DOCKERFILE}ARG HF_TOKEN\n", "")


def test_every_input_of_a_build_is_in_its_digest_and_nothing_else(
    make_repo: Callable[..., Path], tmp_path: Path
) -> None:
    repo = make_repo("RL", {"docker/Dockerfile": DOCKERFILE, "uv.lock": "a", "README.md": "b", "nemo_rl/x.py": ""})
    given = load({"nemo_rl": str(repo), "build": str(tmp_path / "build")}, environ={})

    def digest(target: str = "", args: str = "") -> str:
        return sha256_json(inputs(given, None, *choice(given, target, args), {}))  # type: ignore[arg-type]

    first = digest()
    assert digest("release") == first, "what NeMo-RL publishes is the default"
    (repo / "README.md").write_text("only the cache stage copies it")
    (repo / "nemo_rl/x.py").write_text("mounted, not copied")
    assert digest() == first
    others = [digest("cache"), digest("base"), digest(args="JOBS=4"), digest(args=f"BASE={B}")]
    (repo / "uv.lock").write_text("c")
    others.append(digest())
    (repo / ".dockerignore").write_text("docs")
    others.append(digest())
    (repo / "docker/Dockerfile").write_text(f"# a comment\n{DOCKERFILE}")
    others.append(digest())
    assert len({first, *others}) == 8


def test_the_listing_reads_both_kinds_of_metadata_and_makes_a_bill_of_materials(tmp_path: Path) -> None:
    for folder, name, text in (
        ("torch-2.0.dist-info", "METADATA", "Name: torch\nVersion: 2.0\nLicense-Expression: BSD-3-Clause\n\nText: no field\n"),
        ("old.egg-info", "PKG-INFO", "Name: old_one\nVersion: 1\nClassifier: License :: OSI Approved :: MIT License\n"),
    ):  # fmt: skip
        (tmp_path / "site" / folder).mkdir(parents=True)
        (tmp_path / "site" / folder / name).write_text(text)
    (tmp_path / "status").write_text(
        "Package: bash\nStatus: install ok installed\nArchitecture: amd64\nVersion: 5.2\n\n"
        "Package: gone\nStatus: deinstall ok config-files\nVersion: 1\n"
    )
    script = PROGRAM.read_text().replace("/var/lib/dpkg/status", str(tmp_path / "status"))
    done = subprocess.run([sys.executable, "-I", "-c", script, tmp_path], capture_output=True, check=True)
    told = json.loads(done.stdout)
    site = f"{tmp_path}/site"
    assert told == {
        "debian": [["bash", "5.2", "amd64"]],
        "python": [["old_one", "1", "MIT License", site], ["torch", "2.0", "BSD-3-Clause", site]],
    }
    bill: Any = cyclonedx(told, "sha256:1")
    assert [one["purl"] for one in bill["components"]] == [
        "pkg:deb/debian/bash@5.2?arch=amd64", "pkg:pypi/old-one@1", "pkg:pypi/torch@2.0"
    ]  # fmt: skip
    assert bill["components"][2]["licenses"] == [{"license": {"name": "BSD-3-Clause"}}]
