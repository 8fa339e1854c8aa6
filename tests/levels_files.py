"""Small levels files for tests, and what loading them says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks import levels
from tasks.errors import UserError

CASE = """schema: 1
suites:
  maps: {repo: bridge, paths: [tests/unit_tests/models/test_param_mapping.py]}
levels:
  0:
    title: smoke
    suites: [maps]
    cases:
      one:
        script: tests/functional/one.sh
        gpus: 2
        steps: 2
        checks: ['max(data["train/loss"]) < 5']
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "levels.yaml"
    path.write_text(text)
    return path


def case_with(lines: str, *, without: str = "") -> str:
    kept = [line for line in CASE.splitlines() if not (without and line.strip().startswith(without))]
    return "\n".join([*kept, *(f"        {line}" for line in lines.splitlines())]) + "\n"


def mistakes(tmp_path: Path, text: str) -> str:
    with pytest.raises(UserError) as caught:
        levels.load(write(tmp_path, text))
    return str(caught.value)


def loaded(tmp_path: Path, text: str = CASE) -> levels.Levels:
    return levels.load(write(tmp_path, text))
