"""One TensorBoard event file to scalar series.

Each record (tasks/tfrecords.py) is an `Event` message and is decoded by tensorboard's own compiled `event_pb2`. Nearly
all records of a training run are "one tag, one float" and differ only in time, step and value: the first of each such
form is decoded by `event_pb2`, built again to learn where protobuf puts step and value, and the records whose other
bytes are *equal* to it are read in bulk with numpy. Every other record goes through `event_pb2` one by one.

Memory: one block (4 MiB, and the largest record) and 16 bytes a point. `bench/bench_metrics.py` shows where the time
goes.

Points that a restart makes void are dropped as tensorboard's EventAccumulator drops them (SessionLog.START, and steps
out of order in files of version < 2), so that sound logs give the same points.
"""

from __future__ import annotations

import itertools
import struct
import zlib
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tasks.tfrecords import CorruptRecordError, TruncatedRecordError, blocks, equal_lengths, sound_records

if TYPE_CHECKING:
    from collections.abc import Iterator
    from io import BufferedReader
    from pathlib import Path

    from tasks.tfrecords import Block, Groups, Source

    Part = tuple[str, Any, Any, Any]  # tag, and arrays of equal length: ordinals, steps (int64), values (float64)
    Form = tuple[str | None, Any, Any, Any]  # the same; without a tag: left to event_pb2

GZIP_MAGIC = b"\x1f\x8b\x08"
SUMMARY_KINDS = frozenset({"simple_value", "histo", "image", "audio", "tensor"})  # what EventAccumulator lists as tags
RESTARTS_ARE_LOGGED = 2.0  # file version from which SessionLog.START, not a step out of order, marks a restart
BULK_FROM = 8  # fewer equal-sized records than this are not worth learning a layout
# Wire form of a common record (event.proto): key 1 (fixed64 wall_time) at byte 0, key 2 (varint step) at byte 9 unless
# the step is 0, key 5 (summary). What these positions mean is confirmed per tag by `_Decoder._learn`.
WALL_TIME_KEY, STEP_KEY, SUMMARY_KEY = 0x09, 0x10, 0x2A
STEP_AT = 10
GOLDEN_RATIO = 0x9E3779B97F4A7C15  # 2**64 / phi, odd: spreads the positions' weights
MAX_STEP_BYTES = 9  # a tenth byte means a negative step: left to event_pb2
# TensorProto: DataType number -> typed field, struct code of tensor_content (tensorboard/compat/proto/types.proto)
TENSOR_FIELDS = {1: ("float_val", "<f"), 2: ("double_val", "<d"), 3: ("int_val", "<i"), 9: ("int64_val", "<q")}


@dataclass(slots=True)
class FileSeries:
    """What one event file holds: points by tag in the order of the file, and what was wrong with it."""

    points: dict[str, tuple[array[int], array[float]]] = field(default_factory=dict)
    tags: set[str] = field(default_factory=set)  # of every kind, scalars included
    skipped: int = 0  # summary values that are not scalars
    first_wall_time: float | None = None
    problem: str | None = None
    records: int = 0

    def add(self, tag: str, steps: bytes, values: bytes) -> None:
        """Append points: `steps` are int64, `values` float64, both in the machine's order."""
        entry = self.points.get(tag)
        if entry is None:
            entry = self.points[tag] = (array("q"), array("d"))
            self.tags.add(tag)
        entry[0].frombytes(steps)
        entry[1].frombytes(values)


def read_event_file(path: Path) -> FileSeries:
    """Read one event file (plain or gzip) to its end or to the first damage; never raises for what is in the file.

    `problem` is None, "empty", "ends inside a record at offset N" (what precedes is kept), "corrupt record at offset
    N" (a checksum or the message is wrong; reading stops there, as in tensorboard) or "unreadable: ...".
    """
    series = FileSeries()
    decoder = _Decoder(series)
    try:
        with path.open("rb") as plain:
            for block in blocks(_decompressed(plain)):
                decoder.take(block)
    except (TruncatedRecordError, CorruptRecordError) as damage:
        series.problem = str(damage)
    except EOFError:
        series.problem = "ends inside a record (the compressed stream is cut)"
    except (OSError, zlib.error) as error:
        series.problem = f"unreadable: {error}"
    if series.problem is None and not series.records:
        series.problem = "empty"
    return series


def _decompressed(plain: BufferedReader) -> Source:
    if not plain.peek(len(GZIP_MAGIC)).startswith(GZIP_MAGIC):
        return plain
    import gzip

    return gzip.GzipFile(fileobj=plain)


class _Decoder:
    """Turns blocks into points of `series`; knows the file version and the layouts met so far in this file."""

    def __init__(self, series: FileSeries) -> None:
        from tensorboard.compat.proto import event_pb2

        self.series = series
        self.version: float | None = None
        self.last_step = 0  # of files of version < 2: the most recent step in order
        self.pb: Any = event_pb2
        self.layouts: dict[tuple[int, bytes], str | None] = {}  # varint bytes, bytes around step and value -> tag
        self.scalar_tensors: dict[str, bool] = {}  # tag -> its first metadata names the scalars plugin

    def take(self, block: Block) -> None:
        """Check and decode one block; raise CorruptRecordError at the first damage, after keeping what precedes it."""
        groups = equal_lengths(block)
        sound = sound_records(block, groups)
        bulk, single = self._bulk(block, groups, sound)
        events: list[tuple[int, Any]] = []
        for ordinal in single:
            try:
                events.append((ordinal, self.pb.Event.FromString(block.record(ordinal))))
            except self._decode_error():
                sound = ordinal
                break
        if self.series.first_wall_time is None and sound:
            self.series.first_wall_time = self.pb.Event.FromString(block.record(0)).wall_time
        self.series.records += sound
        if self._in_order(events, sound):
            self._merge(bulk, events, sound)
        else:
            for ordinal in range(sound):
                self._one_by_one(self.pb.Event.FromString(block.record(ordinal)))
        if sound < len(block):
            raise CorruptRecordError(block.offset_of(sound))

    @staticmethod
    def _decode_error() -> type[Exception]:
        from google.protobuf.message import DecodeError

        return DecodeError

    def _bulk(self, block: Block, groups: Groups, sound: int) -> tuple[list[Part], list[int]]:
        """Return the points read in bulk, and the ordinals of the records that need `event_pb2`, in order."""
        import numpy as np

        parts: list[Part] = []
        single = [np.zeros(0, dtype=np.int64)]
        for length, ordinals, columns in groups:
            if columns is None or len(ordinals) < BULK_FROM:
                single.append(ordinals)
                continue
            width = _varint_widths(columns)
            single.append(ordinals[width < 0])
            for step_bytes in np.unique(width[width >= 0]).tolist():
                rows = np.flatnonzero(width == step_bytes)
                some = columns[:length] if len(rows) == len(ordinals) else columns[:length, rows]
                for tag, members, steps, values in self._layouts(block, some, ordinals[rows], step_bytes):
                    if tag is None:
                        single.append(members)
                    else:
                        parts.append((tag, members, steps, values))
        rest = np.sort(np.concatenate(single))
        return parts, rest[rest < sound].tolist()

    def _layouts(self, block: Block, columns: Any, ordinals: Any, step_bytes: int) -> Iterator[Form]:
        """Yield the records of one length and step width by form: those equal in all but time, step and value."""
        import numpy as np

        first = _fixed_from(step_bytes)
        fixed = columns[first:-4]
        order, bounds = _groups_of_equal(fixed)
        steps = np.zeros(len(ordinals), dtype=np.int64)
        for position in range(step_bytes):
            steps |= (columns[STEP_AT + position].astype(np.int64) & 0x7F) << (7 * position)
        with np.errstate(invalid="ignore"):  # a signalling NaN is a NaN all the same
            values = np.ascontiguousarray(columns[-4:].T).view("<f4")[:, 0].astype(np.float64)
        for low, high in bounds:
            members = order[low:high]
            key = (step_bytes, fixed[:, members[0]].tobytes())
            if key not in self.layouts:
                self.layouts[key] = self._learn(block.record(int(ordinals[members[0]])))
            yield self.layouts[key], ordinals[members], steps[members], values[members]

    def _learn(self, record: bytes) -> str | None:
        """Return the tag of a record of the common form, None if protobuf itself would not write it so.

        The common form is what `event_pb2` serialises for one wall time, one step and one `simple_value`: then the
        step's varint follows the time and the value is the last four bytes, and all else decides the tag.
        """
        try:
            event = self.pb.Event.FromString(record)
        except self._decode_error():
            return None
        if len(event.summary.value) != 1 or event.summary.value[0].WhichOneof("value") != "simple_value":
            return None
        tag = event.summary.value[0].tag
        again = self.pb.Event(wall_time=1.0, step=event.step)
        again.summary.value.add(tag=tag, simple_value=1.0)
        expected = again.SerializeToString()
        same = len(expected) == len(record) and expected[:1] == record[:1] and expected[9:-4] == record[9:-4]
        return str(tag) if same else None

    def _in_order(self, events: list[tuple[int, Any]], sound: int) -> bool:
        """Return whether no event of this block can make an earlier point void, so that order is free."""
        version = self.version
        for ordinal, event in events:
            if event.HasField("file_version"):
                found = _file_version(event.file_version)
                if found < RESTARTS_ARE_LOGGED or (version is None and ordinal != 0):
                    return False
                version = found
            elif event.HasField("session_log") and event.session_log.status == self.pb.SessionLog.START:
                return False
        if sound and (version is None or version < RESTARTS_ARE_LOGGED):
            return False
        self.version = version
        return True

    def _merge(self, bulk: list[Part], events: list[tuple[int, Any]], sound: int) -> None:
        """Append the points of one block, tag by tag in the order of the file."""
        import numpy as np

        by_tag: dict[str, list[Part]] = {}
        for part in bulk:
            by_tag.setdefault(part[0], []).append(part)
        singles: dict[str, tuple[list[int], list[int], list[float]]] = {}
        for ordinal, event in events:
            for tag, value in self._scalars(event):
                entry = singles.setdefault(tag, ([], [], []))
                entry[0].append(ordinal)
                entry[1].append(event.step)
                entry[2].append(value)
        for tag, (ordinals, steps, values) in singles.items():
            part = (tag, np.array(ordinals), np.array(steps, dtype=np.int64), np.array(values, dtype=np.float64))
            by_tag.setdefault(tag, []).append(part)
        for tag, parts in by_tag.items():
            _, where, at_steps, reads = parts[0]
            if len(parts) > 1 or sound <= where[-1]:
                where, at_steps, reads = (np.concatenate([part[i] for part in parts]) for i in (1, 2, 3))
                order = np.argsort(where, kind="stable")
                order = order[where[order] < sound]
                at_steps, reads = at_steps[order], reads[order]
            if len(at_steps):
                self.series.add(tag, at_steps.tobytes(), reads.tobytes())

    def _one_by_one(self, event: Any) -> None:
        """Append the points of one event after dropping what it makes void (as EventAccumulator does)."""
        if event.HasField("file_version"):
            self.version = _file_version(event.file_version)
        if self.version is not None and self.version >= RESTARTS_ARE_LOGGED:
            if event.HasField("session_log") and event.session_log.status == self.pb.SessionLog.START:
                self._drop_from(event.step, list(self.series.points))
        elif event.step < self.last_step and event.HasField("summary"):
            self._drop_from(event.step, [value.tag for value in event.summary.value])
        else:
            self.last_step = event.step
        for tag, value in self._scalars(event):
            self.series.add(tag, array("q", [event.step]).tobytes(), array("d", [value]).tobytes())

    def _drop_from(self, step: int, tags: list[str]) -> None:
        for tag in tags:
            if tag in self.series.points:
                steps, values = self.series.points[tag]
                kept = [(s, v) for s, v in zip(steps, values, strict=True) if s < step]
                self.series.points[tag] = (array("q", [s for s, _ in kept]), array("d", [v for _, v in kept]))

    def _scalars(self, event: Any) -> Iterator[tuple[str, float]]:
        """Yield tag and number of each scalar of an event, old form and new; count and note the tags of the rest."""
        if event.HasField("tagged_run_metadata"):
            self.series.tags.add(event.tagged_run_metadata.tag)
        if not event.HasField("summary"):
            return
        for value in event.summary.value:
            kind = value.WhichOneof("value")
            tag = value.tag or (value.node_name if kind == "tensor" else "")
            if value.HasField("metadata") and tag not in self.scalar_tensors:
                metadata = value.metadata
                self.scalar_tensors[tag] = metadata.plugin_data.plugin_name == "scalars" or metadata.data_class == 1
            if kind in SUMMARY_KINDS:
                self.series.tags.add(tag)
            if kind == "simple_value":
                yield tag, value.simple_value
            elif (
                kind == "tensor" and self.scalar_tensors.get(tag) and (number := _one_number(value.tensor)) is not None
            ):
                yield tag, number
            else:
                self.series.skipped += 1


def _fixed_from(step_bytes: int) -> int:
    """Return where the bytes behind the step begin; a step of 0 is not written at all, not even its key."""
    return STEP_AT + step_bytes if step_bytes else STEP_AT - 1


def _varint_widths(columns: Any) -> Any:
    """Return for each column of a message matrix the bytes of its step's varint, -1 where the form is another one."""
    import numpy as np

    length, count = len(columns) - 4, columns.shape[1]
    width = np.full(count, -1)
    if length < STEP_AT + MAX_STEP_BYTES + 8:  # shorter than any common form with a tag
        return width
    timed = columns[0] == WALL_TIME_KEY
    width[timed & (columns[STEP_AT - 1] == SUMMARY_KEY)] = 0
    open_ = timed & (columns[STEP_AT - 1] == STEP_KEY)
    for position in range(MAX_STEP_BYTES):
        ends = open_ & (columns[STEP_AT + position] < 0x80)
        width[ends] = position + 1
        open_ &= ~ends
    return width


def _groups_of_equal(fixed: Any) -> tuple[Any, list[tuple[int, int]]]:
    """Return an order of the columns and bounds in it between which all columns are equal byte for byte.

    Sorted by a 64-bit sum; a collision only splits a group, it never joins two. The order inside a group is kept.
    """
    import numpy as np

    count = fixed.shape[1]
    sums = np.zeros(count, dtype=np.uint64)
    for position, row in enumerate(fixed):
        sums += row * np.uint64((2 * position + 1) * GOLDEN_RATIO % (1 << 64))
    order = np.argsort(sums, kind="stable")
    sorted_columns = fixed[:, order]
    differs = (sorted_columns[:, 1:] != sorted_columns[:, :-1]).any(axis=0)
    edges = [0, *(np.flatnonzero(differs) + 1).tolist(), count]
    return order, list(itertools.pairwise(edges))


def _one_number(tensor: Any) -> float | None:
    """Return the number of a one-element tensor of a common numeric type, else None."""
    known = TENSOR_FIELDS.get(tensor.dtype)
    if known is None or any(dim.size != 1 for dim in tensor.tensor_shape.dim):
        return None
    name, code = known
    if tensor.tensor_content:
        size = struct.calcsize(code)
        return float(struct.unpack(code, tensor.tensor_content)[0]) if len(tensor.tensor_content) == size else None
    numbers = getattr(tensor, name)
    return float(numbers[0]) if len(numbers) == 1 else None


def _file_version(text: str) -> float:
    """Return the number of "brain.Event:2", -1 where there is none (tensorboard's event_util.ParseFileVersion)."""
    try:
        return float(text.rpartition("brain.Event:")[2])
    except ValueError:
        return -1.0
