"""Tests of containers/cpu against definitions; they need torch and Megatron-Core: tests/real/test_standins.py runs them."""
