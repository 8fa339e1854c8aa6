"""Seconds by name."""

import time
from contextlib import contextmanager


class Timer:
    """Adds up the seconds spent under each name."""

    def __init__(self):
        self.seconds = {}

    @contextmanager
    def time(self, name):
        """Add the duration of a block to `name`."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started
