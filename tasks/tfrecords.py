"""Record files (TFRecord) as TensorBoard writes them: framing and both checksums, streamed in blocks.

A record is length (uint64, little-endian), masked CRC-32C of these eight bytes, data, masked CRC-32C of the data.
A file may end inside a record (the writer was stopped): TruncatedRecordError. A wrong checksum anywhere is
CorruptRecordError. Both are raised only after everything before the damage has been handed out.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tasks import crc32c

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Protocol

    class Source(Protocol):
        """Anything that can be read in pieces."""

        def read(self, size: int, /) -> bytes:
            """Return up to `size` bytes, nothing at the end."""

    Groups = list[tuple[int, Any, Any]]  # record length, ordinals, byte matrix or None for long records

BLOCK_BYTES = 4 << 20
MAX_RECORD_BYTES = 1 << 30  # protobuf itself refuses 2 GiB; a length beyond is damage, not data
HEADER = struct.Struct("<QI")
FRAME_BYTES = HEADER.size + 4
MATRIX_BYTES = crc32c.ROW  # longer records are checked one by one


class TruncatedRecordError(ValueError):
    """The file ends inside the record that begins at `offset`: its writer was stopped, or is still writing."""

    def __init__(self, offset: int) -> None:
        super().__init__(f"ends inside a record at offset {offset}")


class CorruptRecordError(ValueError):
    """A checksum of the record at `offset` is wrong, or its message cannot be parsed."""

    def __init__(self, offset: int) -> None:
        super().__init__(f"corrupt record at offset {offset}")


@dataclass(slots=True)
class Block:
    """Whole records that lie in `data` one behind the other; ordinal i has its message at `starts[i]`.

    One start more than there are records: where the message of a further one would begin.
    """

    offset: int  # of data[0] in the (decompressed) file
    data: bytes
    starts: list[int]

    def __len__(self) -> int:
        return len(self.starts) - 1

    def record(self, ordinal: int) -> bytes:
        """Return the bytes of one record's message."""
        return self.data[self.starts[ordinal] : self.starts[ordinal + 1] - FRAME_BYTES]

    def offset_of(self, ordinal: int) -> int:
        """Return where in the file the record's frame begins."""
        return self.offset + self.starts[ordinal] - HEADER.size


def blocks(source: Source) -> Iterator[Block]:
    """Yield the whole records of `source`, in blocks of about BLOCK_BYTES.

    Raises TruncatedRecordError or CorruptRecordError (a header's checksum) where the framing ends, and OSError as the
    source does.
    """
    rest, offset, wanted = b"", 0, 0
    known: dict[bytes, int] = {}  # a header's bytes -> length: its checksum depends on the length alone
    while True:
        pieces, have = [rest], len(rest)
        while more := source.read(BLOCK_BYTES):
            pieces.append(more)
            have += len(more)
            if have >= wanted:
                break
        if len(pieces) == 1:
            if rest:
                raise TruncatedRecordError(offset)
            return
        data = b"".join(pieces)
        starts, wanted = _frame(data, known)
        if len(starts) > 1:
            yield Block(offset, data, starts)
        position = starts[-1] - HEADER.size
        rest = data[position:]
        offset += position
        if wanted < 0:
            raise CorruptRecordError(offset)


def _frame(data: bytes, known: dict[bytes, int]) -> tuple[list[int], int]:
    """Return the starts as Block has them, and how many bytes the next record needs (-1: its header is damaged).

    `known` maps the bytes of headers already verified to the distance to the next start.
    """
    header, end, begin = HEADER.size, len(data), HEADER.size
    starts = [begin]
    add, look_up = starts.append, known.get  # 0.3 us a record: the innermost loop of the program
    while begin <= end:
        distance = look_up(data[begin - header : begin])
        if distance is None:
            length = _length(data[begin - header : begin])
            if length is None:
                return starts, -1
            distance = known[data[begin - header : begin]] = length + FRAME_BYTES
        begin += distance
        if begin - header > end:
            return starts, distance
        add(begin)
    return starts, header


def _length(header: bytes) -> int | None:
    """Return the record length in a header, None where its checksum is wrong or the length absurd."""
    length, stored = HEADER.unpack(header)
    if crc32c.mask(crc32c.crc32c(header[:8])) != stored or length > MAX_RECORD_BYTES:
        return None
    return int(length)


def equal_lengths(block: Block) -> Groups:
    """Return for each record length its ordinals and the matrix (length + 4 checksum bytes, n) of their bytes."""
    import numpy as np

    data = np.frombuffer(block.data, dtype=np.uint8)
    starts = np.array(block.starts)
    lengths = np.diff(starts) - FRAME_BYTES
    order = np.argsort(lengths, kind="stable")
    groups: Groups = []
    for ordinals in np.split(order, np.flatnonzero(np.diff(lengths[order])) + 1):
        length = int(lengths[ordinals[0]])
        columns = None
        if length <= MATRIX_BYTES:
            columns = np.ascontiguousarray(data[starts[ordinals][:, None] + np.arange(length + 4)].T)
        groups.append((length, ordinals, columns))
    return groups


def sound_records(block: Block, groups: Groups) -> int:
    """Return how many records from the first on have the right checksum."""
    import numpy as np

    sound = len(block)
    for length, ordinals, columns in groups:
        if columns is None:
            for ordinal in ordinals.tolist():
                stop = block.starts[ordinal] + length
                stored = int.from_bytes(block.data[stop : stop + 4], "little")
                if crc32c.mask(crc32c.crc32c(block.record(ordinal))) != stored:
                    sound = min(sound, ordinal)
                    break
            continue
        stored_sums = np.ascontiguousarray(columns[length:].T).view("<u4")[:, 0]
        wrong = crc32c.mask(crc32c.many(columns[:length])) != stored_sums
        if wrong.any():
            sound = min(sound, int(ordinals[wrong.argmax()]))
    return sound
