"""CRC-32C (Castagnoli) of many short byte strings at once, with numpy; the checksum of TensorBoard's record files.

A CRC is linear over GF(2): the checksum of n bytes is the exclusive or of one table entry per position, chosen by the
byte there, and of a constant for the length. So the checksums of all records of one length are a sum of table look-ups
over the columns of a matrix, about as fast as one call of a C extension per record and without a further dependency.

Sources: RFC 3720 appendix B.4 (polynomial, check value), TFRecord format (masking), tensorboard's own
`tensorflow_stub/pywrap_tensorflow.py`.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Bytes2D = NDArray[np.uint8]
    Sums = NDArray[np.uint32]

POLYNOMIAL = 0x82F63B78  # reflected, RFC 3720
ONES = 0xFFFFFFFF
MASK_DELTA = 0xA282EAD8  # TFRecord: stored checksum = rotate right 15, plus this
ROW = 256  # bytes; longer strings are cut into rows of this width and the rows' sums chained


def _byte_table() -> list[int]:
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = (crc >> 1) ^ (POLYNOMIAL if crc & 1 else 0)
        table.append(crc)
    return table


_TABLE = _byte_table()


def _advance(crc: int, zeros: int) -> int:
    """Return the register after `zeros` further zero bytes."""
    for _ in range(zeros):
        crc = _TABLE[crc & 0xFF] ^ (crc >> 8)
    return crc


@functools.cache
def _preset(length: int) -> int:
    """Return what the initial register of ones contributes after `length` (<= ROW) bytes, final inversion included."""
    return _advance(ONES, length) ^ ONES


@functools.cache
def _tables() -> Sums:
    """Return (ROW, 256) tables: row k holds what each byte contributes when k bytes follow it."""
    import numpy as np

    rows = [np.array(_TABLE, dtype=np.uint32)]
    for _ in range(ROW - 1):
        rows.append(rows[0][rows[-1] & 0xFF] ^ (rows[-1] >> np.uint32(8)))
    return np.stack(rows)


@functools.cache
def _row_shift() -> tuple[list[int], list[int], list[int], list[int]]:
    """Return four byte tables that together advance a register by ROW zero bytes."""
    tables = tuple([_advance(byte << shift, ROW) for byte in range(256)] for shift in (0, 8, 16, 24))
    return tables[0], tables[1], tables[2], tables[3]


def _linear(columns: Bytes2D) -> Sums:
    """Return the sums of the columns of a (length <= ROW, n) matrix without preset and final inversion."""
    import numpy as np

    tables, length = _tables(), columns.shape[0]
    total = np.zeros(columns.shape[1], dtype=np.uint32)
    for position in range(length):
        total ^= tables[length - 1 - position].take(columns[position])
    return total


def mask(crc: Any) -> Any:
    """Return the stored form of a checksum or of an array of them (uint32)."""
    if isinstance(crc, int):
        return (((crc >> 15) | (crc << 17)) + MASK_DELTA) & ONES
    import numpy as np

    return ((crc >> np.uint32(15)) | (crc << np.uint32(17))) + np.uint32(MASK_DELTA)


def many(columns: Bytes2D) -> Sums:
    """Return the CRC-32C of each column of a (length <= ROW, n) matrix of bytes, as n uint32."""
    import numpy as np

    return _linear(columns) ^ np.uint32(_preset(columns.shape[0]))


def crc32c(data: bytes | memoryview) -> int:
    """Return the CRC-32C of one byte string of any length; of b"123456789" it is 0xE3069283."""
    if len(data) <= ROW:
        crc = ONES
        for byte in data:
            crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
        return crc ^ ONES
    import numpy as np

    head = len(data) % ROW
    rows = np.frombuffer(data, dtype=np.uint8, offset=head).reshape(-1, ROW)
    low, second, third, high = _row_shift()
    crc = crc32c(data[:head]) ^ ONES
    for start in range(0, len(rows), 4096):
        block = np.ascontiguousarray(rows[start : start + 4096].T)
        for row in _linear(block).tolist():
            crc = low[crc & 0xFF] ^ second[crc >> 8 & 0xFF] ^ third[crc >> 16 & 0xFF] ^ high[crc >> 24] ^ row
    return crc ^ ONES
