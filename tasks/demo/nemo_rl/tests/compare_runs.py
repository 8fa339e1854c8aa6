"""`compare_runs.py STRAIGHT RESUMED --first N`: how far a resumed run is from one that never stopped, from step N on.

Writes resume/relative_difference (the largest over TAGS, per step) as an event file below RESUMED, so that it is judged with the
other metrics. A resume that loses the optimizer's moments takes another path from its second step on.
"""

import argparse
import sys

from json_dump_tb_logs import merged

from nemo_rl.utils.logger import Logger

TAGS = ("train/loss", "train/reward", "train/grad_norm", "train/approx_entropy", "train/lr")


def differences(straight, resumed, first):
    """Return {step: largest relative difference}; LookupError where only one of the two has a step."""
    steps = {run: {int(s) for s in series["train/loss"] if int(s) >= first} for run, series in
             (("straight", straight), ("resumed", resumed))}  # fmt: skip
    if steps["straight"] != steps["resumed"] or not steps["straight"]:
        raise LookupError(f"the runs have different steps from {first} on: {steps}")

    def difference(tag, step):
        wanted, found = straight[tag][str(step)], resumed[tag][str(step)]
        return abs(found - wanted) / max(abs(wanted), 1e-3)

    return {step: max(difference(tag, step) for tag in TAGS) for step in sorted(steps["straight"])}


def main():
    """Print and write the differences."""
    parser = argparse.ArgumentParser()
    parser.add_argument("straight")
    parser.add_argument("resumed")
    parser.add_argument("--first", type=int, required=True)
    args = parser.parse_args()
    logger = Logger(f"{args.resumed}/resume_check", tensorboard=True)
    for step, difference in differences(merged(args.straight), merged(args.resumed), args.first).items():
        print(f"step {step}: the resumed run differs by {difference:.3g} of the straight one")
        logger.log_metrics({"relative_difference": difference}, step, "resume")
    logger.close()


if __name__ == "__main__":
    sys.exit(main())
