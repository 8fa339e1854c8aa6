"""The identity of a communicator: on a CPU the address at which its members meet."""

from __future__ import annotations

import socket
from dataclasses import dataclass

SIZE = 128  # bytes, NCCL's


@dataclass(frozen=True, slots=True)
class UniqueId:
    """128 bytes that rank 0 makes and every member gets."""

    as_bytes: bytes

    @classmethod
    def from_bytes(cls, content: bytes) -> UniqueId:
        """Return the identity that another process made; ValueError for another length."""
        if len(content) != SIZE:
            msg = f"a unique id has {SIZE} bytes, not {len(content)}"
            raise ValueError(msg)
        return cls(bytes(content))

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of rank 0."""
        host, _, port = self.as_bytes.rstrip(b"\0").decode().rpartition(":")
        return host, int(port)


def get_unique_id() -> UniqueId:
    """Return an identity with a port of this machine that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return UniqueId(f"127.0.0.1:{port}".encode().ljust(SIZE, b"\0"))
