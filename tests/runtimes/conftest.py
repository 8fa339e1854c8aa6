"""Fixtures that several tests of the runtimes share."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from tasks.runtimes import slurm
from tests.runtimes.slurm_cluster import Cluster

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    made = Cluster(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr(slurm, "POLL_S", 0.005)
    for name in [n for n in os.environ if n.startswith(("SBATCH_", "SLURM_"))]:
        monkeypatch.delenv(name)
    return made
