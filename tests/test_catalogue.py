"""The shipped levels.yaml: what each level claims, and that no trap of NeMo-RL's scripts can come back unnoticed.

The same file against a real checkout is tests/real/test_catalogue.py.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tasks import levels

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "levels.yaml").read_text()
LEVELS = levels.load(ROOT / "levels.yaml")
CASES = {case.id: case for case in LEVELS.cases()}
VARIANTS = ("weekly", "vlm", "audio", "eagle3", "mtp", "moe", "fp8", "modelopt")
# Fixed folders outside the tree that upstream's scripts write and leave behind when they are killed.
FIXED_FOLDERS = {
    "sft_megatron.sh": "/tmp/sft_checkpoints",
    "dpo_megatron.sh": "/tmp/sft_checkpoints",
    "grpo_megatron_lora.sh": "/tmp/grpo_megatron_lora_checkpoints",
    "sft_megatron_lora.sh": "/tmp/mbridge_lora_sft_checkpoints",
    "dpo_megatron_lora.sh": "/tmp/dpo_megatron_lora_checkpoints",
    "distillation_megatron.sh": "/tmp/distillation_checkpoints",
    "qa_distillation_megatron.sh": "/tmp/qa_distillation_checkpoints",
}
SAVING = ("grpo_megatron_lora.sh", "sft_megatron_lora.sh", "dpo_megatron_lora.sh", "distillation_megatron.sh")


def faults(found: levels.Levels) -> list[str]:
    """Return every trap of upstream's scripts that a case of `found` falls into."""
    return [
        f"{case.id}: {text}"
        for case in found.cases()
        for text in (*_of_log(case), *_of_script(case), *_of_checks(case))
    ]


def _of_log(case: levels.Case) -> list[str]:
    found = []
    if case.backend == "megatron" and case.conversion == "fresh" and r"Skipping import\." not in case.forbid_log:
        found.append("an old conversion would pass")
    if case.conversion == "within_attempt" and not any("successfully saved" in text for text in case.expect_log):
        found.append("nothing shows that the conversion is this attempt's")
    if "eagle3" in case.id and not (
        "Draft Loss:" in case.expect_log and any("draft refit" in t for t in case.forbid_log)
    ):
        found.append("a draft that is never refitted would pass")
    return found


def _of_script(case: levels.Case) -> list[str]:
    script = (case.script or "").rpartition("/")[2]
    found = []
    if script == "vlm_grpo.sh" and "--config" not in case.overrides:
        found.append("runs DTensor")
    if script == "dpo_megatron_lora.sh" and "policy.megatron_cfg.enabled=true" not in case.overrides:
        found.append("runs DTensor")
    if script in {"grpo_non_colocated.sh", "grpo_nixl_non_colocated.sh"}:
        found.append("runs DTensor")
    if (folder := FIXED_FOLDERS.get(script)) and folder not in case.clean:
        found.append("a killed run's folder would be resumed from")
    saves = script in SAVING and "checkpointing.enabled=false" not in case.overrides
    if saves and not any(f"step_{case.steps}/policy/weights" in text for text in case.files):
        found.append("nothing asserts the checkpoint")
    if "test_suites" in (case.script or ""):
        if (case.script or "").removesuffix(".sh") not in case.clean:
            found.append("an old metrics.json ends the script with success")
        if "logger.wandb_enabled=false" not in case.overrides:
            found.append("needs an account")
        if not case.checks:
            found.append("upstream's checks are skipped when the steps are not reached")
    if script == "modelopt_quant_rollout.sh" and "w4a8" not in case.also_logs:
        found.append("the second of its two runs is not judged")
    return found


def _of_checks(case: levels.Case) -> list[str]:
    tags = re.findall(r'data\["([^"]*token_mult_prob_error)"\]', " ".join(case.checks))
    found = [
        f"{tag}: 0.0 would pass" for tag in dict.fromkeys(tags)
        if not any(check.startswith(("min", "varies")) and tag in check for check in case.checks)
    ]  # fmt: skip
    if case.steps and not case.real_work:
        found.append("zeros throughout would pass")
    if case.level == "level3" and not case.not_mapping_evidence and case.kind != "suite":
        found.append("claims evidence for the mapping")
    apart = any(re.match(r'min\(data\["train/loss"\]\) > 1e-0?3', check) for check in case.checks)
    if "distillation" in (case.script or "") and not apart:
        found.append("a teacher that is the student would pass")
    return found


def test_shipped_catalogue_falls_into_no_trap() -> None:
    assert faults(LEVELS) == []


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("overrides: [--config, examples/configs/vlm_grpo_3B_megatron.yaml]", "overrides: []", "vlm.grpo_megatron: runs DTensor"),
        ("          - policy.dtensor_cfg.enabled=false\n          - policy.megatron_cfg.enabled=true\n          - checkpointing",
         "          - checkpointing", "level1.dpo_megatron_lora: runs DTensor"),
        ("script: tests/functional/grpo_nccl_reshard_refit.sh", "script: tests/functional/grpo_non_colocated.sh", "runs DTensor"),
        ("clean: [/tmp/grpo_megatron_lora_checkpoints, tests/", "clean: [tests/", "would be resumed from"),
        ("        files: ['tests/functional/grpo_megatron_lora_checkpoints/step_3/policy/weights/**']\n", "", "asserts the checkpoint"),
        ("        clean: [tests/test_suites/llm/grpo-qwen3-8b-base-1n8g-megatron-lora]\n", "", "ends the script with success"),
        ('      - min(data["train/token_mult_prob_error"]) > 0.9\n      - min(data["train/mean', '      - min(data["train/mean',
         "level0.grpo_megatron: train/token_mult_prob_error: 0.0 would pass"),
        ("        real_work: [train/draft_loss, train/mean_gen_tokens_per_sample]\n", "        real_work: []\n", "zeros throughout"),
        ("        not_mapping_evidence: training and generation share the converted weights; only the reward floor would notice\n", "",
         "claims evidence for the mapping"),
        ("        expect_log: ['Draft Loss:']\n        forbid_log", "        forbid_log", "never refitted"),
        ("        also_logs: {w4a8: tests/functional/modelopt_quant_rollout/w4a8_fake_quant/logs}\n", "", "second of its two runs"),
    ],
)  # fmt: skip
def test_every_trap_is_seen_when_its_guard_goes(tmp_path: Path, old: str, new: str, fault: str) -> None:
    assert old in TEXT
    path = tmp_path / "levels.yaml"
    path.write_text(TEXT.replace(old, new))
    assert any(fault in text for text in faults(levels.load(path)))


def test_levels_and_variants_are_all_there_and_say_what_they_prove() -> None:
    assert list(LEVELS.levels) == [*(f"level{n}" for n in range(7)), *VARIANTS]
    for level in LEVELS.levels.values():
        assert level.required, level.id
        assert level.proves, level.id
        assert level.does_not_prove, level.id
        assert level.required_when, level.id
        assert level.suites, level.id


def test_every_case_says_what_it_compares_and_how_it_is_rehearsed_or_why_not() -> None:
    for case in CASES.values():
        assert case.compares, case.id
        assert bool(case.rehearsal) != bool(case.no_rehearsal), case.id
        assert case.model, case.id
        assert 0 < case.minutes * 60 < case.timeout_s, case.id


def test_required_cases_of_levels_0_to_6_need_two_gpus_at_most() -> None:
    assert max(c.gpus for n in range(7) for c in LEVELS.levels[f"level{n}"].required) == 2
    assert sum(c.gpus * c.minutes for n in range(7) for c in LEVELS.levels[f"level{n}"].required) < 500


def test_parallel_kinds_are_covered_for_two_and_for_eight_gpus() -> None:
    for gpus in (2, 8):
        text = " ".join(
            " ".join((*c.overrides, c.script or "")) for c in LEVELS.levels["level4"].cases if c.gpus == gpus
        )
        text += " ".join(c.script or "" for c in LEVELS.levels["moe"].cases if c.gpus == gpus)
        for kind in ("tensor", "pipeline", "context", "sequence_parallel=true", "expert|ep8"):
            assert re.search(kind, text), (gpus, kind)


def test_learning_level_asks_for_a_trend_and_for_trainable_weights() -> None:
    case = CASES["level6.grpo_megatron_lora"]
    assert any(check.startswith('improves(data["train/reward"])') for check in case.checks)
    assert 'min(data["train/grad_norm"]) > 0' in case.checks
    assert any(re.search(text, "  Trainable parameters: 17,596,416") for text in case.expect_log)
    assert any(re.search(text, "  Trainable parameters: 0") for text in case.forbid_log)
    assert not any(re.search(text, "  Trainable parameters: 10") for text in case.forbid_log)


def test_log_patterns_match_the_lines_they_are_for() -> None:
    lora = CASES["level1.sft_resume_diamond"]
    (converted,) = [text for text in lora.expect_log if "saved" in text]
    line = "(MegatronPolicyWorker pid=1)   successfully saved checkpoint from iteration       0 to "
    assert re.search(converted, line + "/cache/Qwen/Qwen3-0.6B [ t 1/1, p 1/1 ]")
    assert not re.search(converted, line + "/run/ckpts/mcore/tmp_step_1/policy/weights")
    skipped = "Checkpoint already exists at /cache/x. Skipping import."
    assert any(re.search(text, skipped) for text in CASES["level0.grpo_megatron"].forbid_log)


def test_context_parallel_cases_pad_sequences_as_nemo_rl_demands() -> None:
    """data.py of NeMo-RL stops after the set-up: 2 x CP, times TP with sequence parallelism."""
    for case in CASES.values():
        sizes = dict(text.partition("=")[::2] for text in case.overrides)
        cp = int(sizes.get("policy.megatron_cfg.context_parallel_size", 1))
        if cp > 1:
            parts = 2 * cp
            if sizes.get("policy.megatron_cfg.sequence_parallel") == "true":
                parts *= int(sizes["policy.megatron_cfg.tensor_model_parallel_size"])
            assert int(sizes["policy.make_sequence_length_divisible_by"]) % parts == 0, case.id


def test_shipped_file_has_no_warning() -> None:
    assert LEVELS.warnings == ()


def test_rehearsals_use_only_placeholders_that_are_prepared() -> None:
    names = {
        name
        for c in CASES.values()
        if c.rehearsal
        for o in c.rehearsal.overrides
        for name in re.findall(r"\{(\w+)\}", o)
    }
    assert names == {"model", "data"}
    prepared = {"random", "trained", "noisy", "noisy_qwen2", "noisy_moe", "player"}
    assert {c.rehearsal.model for c in CASES.values() if c.rehearsal} <= prepared


def test_rehearsed_adapters_move_and_their_scale_can_be_seen() -> None:
    """At upstream's rate three steps leave adapters where they were, and a lost merge changes nothing."""
    for name in ("level1.grpo_megatron_lora", "level1.sft_megatron_lora", "level1.dpo_megatron_lora"):
        plan = CASES[name].rehearsal
        assert plan
        assert "policy.megatron_cfg.optimizer.lr=1e-2" in plan.overrides
        moved = (
            "kl_penalty",
            'abs(data["train/loss"]["3"] - data["train/loss"]["1"])',
            'preference_loss"]["3"] < 0.68',
        )
        assert any(text in check for text in moved for check in plan.checks), name


def test_rehearsals_use_only_data_that_is_prepared() -> None:
    assert {c.rehearsal.data for c in CASES.values() if c.rehearsal} <= {"swap", "sums"}
