"""Entry point: `run_grpo.py [--config FILE] [override...]`."""

import argparse
import pprint
from pathlib import Path

from nemo_rl.algorithms.grpo import close, grpo_train, setup
from nemo_rl.models.huggingface import ensure_checkpoint
from nemo_rl.utils.config import load_config, parse_hydra_overrides
from nemo_rl.utils.logger import Logger, get_next_experiment_dir


def main():
    """Read the configuration, start the workers, train, and end the workers whatever happens."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", default=str(Path(__file__).parent / "configs/grpo_math_1B.yaml"))
    args, overrides = parser.parse_known_args()
    config = load_config(args.config)
    print(f"Loaded configuration from: {args.config}")
    if overrides:
        print(f"Overrides: {overrides}")
        parse_hydra_overrides(config, overrides)
    print("Final config:")
    pprint.pprint(config, width=120)
    config["logger"]["log_dir"] = str(get_next_experiment_dir(config["logger"]["log_dir"]))
    print(f"\U0001f4ca Using log directory: {config['logger']['log_dir']}", flush=True)
    ensure_checkpoint(config["policy"]["model_name"])
    policy, generation, workers, seconds = setup(config)
    logger = Logger(config["logger"]["log_dir"], config["logger"]["tensorboard_enabled"])
    try:
        grpo_train(config, policy, generation, logger, seconds)
        logger.close()
        policy.call("shutdown")
    finally:
        logger.close()
        close(workers)


if __name__ == "__main__":
    main()
