"""Providers, and the bridges of the model families."""
