"""Event files to metrics.json: what is kept, what is reported, and never a gap that nobody hears of."""

from __future__ import annotations

import gzip
import json
import math
import os
import random
import tracemalloc
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

from tasks import crc32c, eventfiles, metrics, tfrecords
from tasks.eventfiles import read_event_file
from tests import event_log

if TYPE_CHECKING:
    from pathlib import Path

NAME = "events.out.tfevents.1.host.1.0"


def numbers(merged: metrics.Merged) -> dict[str, dict[str, float]]:
    return {tag: dict(series) for tag, series in merged.series.items()}


def the_file(folder: Path, *records: bytes, name: str = NAME, wall_time: float = event_log.START) -> metrics.Merged:
    event_log.write(folder / name, records, wall_time=wall_time)
    return metrics.merge(folder)


# What a sound log gives


def test_json_is_that_of_json_dump_with_indent(tmp_path: Path) -> None:
    merged = the_file(tmp_path, *event_log.ramp("train/b", (2, 1, 10)), event_log.scalar('tag "ü"', 0, 0.1))
    expected = {'tag "ü"': {"0": 0.10000000149011612}, "train/b": {"1": 1.0, "2": 2.0, "10": 10.0}}
    assert metrics.to_json(merged) == json.dumps(expected, indent=2).encode()


def test_json_of_plain_dictionaries_is_the_same() -> None:
    series = {"b": {"1": 1.0, "2": math.nan}, "a": {}}
    merged = metrics.Merged(series=series, files=(), overlaps=())
    assert metrics.to_json(merged, allow_nan=True) == json.dumps(series, indent=2, sort_keys=True).encode()
    assert metrics.to_json(metrics.Merged({}, (), ())) == b"{}"


def test_values_that_json_does_not_have_are_written_as_texts(tmp_path: Path) -> None:
    values = (math.nan, math.inf, -math.inf, 1.0)
    merged = the_file(tmp_path, *(event_log.scalar("x", i, v) for i, v in enumerate(values)))
    strict = json.loads(metrics.to_json(merged), parse_constant=lambda name: pytest.fail(f"bare {name}"))
    assert strict == {"x": {"0": "NaN", "1": "Infinity", "2": "-Infinity", "3": 1.0}}
    assert metrics.to_json(merged, allow_nan=True).count(b": NaN") == 1
    assert [str(float(v)) for v in strict["x"].values()] == ["nan", "inf", "-inf", "1.0"]


def test_scalars_of_the_new_form_are_merged_and_other_plugins_counted(tmp_path: Path) -> None:
    merged = the_file(
        tmp_path,
        event_log.tensor("new", 1, 0.5),
        event_log.tensor("new", 2, 7, dtype=9),
        event_log.tensor("prompt", 1, b"hello", plugin="text", dtype=7),
        event_log.tensor("plot", 1, 0.5, plugin="mine"),
        event_log.histogram("weights", 1),
        event_log.scalar("old", 1, 2.0),
    )
    assert numbers(merged) == {"new": {"1": 0.5, "2": 7.0}, "old": {"1": 2.0}}
    assert merged.files[0].skipped == 3
    assert {"prompt", "weights", "old"} <= merged.tags


def test_several_scalars_in_one_event_and_unusual_steps(tmp_path: Path) -> None:
    merged = the_file(tmp_path, event_log.scalars({"a": 1.0, "b": 2.0}, 3), *event_log.ramp("a", (0, -5, 2**40)))
    assert numbers(merged) == {"a": {"-5": -5.0, "0": 0.0, "3": 1.0, str(2**40): 2.0**40}, "b": {"3": 2.0}}


def test_last_value_of_a_step_is_taken_within_a_file(tmp_path: Path) -> None:
    merged = the_file(tmp_path, *event_log.ramp("x", (1, 2)), event_log.scalar("x", 1, 9.0))
    assert numbers(merged) == {"x": {"1": 9.0, "2": 2.0}}
    assert [(o.earlier, o.later, o.conflicts) for o in merged.overlaps] == [(merged.files[0].path,) * 2 + (1,)]


def test_ranges_leave_out_tags_whose_step_is_a_second(tmp_path: Path) -> None:
    merged = the_file(
        tmp_path, *event_log.ramp("train/loss", (1, 2)), *event_log.ramp("ray/node.0.gpu.0.mem_gb", (0, 900))
    )
    assert (merged.files[0].first_step, merged.files[0].last_step, merged.files[0].scalars) == (1, 2, 4)


# Restarts that tensorboard itself knows


def test_restart_mark_makes_later_steps_void(tmp_path: Path) -> None:
    records = [*event_log.ramp("x", range(1, 8)), event_log.restart(5), event_log.scalar("x", 5, 0.5)]
    assert numbers(the_file(tmp_path, *records)) == {"x": {"1": 1.0, "2": 2.0, "3": 3.0, "4": 4.0, "5": 0.5}}


def test_step_out_of_order_makes_later_steps_void_only_in_old_files(tmp_path: Path) -> None:
    records = b"".join([*event_log.ramp("x", (1, 2, 3)), event_log.scalar("x", 2, 9.0), event_log.scalar("y", 1, 1.0)])
    (tmp_path / NAME).write_bytes(event_log.version(text="brain.Event:1") + records)
    assert numbers(metrics.merge(tmp_path)) == {"x": {"1": 1.0, "2": 9.0}, "y": {"1": 1.0}}
    (tmp_path / NAME).write_bytes(records)
    assert numbers(metrics.merge(tmp_path)) == {"x": {"1": 1.0, "2": 9.0}, "y": {"1": 1.0}}


# Damage


def test_cut_tail_keeps_what_precedes_it_and_is_reported(tmp_path: Path) -> None:
    path = event_log.write(tmp_path / NAME, event_log.ramp("train/loss", range(1, 11)))
    path.write_bytes(path.read_bytes()[:-60])
    merged = metrics.merge(tmp_path)
    assert list(merged.series["train/loss"]) == [str(step) for step in range(1, 9)]
    assert merged.files[0].last_step == 8
    assert merged.files[0].problem is not None
    assert merged.files[0].problem.startswith("ends inside a record at offset ")
    assert not merged.files[0].is_damaged


def test_every_cut_gives_a_prefix_and_is_reported_unless_between_records(tmp_path: Path) -> None:
    records = [event_log.version(), *event_log.ramp("x", (1, 2, 300)), event_log.scalars({"x": 0.5, "y": 1.0}, 4)]
    whole, ends = b"".join(records), {0}
    for i in range(len(records)):
        ends.add(sum(map(len, records[: i + 1])))
    path = tmp_path / NAME
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        content = read_event_file(path)
        complete = sum(end <= size for end in ends) - 1
        assert content.records == complete
        expected = "empty" if size == 0 else None if size in ends else "ends inside a record at offset"
        assert (content.problem or "").startswith(expected or ""), size
        assert (content.problem is None) == (expected is None), size


def test_no_changed_byte_goes_unnoticed(tmp_path: Path) -> None:
    whole = event_log.version() + b"".join(event_log.ramp("x", range(1, 12)))
    path = tmp_path / NAME
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        content = read_event_file(path)
        assert content.problem is not None, at
        steps = content.points.get("x", ((), ()))[0]
        assert list(steps) == list(range(1, len(steps) + 1)), at
        assert not steps or len(steps) < 11, at


def test_corrupt_record_in_the_middle_names_path_and_offset_and_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = event_log.write(tmp_path / NAME, event_log.ramp("x", range(1, 20)))
    data = bytearray(path.read_bytes())
    begin = len(event_log.version()) + sum(map(len, event_log.ramp("x", range(1, 10))))
    data[begin + 20] ^= 1
    path.write_bytes(data)
    merged = metrics.merge(tmp_path)
    assert merged.files[0].is_damaged
    assert merged.problems == (f"{path}: corrupt record at offset {begin}",)
    assert list(merged.series["x"]) == [str(step) for step in range(1, 10)]
    assert metrics.main([str(tmp_path), "--output_path", str(tmp_path / "m.json")]) == 1
    assert f"corrupt record at offset {begin}" in capsys.readouterr().err


def test_message_that_is_no_event_is_corrupt_though_its_checksum_holds(tmp_path: Path) -> None:
    merged = the_file(
        tmp_path, event_log.scalar("x", 1, 1.0), event_log.framed(b"\xff\xff"), event_log.scalar("x", 2, 2.0)
    )
    assert merged.files[0].problem is not None
    assert merged.files[0].problem.startswith("corrupt record")
    assert numbers(merged) == {"x": {"1": 1.0}}


def test_absurd_length_with_a_right_checksum_is_damage_not_memory(tmp_path: Path) -> None:
    import struct

    length = struct.pack("<Q", 1 << 62)
    header = length + struct.pack("<I", masked_crc32c(length))
    merged = the_file(tmp_path, event_log.scalar("x", 1, 1.0), header + b"abc")
    assert merged.files[0].is_damaged


@pytest.mark.parametrize(("content", "problem"), [(b"", "empty"), (event_log.version(), "no scalars")])
def test_file_without_scalars_says_so_and_fails_the_program(tmp_path: Path, content: bytes, problem: str) -> None:
    (tmp_path / NAME).write_bytes(content)
    assert metrics.merge(tmp_path).files[0].problem == problem
    assert metrics.main([str(tmp_path), "--output_path", str(tmp_path / "out.json")]) == 1
    assert (tmp_path / "out.json").read_bytes() == b"{}"


def test_header_only_file_beside_a_full_one_does_not_fail_the_program(tmp_path: Path) -> None:
    event_log.write(tmp_path / "hparams" / NAME, [])
    event_log.write(tmp_path / NAME, event_log.ramp("x", (1,)))
    assert metrics.main([str(tmp_path), "--output_path", str(tmp_path / "out.json")]) == 0


def test_unreadable_file_is_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_source: object) -> object:
        raise OSError(5, "Input/output error")

    event_log.write(tmp_path / NAME, event_log.ramp("x", (1,)))
    monkeypatch.setattr(eventfiles, "blocks", broken)
    assert metrics.merge(tmp_path).files[0].is_damaged


def test_folder_that_cannot_be_listed_is_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    event_log.write(tmp_path / NAME, event_log.ramp("x", (1,)))
    (tmp_path / "locked").mkdir()
    listed = os.scandir

    def locked(path: str) -> object:
        if str(path).endswith("locked"):
            raise PermissionError(13, "Permission denied", path)
        return listed(path)

    monkeypatch.setattr(os, "scandir", locked)
    assert [file.path for file in metrics.merge(tmp_path).files if file.is_damaged] == [str(tmp_path / "locked")]


def test_compressed_file_is_read_and_its_cut_reported(tmp_path: Path) -> None:
    data = gzip.compress(event_log.version() + b"".join(event_log.ramp("x", range(1, 200))))
    path = tmp_path / f"{NAME}.gz"
    path.write_bytes(data)
    assert len(metrics.merge(tmp_path).series["x"]) == 199
    path.write_bytes(data[:-30])
    assert "ends inside a record" in str(metrics.merge(tmp_path).files[0].problem)


# Several files


def test_files_are_ordered_by_wall_time_inside_not_by_file_time(tmp_path: Path) -> None:
    early = event_log.write(tmp_path / "z" / NAME, [event_log.scalar("x", 1, 1.0)], wall_time=100.0)
    late = event_log.write(tmp_path / "a" / NAME, [event_log.scalar("x", 1, 2.0)], wall_time=200.0)
    os.utime(early, (2_000_000_000, 2_000_000_000))
    os.utime(late, (1_000_000_000, 1_000_000_000))
    merged = metrics.merge(tmp_path)
    assert numbers(merged) == {"x": {"1": 2.0}}
    assert [file.path for file in merged.files] == [str(early), str(late)]


def test_equal_wall_times_are_ordered_by_name(tmp_path: Path) -> None:
    for name, value in (("b", 2.0), ("a", 1.0)):
        event_log.write(tmp_path / name / NAME, [event_log.scalar("x", 1, value)])
    assert numbers(metrics.merge(tmp_path)) == {"x": {"1": 2.0}}


def test_resume_takes_the_later_attempt_and_records_the_overlap(tmp_path: Path) -> None:
    event_log.write(tmp_path / "exp_001" / NAME, event_log.ramp("x", range(1, 8)), wall_time=1.0)
    event_log.write(tmp_path / "exp_002" / NAME, event_log.ramp("x", range(6, 11), 1.25), wall_time=2.0)
    merged = metrics.merge(tmp_path)
    assert merged.series["x"]["5"] == 5.0
    assert [merged.series["x"][step] for step in ("6", "7", "8")] == [7.5, 8.75, 10.0]
    (overlap,) = merged.overlaps
    assert (overlap.first_step, overlap.last_step, overlap.points, overlap.conflicts) == (6, 7, 2, 2)
    assert overlap.largest_relative_difference == pytest.approx(0.2)
    with pytest.raises(metrics.ConflictError, match="'x' at step 6"):
        metrics.merge(tmp_path, conflicts_are_errors=True)


def test_equal_nan_is_no_conflict_but_nan_against_a_number_is(tmp_path: Path) -> None:
    for name, value in (("a", math.nan), ("b", math.nan)):
        event_log.write(tmp_path / name / NAME, [event_log.scalar("x", 1, value)])
    merged = metrics.merge(tmp_path, conflicts_are_errors=True)
    assert (merged.overlaps[0].points, merged.overlaps[0].conflicts) == (1, 0)
    event_log.write(tmp_path / "c" / NAME, [event_log.scalar("x", 1, 1.0)])
    with pytest.raises(metrics.ConflictError):
        metrics.merge(tmp_path, conflicts_are_errors=True)
    assert metrics.merge(tmp_path).overlaps[-1].largest_relative_difference is None


def test_folders_of_one_attempt_only_are_merged_where_only_they_are_named(tmp_path: Path) -> None:
    event_log.write(tmp_path / "exp_001" / NAME, event_log.ramp("x", range(1, 11)), wall_time=1.0)
    event_log.write(tmp_path / "exp_002" / NAME, event_log.ramp("x", range(1, 4)), wall_time=2.0)
    assert len(metrics.merge(tmp_path / "exp_002").series["x"]) == 3
    declared = metrics.merge([tmp_path / "exp_002", tmp_path / "exp_001"])
    assert [(file.first_step, file.last_step) for file in declared.files] == [(1, 3), (1, 10)]


def test_three_files_name_the_pair_that_overlaps(tmp_path: Path) -> None:
    for index, steps in enumerate([(1, 2), (3, 4), (2, 3)]):
        event_log.write(tmp_path / str(index) / NAME, event_log.ramp("x", steps), wall_time=float(index))
    pairs = [(o.earlier, o.later, o.first_step) for o in metrics.merge(tmp_path).overlaps]
    path = [str(tmp_path / str(index) / NAME) for index in range(3)]
    assert pairs == [(path[0], path[2], 2), (path[1], path[2], 3)]


@pytest.mark.parametrize("name", ["[a]*?", "with blank", "ünï", "{x}", "-dash"])
def test_folder_names_may_hold_any_character(tmp_path: Path, name: str) -> None:
    event_log.write(tmp_path / name / NAME, event_log.ramp("x", (1,)))
    assert numbers(metrics.merge(tmp_path / name)) == {"x": {"1": 1.0}}


def test_hidden_folders_other_names_and_link_loops_are_passed_over(tmp_path: Path) -> None:
    event_log.write(tmp_path / ".hidden" / NAME, event_log.ramp("x", (1,)))
    (tmp_path / "train_data_step1.jsonl").write_text("{}")
    (tmp_path / "events.tfevents.folder").mkdir()
    (tmp_path / "loop").symlink_to(tmp_path)
    assert metrics.merge(tmp_path).files == ()


def test_no_event_file_is_an_empty_result_and_status_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert metrics.merge(tmp_path / "absent").files == ()
    assert metrics.main([str(tmp_path), "--output_path", str(tmp_path / "m.json")]) == 1
    assert "no TensorBoard event files found" in capsys.readouterr().err
    assert not (tmp_path / "m.json").exists()


# The program


def test_program_follows_the_options_of_the_original(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    event_log.write(tmp_path / "a" / NAME, [event_log.scalar("x", 1, 1.0), event_log.histogram("moe/load", 1)])
    event_log.write(tmp_path / "b" / NAME, [event_log.scalar("x", 1, 2.0)], wall_time=event_log.START + 1)
    out = tmp_path / "deep" / "m.json"
    assert metrics.main([str(tmp_path), "--output_path", str(out), "--require-tag-prefix", "moe/"]) == 0
    assert json.loads(out.read_bytes()) == {"x": {"1": 2.0}}
    assert metrics.main([str(tmp_path), "--require-tag-prefix", "mtp/"]) == 1
    assert "'mtp/'" in capsys.readouterr().err
    assert metrics.main([str(tmp_path), "--error-on-conflicts"]) == 1
    assert "Conflict detected for metric 'x' at step 1" in capsys.readouterr().err


def test_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    event_log.write(tmp_path / "logs" / NAME, event_log.ramp("x", (1,)))
    out = tmp_path / "out" / "m.json"
    out.parent.mkdir()
    out.write_text("old")

    def full(_fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert metrics.main([str(tmp_path / "logs"), "--output_path", str(out)]) == 1
    assert out.read_text() == "old"
    assert [path.name for path in out.parent.iterdir()] == ["m.json"]


# Checksums and the bulk reader


@given(st.binary(max_size=3000))
@settings(max_examples=60, deadline=None)
def test_checksum_is_that_of_tensorboard(data: bytes) -> None:
    assert crc32c.mask(crc32c.crc32c(data)) == masked_crc32c(data)


def test_checksum_of_the_standard_and_of_columns() -> None:
    import numpy as np

    assert crc32c.crc32c(b"123456789") == 0xE3069283
    rows = [bytes([i]) * 77 for i in range(5)]
    columns = np.frombuffer(b"".join(rows), dtype=np.uint8).reshape(5, 77).T
    assert crc32c.many(columns).tolist() == [crc32c.crc32c(row) for row in rows]
    assert crc32c.mask(crc32c.many(columns)).tolist() == [masked_crc32c(row) for row in rows]


def random_records(seed: int, count: int) -> list[bytes]:
    """Return records of many shapes: common ones, several values, histograms, zero, negative and repeated steps."""
    chance = random.Random(seed)  # noqa: S311 - test data
    records = []
    for _ in range(count):
        tag = chance.choice(["a", "train/loss", "train/lost", "ü", ""])
        step = chance.choice([0, 1, 127, 128, 5, -1, 2**35, chance.randrange(400)])
        value = chance.choice([0.0, chance.random(), math.nan, -math.inf, 1e-40])
        kind = chance.randrange(12)
        if kind == 0:
            records.append(event_log.scalars({tag: value, "b": 1.0}, step))
        elif kind == 1:
            records.append(event_log.histogram(tag, step))
        elif kind == 2 and seed % 2:
            records.append(event_log.restart(step))
        elif kind == 3:
            records.append(event_log.tensor("t", step, value))
        else:
            records.append(event_log.scalar(tag, step, value, chance.choice([0.0, 1.5e9 + step])))
    return records


@pytest.mark.parametrize("collide", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_bulk_reading_gives_what_reading_one_by_one_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, collide: bool
) -> None:
    path = event_log.write(tmp_path / NAME, random_records(seed, 300))
    monkeypatch.setattr(tfrecords, "BLOCK_BYTES", (4 << 20, 1000, 64, 300)[seed % 4])
    if collide:
        monkeypatch.setattr(eventfiles, "GOLDEN_RATIO", 0)  # every form of a length gets the same hash
    monkeypatch.setattr(eventfiles, "BULK_FROM", 1)
    bulk = read_event_file(path)
    monkeypatch.setattr(eventfiles, "BULK_FROM", 10**9)
    single = read_event_file(path)
    monkeypatch.setattr(eventfiles._Decoder, "_in_order", lambda *_: False)
    ordered = read_event_file(path)
    for other in (single, ordered):
        assert {t: (s, list(map(repr, v))) for t, (s, v) in bulk.points.items() if s} == {
            t: (s, list(map(repr, v))) for t, (s, v) in other.points.items() if s
        }
        assert (bulk.skipped, bulk.tags, bulk.records) == (other.skipped, other.tags, other.records)


def test_memory_does_not_grow_with_the_file_beyond_16_bytes_a_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / NAME
    block = b"".join(event_log.scalar("train/loss", 128 + step, 0.5) for step in range(500))
    monkeypatch.setattr(tfrecords, "BLOCK_BYTES", 1 << 16)
    peaks = []
    for repeats in (4, 100):
        path.write_bytes(event_log.version() + block * repeats)
        tracemalloc.start()
        assert read_event_file(path).records == 500 * repeats + 1
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    points = 500 * 96
    assert peaks[1] - peaks[0] < points * 16 * 1.25 + (1 << 20)  # array's growth keeps an eighth in reserve
    assert path.stat().st_size > 4 * points * 16 / 2
