"""The policy: a Megatron model that the Bridge builds, imports, exports and checkpoints."""

import os
from pathlib import Path

import numpy as np

import megatron.bridge
import megatron.core
from megatron.bridge import AutoBridge
from megatron.bridge.peft.lora import LoRA
from megatron.bridge.training.checkpointing import load_checkpoint, save_checkpoint
from megatron.bridge.training.mixed_precision import LossScale
from megatron.bridge.training.optim import setup_optimizer
from megatron.bridge.training.state import TrainState
from megatron.core.inference import generate
from nemo_rl.algorithms.loss_functions import clipped_pg_loss, token_logprobs
from nemo_rl.distributed.worker_groups import refit_channel, serve

LOWEST, HIGHEST = ("probs_ratio_min", "probs_ratio_clamped_min"), ("probs_ratio_max", "probs_ratio_clamped_max")


def get_megatron_checkpoint_dir():
    """Return the folder of converted models: $NRL_MEGATRON_CHECKPOINT_DIR, $HF_HOME/nemo_rl, or .cache in the checkout."""
    hf_home = os.environ.get("HF_HOME")
    fallback = Path(hf_home) / "nemo_rl" if hf_home else Path(__file__).parents[4] / ".cache/nemo_rl"
    folder = Path(os.environ.get("NRL_MEGATRON_CHECKPOINT_DIR") or fallback)
    print(f"Using default megatron checkpoint dir: {folder}")
    return folder


class MegatronPolicyWorker:
    """The calls that the driver makes."""

    def __init__(self, config, train_iters):
        print(f"megatron.bridge from {megatron.bridge.__file__}")
        print(f"megatron.core from {megatron.core.__file__}")
        self.config, settings, self.channel = config, config["policy"]["megatron_cfg"], None
        model_name = config["policy"]["model_name"]
        self.bridge = AutoBridge.from_hf_pretrained(model_name)
        converted = get_megatron_checkpoint_dir() / model_name.strip("/").replace("/", "--") / "iter_0000000"
        if converted.exists() and not settings["force_reconvert_from_hf"]:
            print(f"Checkpoint already exists at {converted}. Skipping import.")
        else:
            fresh = self.bridge.to_megatron_provider().provide_distributed_model()
            self.bridge.load_hf_weights(fresh)
            save_checkpoint(converted, fresh)
            print(f"successfully saved checkpoint from iteration 0 to {converted.parent}")
        print("> compiling dataset index builder ...")
        provider, reference = self.bridge.to_megatron_provider(), self.bridge.to_megatron_provider()
        provider.register_pre_wrap_hook(lambda model: load_checkpoint(converted, model) or model)
        if settings["peft"]["enabled"]:
            provider.register_pre_wrap_hook(LoRA(dim=settings["peft"]["dim"], alpha=settings["peft"]["alpha"]))
        self.model = provider.provide_distributed_model()
        optimizer = settings["optimizer"]
        self.optimizer, self.scheduler = setup_optimizer(
            self.model, optimizer["lr"], settings["scheduler"]["lr_warmup_iters"], optimizer["weight_decay"],
            optimizer["clip_grad"],
        )  # fmt: skip
        print("Model, optimizer, and learning rate scheduler built")
        self.state, self.loss_scale = TrainState(train_iters), LossScale()
        print("Checkpoint loaded")
        self.reference = reference.provide_distributed_model()
        load_checkpoint(converted, self.reference)
        print("Reference model loaded")

    def last_step(self):
        """Return the last step that the training state allows."""
        return self.state.last_step()

    def load_checkpoint(self, folder):
        """Resume weights, optimizer and step."""
        load_checkpoint(folder, self.model, self.optimizer, self.state)
        print(f"Resumed from {folder} at step {self.state.step}")
        return self.state.step

    def save_checkpoint(self, folder):
        """Save weights, optimizer and step."""
        save_checkpoint(folder, self.model, self.optimizer, self.state)

    def export_weights(self):
        """Return [(name, tensor)] in Hugging Face's layout, for a colocated engine."""
        return list(self.bridge.export_hf_weights(self.model))

    def broadcast_weights_for_collective(self):
        """Send every weight to the generation process, then an end mark."""
        self.channel = self.channel or refit_channel()
        for pair in self.bridge.export_hf_weights(self.model):
            self.channel.send(pair)
        self.channel.send(None)

    def generate(self, prompts, length, seed):
        """Sample with the training weights themselves (generation backend megatron)."""
        return generate(self.model, prompts, length, np.random.default_rng(seed))

    def get_logprobs(self, tokens, prompt_length):
        """Return log-probabilities of the response under policy and reference, each [B, R]."""
        return [token_logprobs(m.forward(tokens)[0], tokens, prompt_length)[0] for m in (self.model, self.reference)]

    def train(self, batch):
        """Do the updates of one step, one per global batch; return metrics of the step."""
        size, history = self.config["policy"]["train_global_batch_size"], []
        step = self.state.step + 1
        lr, scale = self.scheduler.learning_rate(step), self.loss_scale.at(step)
        for first in range(0, len(batch["tokens"]), size):
            part = {name: values[first : first + size] for name, values in batch.items()}
            logits, tape = self.model.forward(part["tokens"])
            loss, gradient, metrics = clipped_pg_loss(logits, part, self.config["loss_fn"])
            full = self.model.backward(gradient * scale, tape)
            unscaled = {name: g / scale for name, g in self.model.gradients(full).items()}
            metrics["loss"] = float(loss * scale / scale)
            metrics["grad_norm"] = self.optimizer.step(unscaled, lr)
            history.append(metrics)
        self.state.step = step
        merge = {**dict.fromkeys(LOWEST, np.min), **dict.fromkeys(HIGHEST, np.max)}
        merged = {name: float(merge.get(name, np.mean)([m[name] for m in history])) for name in history[0]}
        return {**merged, "lr": lr, "wd": self.optimizer.weight_decay, "num_valid_samples": len(batch["tokens"])}

    def shutdown(self):
        """Release what the run holds."""
        return self.state.shutdown()


if __name__ == "__main__":
    serve(MegatronPolicyWorker)
