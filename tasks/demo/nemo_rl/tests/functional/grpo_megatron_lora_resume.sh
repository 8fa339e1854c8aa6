#!/bin/bash
# LoRA: four steps in one go, and two steps, a checkpoint, two more. The last two must agree.
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

run() { # logs, steps, checkpoints, more overrides
    $PYTHON examples/run_grpo.py \
        --config examples/configs/grpo_math_1B_megatron.yaml \
        grpo.num_prompts_per_step=20 \
        grpo.num_generations_per_prompt=4 \
        policy.train_global_batch_size=80 \
        data.shuffle=false \
        policy.megatron_cfg.peft.enabled=true \
        policy.megatron_cfg.peft.dim=8 \
        policy.megatron_cfg.optimizer.lr=0.002 \
        logger.tensorboard_enabled=true \
        logger.log_dir="$1" \
        grpo.max_num_steps="$2" \
        checkpointing.enabled=true \
        checkpointing.save_period=2 \
        checkpointing.checkpoint_dir="$3" \
        "${@:4}" \
        2>&1 | tee -a "$RUN_LOG"
}

run "$EXP_DIR/straight_logs" 4 "$EXP_DIR/straight_checkpoints" $@
# the conversion of the first run is not reused: each run imports through the Bridge
run "$LOG_DIR" 2 "$EXP_DIR/checkpoints" $@ policy.megatron_cfg.force_reconvert_from_hf=true
run "$LOG_DIR" 4 "$EXP_DIR/checkpoints" $@ policy.megatron_cfg.force_reconvert_from_hf=true

$PYTHON tests/compare_runs.py "$EXP_DIR/straight_logs" "$LOG_DIR" --first 3
$PYTHON tests/json_dump_tb_logs.py "$LOG_DIR" --output_path "$JSON_METRICS"
$PYTHON tests/check_metrics.py "$JSON_METRICS" \
    'max(data["resume/relative_difference"]) < 0.001'
