"""Policies, generators, and the checkpoint that both start from."""
