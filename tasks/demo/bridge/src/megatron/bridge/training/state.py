"""Where a run stands: steps done, and how many there are to do."""

from dataclasses import dataclass


@dataclass
class TrainState:
    """`step` training steps are done of `train_iters`."""

    train_iters: int
    step: int = 0

    def last_step(self):
        """Return the number of the last step that this run may do (from 1)."""
        return self.train_iters

    def shutdown(self):
        """Release what the run holds; returns at once, there is nothing to wait for on one rank."""
        return self.step
