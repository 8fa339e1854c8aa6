"""The stand-ins against their definitions: tests/standins under the CPU environment's Python, on the real Megatron-Core.

Needs BRIDGE_REPO, reads it only. E2E_REAL_BUILD keeps the CPU environment between runs.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tasks import cpu
from tasks.settings import ROOT

BRIDGE = os.environ.get("BRIDGE_REPO", "")

pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not BRIDGE, reason="set BRIDGE_REPO to a real checkout"),
]


def test_each_stand_in_is_what_it_is_defined_to_be_and_refuses_the_rest(tmp_path: Path) -> None:
    home = Path(os.environ.get("E2E_REAL_BUILD") or tmp_path / "build") / "cpu"
    made = cpu.build(home, print)
    attempt = tmp_path / "attempt"
    given = cpu.environment(made, attempt, gpus=1, standins=cpu.OPTIONAL)
    core = Path(BRIDGE) / "3rdparty" / "Megatron-LM"
    try:
        done = subprocess.run(
            [
                str(given.python), "-m", "pytest", "-q", "--noconftest", "-c", os.devnull, "--rootdir", str(tmp_path),
                "-p", "no:cacheprovider", "--import-mode=importlib", str(ROOT / "tests" / "standins"),
            ],
            cwd=tmp_path, capture_output=True, text=True, check=False, timeout=600,
            env={**given.env, "PYTHONPATH": os.pathsep.join([*given.pythonpath, str(core)]), "PYTHONDONTWRITEBYTECODE": "1"},
        )  # fmt: skip
    finally:
        cpu.release(attempt)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    counted = re.search(r"(\d+) passed", done.stdout)
    assert counted, done.stdout
    assert int(counted[1]) >= 50
    assert "skipped" not in done.stdout.splitlines()[-1]
