"""Writes event files for tests: the messages by tensorboard's own classes, the checksums by its own slow function."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

from tensorboard.compat.proto import event_pb2, tensor_pb2
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

START = 1_700_000_000.0  # wall time of the first event unless a test says otherwise


def framed(message: bytes) -> bytes:
    """Return one record: length, checksum, data, checksum."""
    length = struct.pack("<Q", len(message))
    return length + struct.pack("<I", masked_crc32c(length)) + message + struct.pack("<I", masked_crc32c(message))


def version(wall_time: float = START, text: str = "brain.Event:2") -> bytes:
    """Return the record that every writer begins with."""
    return framed(event_pb2.Event(wall_time=wall_time, file_version=text).SerializeToString())


def scalar(tag: str, step: int, value: float, wall_time: float = START) -> bytes:
    """Return a scalar in the old form, as torch writes it."""
    return scalars({tag: value}, step, wall_time)


def scalars(values: dict[str, float], step: int, wall_time: float = START) -> bytes:
    """Return one event with several scalars."""
    event = event_pb2.Event(wall_time=wall_time, step=step)
    for tag, value in values.items():
        event.summary.value.add(tag=tag, simple_value=value)
    return framed(event.SerializeToString())


def tensor(tag: str, step: int, content: Any, plugin: str = "scalars", dtype: int = 1) -> bytes:
    """Return a one-element tensor with the metadata of a plugin: the form of TensorFlow 2."""
    event = event_pb2.Event(wall_time=START, step=step)
    value = event.summary.value.add(tag=tag)
    value.metadata.plugin_data.plugin_name = plugin
    fields = {1: "float_val", 2: "double_val", 3: "int_val", 7: "string_val", 9: "int64_val"}
    value.tensor.CopyFrom(tensor_pb2.TensorProto(dtype=dtype, **{fields[dtype]: [content]}))
    return framed(event.SerializeToString())


def histogram(tag: str, step: int) -> bytes:
    """Return a histogram, which is no scalar."""
    event = event_pb2.Event(wall_time=START, step=step)
    event.summary.value.add(tag=tag).histo.num = 3
    return framed(event.SerializeToString())


def restart(step: int) -> bytes:
    """Return the mark of a restart: what was logged from `step` on is void."""
    event = event_pb2.Event(wall_time=START, step=step)
    event.session_log.status = event_pb2.SessionLog.START
    return framed(event.SerializeToString())


def write(path: Path, records: Iterable[bytes], *, wall_time: float = START) -> Path:
    """Write a version record and `records` to `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(version(wall_time) + b"".join(records))
    return path


def ramp(tag: str, steps: Iterable[int], scale: float = 1.0) -> list[bytes]:
    """Return scalars whose value is the step times `scale`."""
    return [scalar(tag, step, step * scale) for step in steps]
