"""Small git repositories and settings that every test may use."""

from __future__ import annotations

import os
import signal
import subprocess
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

GIT = {
    "GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@example.org", "GIT_AUTHOR_DATE": "2026-01-01T00:00:00Z",
    "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@example.org", "GIT_COMMITTER_DATE": "2026-01-01T00:00:00Z",
    "GIT_CONFIG_GLOBAL": os.devnull,
}  # fmt: skip

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started with `&` by a script: children would not end by Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)


def run_git(repo: Path, *args: str) -> str:
    """Run git in `repo` with a fixed author and no user configuration."""
    done = subprocess.run(
        ["git", "-C", str(repo), "-c", "protocol.file.allow=always", *args],
        check=True, capture_output=True, text=True, env={**os.environ, **GIT},
    )  # fmt: skip
    return done.stdout


@pytest.fixture
def make_repo(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that makes a repository of given files with one commit."""

    def make(name: str, files: Mapping[str, str], *, commit: bool = True) -> Path:
        repo = tmp_path / name
        repo.mkdir(parents=True, exist_ok=True)
        for path, text in files.items():
            (repo / path).parent.mkdir(parents=True, exist_ok=True)
            (repo / path).write_text(text)
        run_git(repo, "init", "-q", "-b", "main")
        if commit:
            run_git(repo, "add", "-A")
            run_git(repo, "commit", "-q", "-m", "one")
        return repo

    return make


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put tests on real code last: the CPU environment that they need may still be in the making (.ci/run)."""
    items.sort(key=lambda item: item.get_closest_marker("real") is not None)
