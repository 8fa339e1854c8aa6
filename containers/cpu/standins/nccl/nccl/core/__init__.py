"""What distributed/stateless_process_group.py of NeMo-RL imports; the communicator is in communicator.py."""

from .communicator import SUM, Communicator

__all__ = ["SUM", "Communicator"]
