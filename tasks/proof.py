"""CPU proof of a model family: what the Bridge under test imports, exports and computes, against Hugging Face.

    proof:qwen3   one to two minutes on two cores, nearly all of it imports; no GPU; evidence about the Bridge, no level

`containers/cpu/proof.py` measures under the agent, in the CPU environment, on the frozen Bridge and Core; `judge`
decides. A Pass needs every check of `LIMITS` within its limit and both packages imported from the trees under test. An
exception is the change's when a frame of Bridge or Core is on its way; a package that is missing, a refusal of our
stand-ins, a reference that could not be had, or no answer at all are Blocked: gaps, never a Pass.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tasks import attempts, pipeline
from tasks.errors import UserError
from tasks.files import read_json, sha256_json
from tasks.pipeline import Done, Stage
from tasks.verdict import Reason, Verdict

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tasks.pipeline import Pipeline

# Only families whose proof was seen to pass on the unmodified Bridge 067f987df; Qwen3's also to fail on swapped k and v
FAMILIES = {
    "qwen2": "Qwen2: biases in QKV",
    "qwen3": "Qwen3: norms of q and k",
    "llama": "Llama: plain dense",
    "mistral": "Mistral: dense, head size of its own",
}
# check -> largest value that is good; logits, loss and gradients are relative. float32 leaves about 1e-6, 1e-7 and 4e-6
# on the unmodified trees; the smallest fault of the prototype's mutants, a wrong epsilon, showed as 1e-3 in its logits.
LIMITS = {
    "rotary table": 1e-6,
    "export missing": 0.0,
    "export extra": 0.0,
    "export unequal": 0.0,
    "logits": 1e-4,
    "loss": 1e-5,
    "gradients": 1e-3,
}
TRUSTED = ("rotary table",)  # about the reference: where it is off, nothing is known about the Bridge
BRIDGE, CORE, STANDINS = "megatron/bridge/", "megatron/core/", "/e2e_cpu/"
OURS = ("megatron", "nemo_rl")
PROGRAM = "containers/cpu/proof.py"
TIMEOUT_S = 600.0


def stage(pipe: Pipeline, family: str) -> Stage:
    """Return the stage `proof:<family>`; UserError for a family that has none."""
    if family not in FAMILIES:
        raise UserError(f"no CPU proof of {family!r}; there are: {', '.join(FAMILIES)}")
    return Stage("proof", family, lambda: inputs(pipe, family), lambda: execute(pipe, family))


def inputs(pipe: Pipeline, family: str) -> dict[str, str]:
    """Return the input digest's parts: Bridge and Core without their tests, the CPU environment, what measures."""
    return {
        **{kind: pipe.tree(kind).components[kind] for kind in ("bridge", "mcore")},
        "image": sha256_json(pipe.cpu_place.image),
        "code": pipeline.code(PROGRAM, "tasks/proof.py"),
        "family": family,
    }


def execute(pipe: Pipeline, family: str) -> Done:
    """Measure the family in an attempt of its own and judge it."""
    place, trees = pipe.cpu_place, pipe.sound_trees()
    folder = attempts.new_folder(pipe.workspace.attempts, f"proof.{family}")

    def command(paths: Mapping[str, str]) -> attempts.Command:
        program = f"{paths['agent']}/{PROGRAM.removeprefix('containers/')}"
        argv = (place.interpreter, program, family, f"{paths['attempt']}/proof.json")
        return attempts.Command(argv, paths["attempt"], TIMEOUT_S)

    attempt = pipe.perform(place, trees, folder, f"proof:{family}", command)
    answer = read_json(folder / "proof.json")
    roots = {kind: place.root(kind, folder, trees) for kind in ("bridge", "mcore")}
    verdict, reasons, checks = judge(answer, attempt.exit, roots)
    if attempt.exit is None and attempt.engine_detail:
        reasons = [Reason("engine", family, attempt.engine_detail), *reasons]
    for run_time, checkout in pipe.path_map(folder, trees, place).items():
        reasons = [replace(r, text=r.text.replace(run_time, checkout)) for r in reasons]
    proof = attempts.evidence_files(folder, pipe.workspace.root)
    attempts.clear_work(folder)
    artefact = {"attempt": os.fspath(folder.relative_to(pipe.workspace.root)), "checks": checks}
    return Done(artefact, verdict, tuple(reasons), reusable=verdict is Verdict.PASS, evidence=proof)


def judge(
    answer: Any, exit_facts: Mapping[str, Any] | None, roots: Mapping[str, str]
) -> tuple[Verdict, list[Reason], list[dict[str, Any]]]:
    """Return verdict, reasons and the judged checks of one answer of `containers/cpu/proof.py`; pure.

    `exit_facts` is exit.json or None; `roots` are the run-time paths of "bridge" and "mcore" under test.
    """
    if exit_facts is None or exit_facts.get("reason") != "exited":
        how = (exit_facts or {}).get("reason", "no exit.json")
        return Verdict.BLOCKED, [Reason("stopped", "proof", f"the proof did not end by itself: {how}")], []
    rc = exit_facts.get("rc")
    if not isinstance(answer, dict):
        return Verdict.BLOCKED, [Reason("no_answer", "proof", f"the proof left no answer, rc {rc}")], []
    checks = [_judged(found) for found in answer.get("checks", [])]
    if answer.get("problem"):
        return (*blame(answer["problem"]), checks)
    family = str(answer.get("family"))
    bad = [c for c in checks if c["limit"] is not None and c["verdict"] != Verdict.PASS]
    untrusted = [c for c in bad if c["name"] in TRUSTED]
    if untrusted:
        return Verdict.BLOCKED, [_reason("reference", c) for c in untrusted], checks
    elsewhere = _elsewhere(answer.get("origins", {}), roots)
    if bad or elsewhere:
        return Verdict.FAIL, [*elsewhere, *(_reason("proof", c) for c in bad)], checks
    names = {c["name"] for c in checks}
    gaps = [Reason("no_answer", n, f"{family}: {n} was not measured") for n in LIMITS if n not in names]
    gaps += [Reason("no_limit", n, f"{family}: {n} has no limit") for n in sorted(names - set(LIMITS))]
    gaps += [
        Reason("origin", module, f"nothing tells where {module} was imported from")
        for module in ("megatron.bridge", "megatron.core")
        if module not in answer.get("origins", {})
    ]
    if rc != 0:
        gaps.append(Reason("rc", family, f"the proof ended with rc {rc} though it reports no problem"))
    return Verdict.BLOCKED if gaps else Verdict.PASS, gaps, checks


def blame(problem: Mapping[str, Any]) -> tuple[Verdict, list[Reason]]:
    """Return whose an exception is: Fail where Bridge or Core raised it or called what did, else Blocked."""
    frames = [(str(file), line, str(name)) for file, line, name in problem.get("frames", [])]
    stage = problem.get("stage")
    said = f"{problem.get('type')}: {problem.get('text')}"
    if stage == "reference":
        return Verdict.BLOCKED, [Reason("reference", "proof", f"the family's reference cannot be had: {said}")]
    missing = problem.get("missing")
    if missing and not str(missing).startswith(OURS):
        return Verdict.BLOCKED, [Reason("package", str(missing), f"the CPU environment lacks a package: {said}")]
    deepest = frames[-1][0] if frames else ""
    if problem.get("type") == "NotImplementedError" and STANDINS in deepest:
        return Verdict.BLOCKED, [Reason("standin", "proof", f"our CPU stand-ins do not do it: {said}")]
    bridge = [f for f in frames if BRIDGE in f[0]]
    core = [f for f in frames if CORE in f[0]]
    importing = all(name == "<module>" for _, _, name in [*bridge, *core])
    if (bridge or core) and importing and BRIDGE not in deepest and CORE not in deepest:
        return Verdict.BLOCKED, [Reason("import", "proof", f"a package failed while it was imported: {said}")]
    if bridge:
        return Verdict.FAIL, [Reason("bridge_frame", stage or "proof", f"{said} ({_at(bridge[-1])})")]
    if core:
        text = f"{said} ({_at(core[-1])}), in Core, with the model that the Bridge configured"
        return Verdict.FAIL, [Reason("core_frame", stage or "proof", text)]
    return Verdict.BLOCKED, [Reason("problem", stage or "proof", f"{said}, in no frame of Bridge or Core")]


def _at(frame: tuple[str, Any, str]) -> str:
    file, line, name = frame
    return f"{file}:{line} in {name}"


def _judged(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return one check with its limit and verdict; a value that is no number, or NaN, is never good."""
    name, limit = str(found.get("name")), LIMITS.get(str(found.get("name")))
    try:
        value = float(found.get("value", "NaN"))
    except (TypeError, ValueError):
        value = float("nan")
    good = limit is not None and value <= limit
    return {
        "name": name,
        "verdict": (Verdict.PASS if good else Verdict.FAIL).value,
        "value": found.get("value"),
        "limit": limit,
        "text": str(found.get("text", "")),
    }


def _reason(kind: str, check: Mapping[str, Any]) -> Reason:
    value = check["value"]
    shown = f"{value:.3g}" if isinstance(value, int | float) else str(value)
    text = f"{check['name']}: {shown}, at most {check['limit']}: {check['text']}"
    return Reason(kind, check["name"], text, str(check["limit"]), shown)


def _elsewhere(origins: Mapping[str, Any], roots: Mapping[str, str]) -> list[Reason]:
    """Return a reason for each package that was not imported from the tree under test."""
    wanted = {"megatron.bridge": roots["bridge"], "megatron.core": roots["mcore"]}
    return [
        Reason("origin", module, f"{module} was imported from {origins[module]}, not from {root}")
        for module, root in wanted.items()
        if module in origins and not str(origins[module]).startswith(f"{root.rstrip('/')}/")
    ]
