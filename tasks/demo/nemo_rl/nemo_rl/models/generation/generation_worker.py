"""The engine in a process of its own, for non-colocated runs: weights arrive on a pipe from the policy worker."""

from nemo_rl.distributed.worker_groups import refit_channel, serve
from nemo_rl.models.generation.engine import GenerationEngine


class GenerationWorker:
    """The calls that the driver makes."""

    def __init__(self, model_name):
        self.engine, self.channel = GenerationEngine(model_name), refit_channel()
        print("Generation engine ready (load_format=dummy)")

    def update_weights_from_collective(self):
        """Receive weights until the sender's end mark."""
        self.engine.update_weights(iter(self.channel.recv, None))

    def generate(self, prompts, length, seed):
        """Sample, see GenerationEngine.generate."""
        return self.engine.generate(prompts, length, seed)


if __name__ == "__main__":
    serve(GenerationWorker)
