"""GRPO: sample several answers a prompt, compare each with its group, push the policy towards the better ones."""

import time
from multiprocessing.connection import Pipe

import numpy as np

from nemo_rl.distributed.worker_groups import start_workers
from nemo_rl.environments import arithmetic
from nemo_rl.models.generation.engine import GenerationEngine
from nemo_rl.utils.checkpoint import CheckpointManager
from nemo_rl.utils.timer import Timer

POLICY = ("nemo_rl.models.policy.workers.megatron_policy_worker", "MegatronPolicyWorker")
GENERATION = ("nemo_rl.models.generation.generation_worker", "GenerationWorker")


class Generation:
    """Where answers come from: the policy itself, an engine in this process, or one in a process of its own."""

    def __init__(self, config, policy, worker):
        self.backend, self.policy, self.worker = config["policy"]["generation"]["backend"], policy, worker
        self.engine = None if worker or self.backend == "megatron" else GenerationEngine(config["policy"]["model_name"])

    def refit(self):
        """Bring the policy's weights into the engine."""
        try:
            if self.worker:
                self.policy.start("broadcast_weights_for_collective")
                self.worker.start("update_weights_from_collective")
                self.policy.finish("broadcast_weights_for_collective")
                self.worker.finish("update_weights_from_collective")
            elif self.engine:
                self.engine.update_weights(self.policy.call("export_weights"))
        except Exception as error:
            message = "Error: Updating weights for the generation policy failed during refit"
            raise RuntimeError(message) from error

    def generate(self, **arguments):
        """Return tokens and the log-probabilities of the sampled ones."""
        if self.engine:
            return self.engine.generate(**arguments)
        return (self.worker or self.policy).call("generate", **arguments)


def setup(config):
    """Start the workers; return policy, generation and the workers to close."""
    megatron, colocated = config["policy"]["megatron_cfg"], config["policy"]["generation"]["colocated"]["enabled"]
    if not megatron["enabled"] or megatron["tensor_model_parallel_size"] != 1:
        raise ValueError("the demo has the Megatron policy only, on one rank")
    started, ends = time.perf_counter(), (None, None) if colocated else Pipe()
    init = {"config": config, "train_iters": config["grpo"]["max_num_steps"]}
    policy = start_workers("lm_policy", *POLICY, refit=ends[0], init=init)
    workers, worker = [policy], None
    try:
        if not colocated:
            init = {"model_name": config["policy"]["model_name"]}
            worker = start_workers("generation", *GENERATION, refit=ends[1], init=init)
            workers.append(worker)
            print("Collective for refit: policy and generation on separate processes")
        generation = Generation(config, policy, worker)
    except BaseException:
        close(workers)
        raise
    seconds = time.perf_counter() - started
    print(f"\n{'=' * 60}\n{' ' * 18}SETUP COMPLETE\n  Total setup time: {seconds:.1f}s\n{'=' * 60}\n", flush=True)
    return policy, generation, workers, seconds


def close(workers):
    """End worker processes."""
    for worker in workers:
        worker.close()


def advantages_of(rewards, group):
    """Return each reward's distance from its group's mean, in the group's standard deviations."""
    grouped = rewards.reshape(-1, group)
    spread = grouped.std(1, keepdims=True)
    return ((grouped - grouped.mean(1, keepdims=True)) / (spread + 1e-6)).reshape(-1)


def rollout(config, generation, step):
    """Return tokens, rewards and the training batch of a step, without the policy's own log-probabilities."""
    grpo = config["grpo"]
    group, seed = grpo["num_generations_per_prompt"], grpo["seed"]
    prompts = arithmetic.prompts(step, grpo["num_prompts_per_step"], seed, config["data"]["shuffle"])
    prompts = np.repeat(prompts, group, axis=0)
    tokens, logprobs = generation.generate(prompts=prompts, length=arithmetic.RESPONSE_LENGTH, seed=[seed, step])
    rewards = arithmetic.rewards(tokens)
    mask = np.ones_like(logprobs)
    mask[:, 1:] = tokens[:, 4:5] != arithmetic.END
    return rewards, {"tokens": tokens, "mask": mask, "gen": logprobs, "advantages": advantages_of(rewards, group)}


def train_step(config, policy, generation, step, timer):
    """Do one step; return its metrics, and samples to log."""
    with timer.time("prepare_for_generation/total"), timer.time("prepare_for_generation/transfer_and_update_weights"):
        generation.refit()
    with timer.time("generation"):
        rewards, batch = rollout(config, generation, step)
    length = batch["tokens"].shape[1] - batch["mask"].shape[1]
    with timer.time("policy_and_reference_logprobs"):
        logprobs = policy.call("get_logprobs", tokens=batch["tokens"], prompt_length=length)
        batch["prev"], batch["ref"] = logprobs
    with timer.time("policy_training"):
        metrics = policy.call("train", batch=batch)
    samples = [{"content": arithmetic.text(row), "reward": float(r)} for row, r in zip(batch["tokens"], rewards, strict=True)]
    return {
        **metrics,
        "reward": rewards.mean(),
        "mean_prompt_length": length,
        "mean_gen_tokens_per_sample": batch["mask"].sum(1).mean(),
        "total_num_tokens": batch["tokens"].size,
        "global_valid_seqs": len(rewards),
        "global_valid_toks": batch["mask"].sum(),
    }, samples


def grpo_train(config, policy, generation, logger, setup_seconds):
    """Run the steps that are left, with the banners, metrics and checkpoints of each."""
    saving, done = config["checkpointing"], 0
    checkpoints = CheckpointManager(saving["checkpoint_dir"])
    if saving["enabled"] and (latest := checkpoints.latest()):
        done = policy.call("load_checkpoint", folder=str(latest / "policy"))
    last = policy.call("last_step")
    logger.log_metrics({"total": setup_seconds}, 0, "timing/setup")
    for step in range(done + 1, last + 1):
        print(f"\n{'=' * 25} Step {step}/{last} {'=' * 25}", flush=True)
        timer = Timer()
        with timer.time("total_step_time"):
            metrics, samples = train_step(config, policy, generation, step, timer)
            if saving["enabled"] and (step % saving["save_period"] == 0 or step == last):
                print(f"Saving checkpoint for step {step}...", flush=True)
                info, save = {"step": step}, lambda folder: policy.call("save_checkpoint", folder=folder)
                with timer.time("checkpointing"):
                    checkpoints.save(step, config, info, save)
        logger.log_samples(samples, step)
        logger.log_metrics(metrics, step, "train")
        logger.log_metrics(timer.seconds, step, "timing/train")
        rate = metrics["global_valid_toks"] / timer.seconds["total_step_time"]
        logger.log_metrics({"valid_tokens_per_sec_per_gpu": rate}, step, "performance")
        print("\n\U0001f4ca Training Results:")
        print(f"  \u2022 Loss: {metrics['loss']:.4f}")
        print(f"  \u2022 Generation KL Error: {metrics['gen_kl_error']:.4f}")
        print(f"  \u2022 Avg Reward: {metrics['reward']:.4f}")
        print(f"  \u2022 Total step time: {timer.seconds['total_step_time']:.2f}s", flush=True)
    print("Max number of steps has been reached, stopping training early", flush=True)
