"""Loss scaling: gradients are computed on a scaled loss and divided again before the update."""

import math
from dataclasses import dataclass


@dataclass
class LossScale:
    """A scale that grows by `growth` after each `interval` steps, up to `ceiling`."""

    initial: float = 2.0**16
    growth: float = 2.0
    interval: int = 1000
    ceiling: float = 2.0**24

    def at(self, step):
        """Return the scale of a training step (from 1)."""
        grown = self.initial * math.pow(self.growth, (step - 1) // self.interval)
        return min(grown, self.ceiling)
