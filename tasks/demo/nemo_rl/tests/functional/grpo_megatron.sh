#!/bin/bash
# GRPO with the Megatron policy and a generation engine beside it, two steps.
set -eou pipefail

SCRIPT_DIR=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)
PROJECT_ROOT=$(realpath "$SCRIPT_DIR/../..")
EXP_DIR=$SCRIPT_DIR/$(basename "$0" .sh)
LOG_DIR=$EXP_DIR/logs
JSON_METRICS=$EXP_DIR/metrics.json
RUN_LOG=$EXP_DIR/run.log
export PYTHONPATH=$PROJECT_ROOT:${PYTHONPATH:-}
export OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 # tiny matrices: more threads only wait for each other
PYTHON=${NRL_PYTHON:-python}

rm -rf "$EXP_DIR"
mkdir -p "$LOG_DIR"
cd "$PROJECT_ROOT"
$PYTHON examples/run_grpo.py \
    --config examples/configs/grpo_math_1B_megatron.yaml \
    grpo.num_prompts_per_step=8 \
    grpo.num_generations_per_prompt=8 \
    policy.train_global_batch_size=32 \
    grpo.max_num_steps=2 \
    logger.tensorboard_enabled=true \
    logger.log_dir="$LOG_DIR" \
    checkpointing.enabled=false \
    $@ \
    2>&1 | tee "$RUN_LOG"

$PYTHON tests/json_dump_tb_logs.py "$LOG_DIR" --output_path "$JSON_METRICS"
$PYTHON tests/check_metrics.py "$JSON_METRICS" \
    'max(data["train/token_mult_prob_error"]) < 1.05' \
    'min(data["train/probs_ratio_clamped_min"]) > 0.79' \
    'max(data["train/probs_ratio_clamped_min"]) < 1.21' \
    'min(data["train/probs_ratio_clamped_max"]) > 0.79' \
    'max(data["train/probs_ratio_clamped_max"]) < 1.21'
