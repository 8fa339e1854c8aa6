"""A realistic report, built case by case, for the tests of every renderer; `write_evidence` adds logs and metrics."""

from __future__ import annotations

import copy
import json
import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

BRIDGE = "/home/dev/src/Megatron-Bridge"
PROVENANCE: dict[str, Any] = {
    "bridge": {
        "path": BRIDGE,
        "sha": "067f987df0c1a2b3c4d5e6f708192a3b4c5d6e7f",
        "dirty": ["src/megatron/bridge/models/conversion/param_mapping.py", "tests/unit_tests/models/test_new.py"],
        "digest": "sha256:0f1c" + "a" * 60,
    },
    "mcore": {
        "path": f"{BRIDGE}/3rdparty/Megatron-LM",
        "sha": "1a2b3c4d" * 5,
        "dirty": [],
        "digest": "sha256:" + "b" * 64,
    },
    "nemo_rl": {"path": "/home/dev/src/RL", "sha": "9f8e7d6c" * 5, "dirty": [], "digest": "sha256:" + "c" * 64},
    "image": {"ref": "nvcr.io/nvidia/nemo-rl:v0.5.0", "digest": "sha256:" + "d" * 64, "nemo_rl_sha": "9f8e7d6c" * 5},
    "host": "dgx-07",
    "gpus": ["NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3"],
    "runner": {"version": "0.1.0", "sha": "e97dfff" + "0" * 33},
}
PROB = 'max(data["train/token_mult_prob_error"]) < 1.05'
REWARD = 'mean(data["train/reward"], -6, -1) > 0.3'


def attempt(case: str, number: int = 1, *, rc: int | None = 0, seconds: float = 1261.0021) -> dict[str, Any]:
    name = f"{number:04d}"
    return {
        "id": name,
        "path": f"attempts/{case}/{name}",
        "rc": rc,
        "started": f"2026-11-29T{18 + number:02d}:02:11.734Z",
        "duration_s": seconds,
        "gpus": ["NVIDIA H100 80GB HBM3"] * 2,
    }


def check(
    expr: str = PROB, verdict: str = "Pass", value: Any = 1.0213, limit: Any = 1.05, **more: Any
) -> dict[str, Any]:
    op = "<" if "<" in expr else ">"
    word = "holds" if verdict == "Pass" else "is false"
    text = f"{expr} {word}: got {value}, limit {limit}"
    return {"expr": expr, "verdict": verdict, "value": value, "limit": limit, "op": op, "text": text, **more}


def reason(kind: str, subject: str, text: str) -> dict[str, str]:
    return {"kind": kind, "subject": subject, "text": text}


def case(name: str = "grpo_megatron", level: str = "level0", verdict: str = "Pass", **more: Any) -> dict[str, Any]:
    case_id = f"{'rehearse.' if more.get('rehearsal') else ''}{level}.{name}"
    base: dict[str, Any] = {
        "level": level,
        "case": name,
        "title": f"{name.replace('_', ' ')} with a Megatron policy",
        "proves": "provider, HF import, refit to vLLM and two optimizer steps work together",
        "rehearsal": False,
        "verdict": verdict,
        "reasons": [],
        "cached": False,
        "attempts": [attempt(case_id)],
        "steps": {"requested": 20, "reached": 20},
        "checks": [check(), check(REWARD, value=0.412, limit=0.3)],
        "command": [
            "bash",
            "tests/functional/grpo_megatron.sh",
            "grpo.max_num_steps=20",
            "policy.model_name=Qwen/Qwen2.5-0.5B",
        ],
        "metrics": f"attempts/{case_id}/0001/metrics.json",
        "baseline": None,
        "model": "Qwen/Qwen2.5-0.5B",
    }
    return {**base, **more}


def failing_case(**more: Any) -> dict[str, Any]:
    bad = check(verdict="Fail", value=3.2071, tags=["train/token_mult_prob_error"], worst_step="4")
    fields: dict[str, Any] = {
        "reasons": [reason("check", "train/token_mult_prob_error", f"{PROB}: got 3.2071 at step 4, limit 1.05")],
        "checks": [bad, check(REWARD, "Fail", 0.07, 0.3)],
        "first_error": {"text": "AssertionError: token_mult_prob_error 3.2071 > 1.05", "line": 41, "file": "run.log"},
        "chain": ["Fail", "a check is false at the full step count", "checks.json: 2 of 2 false"],
        "baseline": {
            "verdict": "Pass",
            "sha": "5c4b3a29" * 5,
            "finding": "new",
            "text": "the vendored Bridge passes the same case: the failure is new with this change",
            "checks": [check(value=1.0198), check(REWARD, value=0.405, limit=0.3)],
            "metrics": "attempts/baseline.level0.grpo_megatron/0001/metrics.json",
        },
    }
    return case(verdict="Fail", **{**fields, **more})


def blocked_case(**more: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "level": "level2",
        "reasons": [
            reason("infrastructure", "vllm", "OSError: [Errno 28] No space left on device before a worker started")
        ],
        "attempts": [attempt("level2.noncolocated", rc=1, seconds=40.25)],
        "steps": {"requested": 2, "reached": None},
        "checks": [],
        "metrics": None,
        "first_error": {"text": "OSError: [Errno 28] No space left on device", "line": 12, "file": "run.log"},
    }
    return case("noncolocated", verdict="Blocked", **{**fields, **more})


def dependent_case(**more: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "level": "level2",
        "reasons": [reason("dependency", "level2.noncolocated", "level2.noncolocated is blocked")],
        "attempts": [],
        "steps": {"requested": 2, "reached": None},
        "checks": [],
        "metrics": None,
    }
    return case("noncolocated_resume", verdict="Blocked", **{**fields, **more})


def skipped_case(**more: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "level": "level3",
        "optional": True,
        "reasons": [reason("gpus", "8", "needs 8 GPUs, 2 visible")],
        "attempts": [],
        "steps": {"requested": 3, "reached": None},
        "checks": [],
        "metrics": None,
    }
    return case("tp4_pp2", verdict="Skipped", **{**fields, **more})


def cached_case(**more: Any) -> dict[str, Any]:
    source = {"when": "2026-11-28T10:00:00Z", "host": "dgx-02", "gpus": ["NVIDIA H200"] * 2, "attempt": "0007"}
    return case("sft_megatron", "level1", **{"cached": True, "cached_from": source, **more})


def flaky_case(**more: Any) -> dict[str, Any]:
    tries = [attempt("level1.grpo_megatron_lora", 1, rc=1, seconds=600.0), attempt("level1.grpo_megatron_lora", 2)]
    return case("grpo_megatron_lora", "level1", **{"flaky": True, "attempts": tries, **more})


def quarantined_case(**more: Any) -> dict[str, Any]:
    quarantine = {"reason": "flaky since 2026-11-02", "owner": "@x", "until": "2026-12-31"}
    return failing_case(case="eval", level="level3", quarantine=quarantine, baseline=None) | more


def rehearsal_case(**more: Any) -> dict[str, Any]:
    return case("sft_megatron", "level1", **{"rehearsal": True, "model": "a tiny Qwen2 built here", **more})


def baseline_case(**more: Any) -> dict[str, Any]:
    return case("grpo_megatron", "baseline.level0", **{"title": "the same case with the vendored Bridge", **more})


def not_run_case(**more: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "reasons": [reason("not_run", "level0.grpo_megatron", "not run yet")],
        "attempts": [],
        "steps": {"requested": 20, "reached": None},
        "checks": [],
        "metrics": None,
    }
    return case(verdict="Blocked", **{**fields, **more})


def suite(name: str = "bridge-mapping", verdict: str = "Pass", **more: Any) -> dict[str, Any]:
    counts = {"tests": 212, "failed": 0, "errors": 0, "skipped": 3, "cached": False, "duration_s": 31.4159}
    return {"name": name, "verdict": verdict, **counts, **more}


def failing_suite(**more: Any) -> dict[str, Any]:
    failed = [
        {
            "name": "tests/unit_tests/models/test_param_mapping.py::test_qkv_roundtrip[gqa]",
            "text": "AssertionError: k and v are swapped\n  at param_mapping.py:412",
        },
        {"name": "tests/unit_tests/models/test_param_mapping.py::test_qkv_roundtrip[mha]", "text": ""},
    ]
    reasons = [reason("suite", "bridge-refit", "2 of 40 tests failed")]
    return suite(
        **{
            "name": "bridge-refit",
            "verdict": "Fail",
            "tests": 40,
            "failed": 2,
            "failed_tests": failed,
            "reasons": reasons,
            **more,
        }
    )


def proof(family: str = "qwen2", verdict: str = "Pass", **more: Any) -> dict[str, Any]:
    checks = [
        {"name": "export is bit-equal", "verdict": "Pass", "value": 0, "limit": 0},
        {
            "name": "gradient, largest difference",
            "verdict": verdict,
            "value": 2.2e-7 if verdict == "Pass" else 0.4,
            "limit": 1e-5,
        },
    ]
    return {"family": family, "verdict": verdict, "checks": checks, "cached": False, **more}


def report(*cases: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return a report of `cases`; result and sentence are left to the renderers unless given."""
    levels = list(dict.fromkeys(c["level"] for c in cases if not c["rehearsal"]))
    base: dict[str, Any] = {
        "schema": 1,
        "workspace": "bridge-rl-3f2a",
        "demo": False,
        "requested": levels + [f"rehearse:{c['level']}.{c['case']}" for c in cases if c["rehearsal"]],
        "provenance": PROVENANCE,
        "probe": {
            "verdict": "Pass",
            "origins": {"policy worker": {"megatron.bridge": "/opt/Megatron-Bridge/src/megatron/bridge/__init__.py"}},
        },
        "suites": [suite()],
        "cases": list(cases),
        "proofs": [],
        "limitations": [],
        "follow_ups": [],
    }
    return copy.deepcopy({**base, **more})


def full_report(**more: Any) -> dict[str, Any]:
    """Return one of everything: Pass, Fail, Blocked, dependant, Skipped, cached, flaky, quarantine, rehearsal, baseline."""
    cases = [
        failing_case(),
        case("ppo_megatron", "level0"),
        cached_case(),
        flaky_case(),
        blocked_case(),
        dependent_case(),
        skipped_case(),
        quarantined_case(),
        rehearsal_case(),
        baseline_case(),
    ]
    stages = [
        {"name": "sync", "state": "ran", "why": "param_mapping.py changed"},
        {"name": "probe", "state": "ran", "why": "sync changed", "needs": ["sync"]},
        {"name": "unit:bridge-mapping", "state": "ran", "why": "bridge tree changed", "needs": ["probe"]},
        {
            "name": "run:level0.grpo_megatron",
            "state": "failed",
            "why": "bridge tree changed",
            "needs": ["unit:bridge-mapping"],
        },
        {
            "name": "run:level1.sft_megatron",
            "state": "reused",
            "why": "the same inputs passed before",
            "needs": ["probe"],
        },
        {
            "name": "run:level2.noncolocated_resume",
            "state": "not run",
            "why": "level2.noncolocated is blocked",
            "needs": ["run:level2.noncolocated"],
        },
    ]
    extra = {
        "limitations": ["no learning-signal claim: level 6 was not requested"],
        "follow_ups": ["mend the k/v order in param_mapping.py, rerun level0"],
    }
    return report(
        *cases, **{"suites": [suite(), failing_suite()], "proofs": [proof()], "stages": stages, **extra, **more}
    )


def series(tag: str, steps: int = 20, *, bad: bool = False) -> dict[str, Any]:
    """Return one metric as metrics.json has it, steps as strings, non-finite values as words."""
    rising = "reward" in tag
    found: dict[str, Any] = {}
    for step in range(1, steps + 1):
        wave = 0.02 * math.sin(step * 1.7)
        value = 0.05 + 0.4 * step / steps + wave if rising else 1.01 + abs(wave)
        if bad:
            value = 0.06 + wave if rising else 1.0 + 2.2 * math.exp(-((step - 4) ** 2) / 6) + abs(wave)
        found[str(step)] = round(value, 6)
    return found


def log_text(
    lines: int = 400, error_line: int = 41, error: str = "AssertionError: token_mult_prob_error 3.2071 > 1.05"
) -> str:
    rows = [f"\x1b[36m(lm_policy-0 pid=77)\x1b[0m step {n // 20 + 1}/20 loss={1 / (n + 1):.4f}" for n in range(lines)]
    if 0 < error_line <= lines:
        rows[error_line - 1] = f"\x1b[31m{error}\x1b[0m"
    return "\n".join(rows) + "\n"


def write_evidence(root: Path, rep: dict[str, Any], *, steps: int = 20, lines: int = 400) -> None:
    """Write run.log and metrics.json of every attempt and baseline named by `rep` below `root`."""
    for item in rep["cases"]:
        for tried in item["attempts"]:
            folder = root / tried["path"]
            folder.mkdir(parents=True, exist_ok=True)
            error = item.get("first_error") or {}
            (folder / "run.log").write_text(log_text(lines, error.get("line", 0), error.get("text", "")))
        bad = item["verdict"] == "Fail"
        for path, is_bad in ((item["metrics"], bad), ((item["baseline"] or {}).get("metrics"), False)):
            if path:
                tags = ("train/token_mult_prob_error", "train/reward", "train/loss")
                (root / path).parent.mkdir(parents=True, exist_ok=True)
                (root / path).write_text(json.dumps({tag: series(tag, steps, bad=is_bad) for tag in tags}))
