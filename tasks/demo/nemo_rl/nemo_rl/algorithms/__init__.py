"""The training loop and its loss."""
