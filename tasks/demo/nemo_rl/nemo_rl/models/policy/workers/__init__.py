"""The processes that hold the policy."""
