"""An attempt whose job is in flight is followed as it is: nothing below the running job is laid out anew."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest

from tasks import attempts, inflight
from tasks.attempts import Command, Place, Tree
from tasks.runtimes.job import Ended, Job


class Following:
    """A runtime that follows what was submitted earlier."""

    name = "slurm"

    def target(self, kind: str, host: Path) -> str:
        return f"/{kind}/{host.name}"

    def run(self, job: Job, **_: object) -> Ended:
        return Ended(0, "exited", job.id)


def followed(folder: Path, trees: dict[str, Tree]) -> None:
    attempts.perform(
        Place(Following(), "python3", {"id": "i"}, None), trees, folder, lambda _: Command(("true",), "/", 9.0),
        stop=threading.Event(), poll=lambda: None, labels={},
    )  # fmt: skip


@pytest.mark.parametrize("known", [None, "submitting", "submitted"])
def test_what_a_running_job_works_on_is_left_alone(
    tmp_path: Path, known: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts.snapshot, "work_copy", shutil.copytree)
    monkeypatch.setattr(attempts, "_byte_code", lambda *_: {})
    trees = {}
    for kind in ("bridge", "mcore", "nemo_rl"):
        (tmp_path / kind / "tree").mkdir(parents=True)
        (tmp_path / kind / "tree" / "file.py").write_text("SNAPSHOT = 1\n")
        trees[kind] = Tree(kind, tmp_path / kind / "tree", kind, {})
    folder = tmp_path / "attempts" / "level4.x" / "1"
    for kind in attempts.WRITABLE if known else ():
        (folder / "work" / kind).mkdir(parents=True)
        (folder / "work" / kind / "file.py").write_text("the job wrote this\n")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "spec.json").write_text("{}")
    if known:
        inflight.note(folder, state=known)
    followed(folder, trees)
    kept = {(folder / "work" / kind / "file.py").read_text() for kind in attempts.WRITABLE}
    assert (kept == {"the job wrote this\n"}) == bool(known)
    assert ((folder / "spec.json").read_text() == "{}") == bool(known)
