"""The optimizer and its learning-rate schedule."""

from dataclasses import dataclass

from megatron.core.optimizer import Adam


@dataclass
class OptimizerParamScheduler:
    """Linear warm-up to `lr` over `warmup` steps, then constant. Steps count from 1."""

    lr: float
    warmup: int

    def learning_rate(self, step):
        """Return the learning rate of a training step."""
        return self.lr * min(1.0, step / max(1, self.warmup))


def setup_optimizer(model, lr, warmup=0, weight_decay=0.0, clip_grad=1.0):
    """Return the optimizer over what the model says is trainable, and the schedule."""
    parameters = dict(model.trainable().items())
    return Adam(parameters, weight_decay=weight_decay, clip_grad=clip_grad), OptimizerParamScheduler(lr, warmup)
