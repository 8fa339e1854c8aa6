"""What all runtimes share: who owns a job, who is an orphan, where a job's paths are."""

from __future__ import annotations

import dataclasses
import os
import subprocess
from pathlib import Path

import pytest

from tasks.errors import UserError
from tasks.runtimes import choose
from tasks.runtimes.docker import Docker
from tasks.runtimes.job import Owner, is_dead, is_orphan, parse_owner, start_time, this_owner
from tasks.runtimes.local import Local
from tests.runtimes.jobs import GONE, HERE, REBOOTED, until


def test_unknown_runtimes_are_refused_with_a_suggestion() -> None:
    with pytest.raises(UserError, match=r"runtime=dokcer.*did you mean 'docker'"):
        choose("dokcer")
    assert [choose(name).name for name in ("local", "docker", "podman")] == ["local", "docker", "podman"]


def test_an_owner_survives_its_text_form() -> None:
    assert parse_owner(str(this_owner())) == this_owner()
    assert [parse_owner(text) for text in ("", "a/b/c/d", "a/b/1", "x")] == [None] * 4


LIVE = dataclasses.replace(HERE)
REUSED = dataclasses.replace(HERE, start="1")
ELSEWHERE = dataclasses.replace(GONE, namespace="4026539999")


@pytest.mark.parametrize(
    ("owner", "deadline", "orphan"),
    [
        (LIVE, None, False),
        (LIVE, 0.0, False),
        (GONE, None, True),
        (REUSED, None, True),
        (GONE, 1e12, True),
        (REBOOTED, None, False),
        (REBOOTED, 1e12, False),
        (REBOOTED, 0.0, True),
        (ELSEWHERE, 1e12, False),
        (ELSEWHERE, 0.0, True),
        (None, 0.0, False),
    ],
)
def test_only_what_provably_nobody_minds_is_an_orphan(
    owner: Owner | None, deadline: float | None, orphan: bool
) -> None:
    assert is_orphan(owner, HERE, deadline) is orphan


def test_a_zombie_is_dead_and_an_invisible_process_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    child = subprocess.Popen(["true"])
    until(lambda: start_time(child.pid) is None)
    assert is_dead(dataclasses.replace(HERE, pid=child.pid, start="?"))
    child.wait()
    monkeypatch.setattr(Path, "read_bytes", lambda _: (_ for _ in ()).throw(FileNotFoundError()))  # hidepid
    assert start_time(os.getpid()) == "?"
    assert not is_dead(HERE)


def test_paths_of_a_job_are_the_hosts_or_fixed_ones() -> None:
    kinds = ("bridge", "mcore", "nemo_rl", "attempt", "agent")
    assert [Local().target(k, Path("/h")) for k in kinds] == ["/h"] * 5
    assert [Docker("i").target(k, Path("/h")) for k in kinds] == [
        "/opt/Megatron-Bridge", "/opt/Megatron-LM", "/opt/nemo-rl", "/e2e/attempt", "/e2e/agent"
    ]  # fmt: skip
