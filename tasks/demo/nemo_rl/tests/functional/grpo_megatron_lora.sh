#!/bin/bash
# LoRA on the Megatron policy, three steps, a checkpoint at the third.
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
    grpo.num_prompts_per_step=20 \
    grpo.num_generations_per_prompt=4 \
    policy.train_global_batch_size=80 \
    data.shuffle=false \
    policy.megatron_cfg.peft.enabled=true \
    policy.megatron_cfg.peft.dim=8 \
    policy.megatron_cfg.optimizer.lr=0.002 \
    grpo.max_num_steps=3 \
    logger.tensorboard_enabled=true \
    logger.log_dir="$LOG_DIR" \
    checkpointing.enabled=true \
    checkpointing.save_period=3 \
    checkpointing.checkpoint_dir="$EXP_DIR/checkpoints" \
    $@ \
    2>&1 | tee "$RUN_LOG"

$PYTHON tests/json_dump_tb_logs.py "$LOG_DIR" --output_path "$JSON_METRICS"
$PYTHON tests/check_metrics.py "$JSON_METRICS" \
    'max(data["train/reward"]) > 0.03' \
    'max(data["train/gen_kl_error"]) < 0.001'
