"""Judge the import probe: every interpreter of a run must take Bridge, Core and NeMo-RL from the trees under test.

The asking is done inside the runtime by containers/probe.py; here is what to ask and what an answer means. A wrong
origin is Blocked (nothing about the change was seen), an exception raised by the Bridge's own code is Fail.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from tasks.reason import Reason, Verdict

if TYPE_CHECKING:
    from collections.abc import Mapping

TIMEOUT_S = 600.0
# nemo_rl first, as in a worker: its import changes sys.path (nemo_rl/__init__.py appends the vendored Core)
MODULES = {"nemo_rl": "nemo_rl", "megatron.bridge": "bridge", "megatron.core": "mcore"}
# NeMo-RL's image keeps one environment a worker class (nemo_rl/utils/venvs.py); elsewhere one interpreter serves all.
WORKERS = "/opt/ray_venvs/nemo_rl.models"
IMAGE_INTERPRETERS = {
    "driver": ["/opt/nemo_rl_venv/bin/python"],
    "policy": [f"{WORKERS}.policy.workers.megatron_policy_worker.MegatronPolicyWorker/bin/python"],
    "generation": [f"{WORKERS}.generation.vllm.vllm_worker.VllmGenerationWorker/bin/python"],
}


def question(interpreter: str, result: str, *, in_image: bool) -> dict[str, Any]:
    """Return the probe spec. The policy worker imports for real; driver and generation only locate."""
    roles = {}
    for role, known in IMAGE_INTERPRETERS.items():
        roles[role] = {
            "candidates": [*(known if in_image else []), interpreter],
            "mode": "import" if role == "policy" else "locate",
            "modules": list(MODULES),
        }
    if not in_image:
        del roles["generation"]  # the same interpreter: nothing new to learn
    return {"interpreters": roles, "timeout_s": TIMEOUT_S, "result": result}


def judge(answers: Mapping[str, Any] | None, roots: Mapping[str, str]) -> tuple[Verdict, list[Reason]]:
    """Return the verdict of the answers; `roots` maps "bridge", "mcore", "nemo_rl" to where each tree is at run time.

    The first cause decides: identical errors of several roles are one reason.
    """
    if not answers:
        return Verdict.BLOCKED, [Reason("probe", "probe", "the probe gave no answer; see the attempt's run.log")]
    fails: dict[str, Reason] = {}
    blocks: dict[str, Reason] = {}
    for role, answer in answers.items():
        if "error" in answer:
            blocks.setdefault(answer["error"], Reason("interpreter", role, f"{role}: {answer['error']}"))
            continue
        for module, found in answer["modules"].items():
            reason, is_change = _judge_module(role, module, found, roots)
            if reason is not None:
                (fails if is_change else blocks).setdefault(reason.text.partition(": ")[2], reason)
    if blocks:
        return Verdict.BLOCKED, [*blocks.values(), *fails.values()]
    if fails:
        return Verdict.FAIL, list(fails.values())
    return Verdict.PASS, []


def _under(path: str | None, root: str) -> bool:
    return bool(path) and str(path).startswith(root.rstrip("/") + "/")


def _judge_module(
    role: str, module: str, found: Mapping[str, Any], roots: Mapping[str, str]
) -> tuple[Reason | None, bool]:
    """Return (reason or None, whether it speaks about the change) for one module of one role."""
    kind = MODULES[module]
    error = found.get("error")
    if error is None:
        if found.get("path") is None:
            text = (
                f"{role}: {module} is a namespace without __init__.py: the tree at {roots[kind]} is not the one found"
            )
            return Reason("origin", module, text), False
        if not _under(found["path"], roots[kind]):
            text = f"{role}: {module} comes from {found['path']}, expected below {roots[kind]}"
            return Reason("origin", module, text, roots[kind], found["path"]), False
        return None, False
    where = f" at {error['frame'][0]}:{error['frame'][1]} in {error['frame'][2]}" if error.get("frame") else ""
    text = f"{role}: import {module}: {error['type']}: {error['text'].splitlines()[0] if error['text'] else ''}{where}"
    missing = str(error.get("missing") or "")
    if missing.startswith("megatron.core") and not module.startswith("megatron.core"):
        return Reason("revisions", module, f"{text}. The Bridge needs a Core that has {missing}"), False
    raised_at = str((error.get("frame") or [""])[0])
    if error["type"] == "ImportError" and missing in sys.stdlib_module_names and not _under(raised_at, roots["bridge"]):
        return Reason(
            "interpreter", module, f"{text}. This Python's {missing} does not have it: use the image's"
        ), False
    ours = any(_under(frame, roots["bridge"]) for frame in error.get("frames", []))
    missing_foreign = error["type"] == "ModuleNotFoundError" and not missing.startswith(("megatron.bridge", "nemo_rl"))
    if ours and not missing_foreign:
        return Reason("bridge_frame", module, text), True
    if missing == module or missing == module.partition(".")[0]:
        text += f". {roots[kind]} has no such package: is the submodule there? git submodule update --init --recursive"
    return Reason("import", module, text), False
