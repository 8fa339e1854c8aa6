"""A record is believed only for exactly its inputs and while its evidence is what it was; locks end with their owner."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

from tasks import records
from tasks.errors import UserError
from tasks.records import Record, Records


def saved(root, **changes):
    (root / "run.log").write_text("log\n")
    from tasks.files import sha256_file

    values = {
        "stage": "run", "name": "level0.x", "inputs": {"bridge": "a"}, "artefact": {"verdict": "Pass", "reasons": []},
        "reusable": True, "evidence": {"run.log": sha256_file(root / "run.log")}, "finished": "2026-01-01T00:00:00Z",
    }  # fmt: skip
    record = Record(**{**values, **changes})
    Records(root).save(record)
    return record


def test_a_record_is_found_for_its_inputs_and_no_others(tmp_path):
    record = saved(tmp_path)
    assert Records(tmp_path).find("run", "level0.x", {"bridge": "a"}) == record
    assert Records(tmp_path).find("run", "level0.x", {"bridge": "b"}) is None
    assert Records(tmp_path).find("run", "level0.y", {"bridge": "a"}) is None


def test_going_back_finds_the_earlier_record(tmp_path):
    saved(tmp_path)
    saved(tmp_path, inputs={"bridge": "b"}, finished="2026-01-02T00:00:00Z")
    assert Records(tmp_path).find("run", "level0.x", {"bridge": "a"}) is not None
    assert Records(tmp_path).latest("run", "level0.x").inputs == {"bridge": "b"}


def test_of_two_records_of_one_second_the_later_is_the_newest(tmp_path):
    times = []
    for bridge in "abcd":
        times.append(records.utc_now())
        saved(tmp_path, inputs={"bridge": bridge}, finished=times[-1])
        time.sleep(0.002)  # the clock's resolution, not a wait for something
    assert Records(tmp_path).latest("run", "level0.x").inputs == {"bridge": "d"}
    assert len(set(times)) == len(times)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda p: p.write_text(""), "was changed after the run"),
        (lambda p: p.write_text("other\n"), "was changed after the run"),
        (lambda p: p.unlink(), "is gone"),
    ],
)
def test_changed_evidence_is_noticed(tmp_path, damage, words):
    record = saved(tmp_path)
    assert Records(tmp_path).damaged(record) is None
    damage(tmp_path / "run.log")
    assert words in Records(tmp_path).damaged(record).text


@pytest.mark.parametrize("content", ["", "{", "[]", '{"schema": 99}', '{"schema": 1}', '{"schema": 1, "stage": "run"}'])
def test_a_file_that_is_no_record_is_never_believed(tmp_path, content):
    saved(tmp_path)
    for path in tmp_path.rglob("records/run/*/*.json"):
        path.write_text(content)
    assert Records(tmp_path).find("run", "level0.x", {"bridge": "a"}) is None


def test_a_record_edited_to_other_inputs_is_not_believed(tmp_path):
    saved(tmp_path)
    for path in tmp_path.rglob("records/run/*/*.json"):
        raw = json.loads(path.read_text())
        raw["inputs"]["bridge"] = "forged"
        path.write_text(json.dumps(raw))
    assert Records(tmp_path).find("run", "level0.x", {"bridge": "a"}) is None


HOLDER = "import sys; from pathlib import Path; from tasks import records\nwith records.lock(Path(sys.argv[1]), 1, 'x'):\n print('held', flush=True); sys.stdin.read()"


def test_a_second_owner_waits_says_for_whom_and_gives_up(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "ws/lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout.readline() == "held\n"
        told = []
        with (
            pytest.raises(UserError, match=f"still held by pid {holder.pid}"),
            records.lock(tmp_path / "ws/lock", 0.3, "y", told.append),
        ):
            pass
        assert told == [f"waiting for {told[0].split('waiting for ')[1]}"]
        holder.kill()
        holder.wait()
        with records.lock(tmp_path / "ws/lock", 5, "y"):  # SIGKILL of the owner frees it
            pass
