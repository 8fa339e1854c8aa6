"""A communicator over gloo: broadcast and allreduce of whole tensors, in the order in which they are called."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from .utils import UniqueId

SUM = "sum"
TIMEOUT = timedelta(minutes=5)


class Communicator:
    """Members that met at a UniqueId; another collective raises NotImplementedError. Streams mean nothing here."""

    def __init__(self, group: Any, rank: int) -> None:
        self._group, self._rank = group, rank

    @classmethod
    def init(cls, *, nranks: int, rank: int, unique_id: UniqueId) -> Communicator:
        """Meet the others; returns when all `nranks` are there."""
        import torch.distributed as dist

        host, port = unique_id.address
        store = dist.TCPStore(host, port, nranks, rank == 0, timeout=TIMEOUT)
        return cls(dist.ProcessGroupGloo(store, rank, nranks, TIMEOUT), rank)

    def broadcast(self, *, sendbuf: Any, recvbuf: Any, root: int, stream: int | None = None) -> None:
        """Copy the root's `sendbuf` into every `recvbuf`."""
        import torch.distributed as dist

        if self._rank == root and recvbuf is not sendbuf:
            recvbuf.copy_(sendbuf)
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        self._group.broadcast([recvbuf], options).wait()

    def allreduce(self, *, sendbuf: Any, recvbuf: Any, op: str, stream: int | None = None) -> None:
        """Add up `sendbuf` of all into every `recvbuf`; another `op` raises NotImplementedError."""
        import torch.distributed as dist

        if op != SUM:
            msg = f"allreduce(op={op!r}) is not answered by the CPU stand-in of nccl"
            raise NotImplementedError(msg)
        if recvbuf is not sendbuf:
            recvbuf.copy_(sendbuf)
        self._group.allreduce([recvbuf], dist.AllreduceOptions()).wait()

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        msg = f"Communicator.{name} is not answered by the CPU stand-in of nccl"
        raise NotImplementedError(msg)
