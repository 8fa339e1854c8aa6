"""Optimizer, loss scale, run state, checkpoints."""
