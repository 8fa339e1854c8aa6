"""What makes two builds the same, and what a build's words may be; real builds are in tests/integration."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tasks import records
from tasks.errors import UserError
from tasks.image_build import INVENTORY, arguments, inputs

DOCKERFILE = "ARG BASE=x\nFROM ${BASE}\nARG NEMO_RL_COMMIT\n  ARG indented\nARG JOBS=3\n"


def test_arguments_are_the_dockerfiles_own_and_the_commit_is_always_said() -> None:
    assert arguments("JOBS=4,BASE=a=b", DOCKERFILE, "c0ffee") == {
        "BASE": "a=b",
        "JOBS": "4",
        "NEMO_RL_COMMIT": "c0ffee",
    }
    assert arguments(None, "FROM x", "c0ffee") == {}
    for wrong in ("JOBS", "JBOS=4", "=4"):
        with pytest.raises(UserError, match="write NAME=VALUE"):
            arguments(wrong, DOCKERFILE, None)


def test_every_input_of_a_build_is_in_its_digest_and_order_is_not() -> None:
    first = ("FROM a", "context", {"A": "1", "B": "2"}, "release")
    others = [
        ("FROM b", *first[1:]), (first[0], "other", *first[2:]), (*first[:2], {"A": "1", "B": "3"}, "release"),
        (*first[:3], ""),
    ]  # fmt: skip
    keys = {records.input_digest(inputs(*one)) for one in (first, *others)}
    assert len(keys) == 5
    assert inputs("FROM a", "context", {"B": "2", "A": "1"}, "release") == inputs(*first)


def test_the_inventory_reads_both_kinds_of_metadata(tmp_path: Path) -> None:
    info = tmp_path / "site/torch-2.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Name: torch\nVersion: 2.0\nLicense-Expression: BSD-3-Clause\n\nText: no field\n")
    (tmp_path / "status").write_text(
        "Package: bash\nStatus: install ok installed\nArchitecture: amd64\nVersion: 5.2\n\n"
        "Package: gone\nStatus: deinstall ok config-files\nVersion: 1\n"
    )
    script = INVENTORY.replace("/var/lib/dpkg/status", str(tmp_path / "status")).replace('"/")', f'"{tmp_path}")')
    told = json.loads(subprocess.run([sys.executable, "-I", "-c", script], capture_output=True, check=True).stdout)
    assert told == {"dpkg": [["bash", "5.2", "amd64"]], "pip": [["torch", "2.0", "BSD-3-Clause", f"{tmp_path}/site"]]}
