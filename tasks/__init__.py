"""nemo-rl-e2e: whether NeMo-RL still trains with this Megatron-Bridge change.

One concept a module; ARCHITECTURE.md has the order in which data flows through them. Nothing heavy is
imported at module level: a no-op `doit level2` must stay near the cost of an empty `doit`.
"""

__version__ = "0.1.0"
