"""Attempts from a small model of what may happen: the true verdict is known by construction, the decision must agree.

An attempt is one cause (or none), harmless noise before it, and follow-up errors behind it; neither of the two may
change the answer. It is written to disk as a run leaves it (run.log with colours, Ray prefixes and progress bars, event
files, exit facts) and read by the same functions that judge real runs. A second kind has several causes at once: then
only one thing is certain, that it is no Pass. Seeds make each attempt reproducible; ADVERSARY_ATTEMPTS sets how many.
"""

from __future__ import annotations

import json
import os
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from tasks import metrics
from tasks.reason import Reason, Verdict
from tasks.triage import read_log
from tasks.verdict import Decision, Evidence, Expectation, Origin, decide
from tests import event_log

if TYPE_CHECKING:
    from pathlib import Path

ATTEMPTS = int(os.environ.get("ADVERSARY_ATTEMPTS", "2000"))
CHUNK = 250  # attempts of one test
PASS, FAIL, BLOCKED, SKIPPED = Verdict.PASS, Verdict.FAIL, Verdict.BLOCKED, Verdict.SKIPPED

TMPE = "train/token_mult_prob_error"
STAGES = ("config", "workers", "ready", "setup", "training", "done", "end")

ENVIRONMENT = [
    "OSError: [Errno 28] No space left on device: '/hf/x'",
    "ModuleNotFoundError: No module named 'prettytable'",
    "AssertionError: flashinfer is not installed",
    "helpers.cpp:9:10: fatal error: pybind11/pybind11.h: No such file or directory",
    "ERROR: Unexpected bus error encountered in worker. insufficient shared memory (shm).",
    "RuntimeError: Found no NVIDIA driver on your system.",
    "huggingface_hub.errors.LocalEntryNotFoundError: Cannot find the requested files in the local cache",
]
INFRASTRUCTURE = [
    "ray.exceptions.NodeDiedError: Task failed due to the node dying",
    "(raylet) Task was killed due to the node running low on memory.",
    "RuntimeError: CUDA error: uncorrectable ECC error encountered",
    "srun: error: Unable to create step for job 7: Memory required by task is not available",
    "fatal: missing blob object 'deadbeef'",
    "ray.exceptions.ObjectStoreFullError: Failed to put object",
]
CONFIGURATION = [
    "OverridesError: Failed to parse Hydra overrides: Could not override 'grpo.max_stepz'.",
    "ValueError: World size (1) is insufficient for the parallelism configuration. Required minimum",
    "AssertionError: There is a known batch-variant accuracy issue with TP>=4 in policy",
]
CHANGE = [
    "ValueError: Shape mismatch for megatron param decoder.layers.0.mlp.linear_fc1.weight:",
    "ValueError: There is no module or parameter named 'model.foo' in Qwen2ForCausalLM",
    "KeyError: 'model.layers.0.self_attn.q_proj.weight'",
    "ValueError: Cannot determine parallelism type for module 'Foo' at weight 'x'",
    "ImportError: cannot import name 'Foo' from 'megatron.bridge.models' (/x/__init__.py)",
]
UNDECIDED = [
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
    "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.",
    "RuntimeError: CUDA error: an illegal memory access was encountered",
]
FOLLOWERS = [
    *INFRASTRUCTURE, *ENVIRONMENT, *CHANGE, *UNDECIDED,
    "torch.distributed.DistBackendError: [3] wait timeout after 600000ms, keys: /default_pg",
    "TimeoutError: worker (rank 0): ZMQ communication timeout after 120000ms in policy worker side.",
    "OSError: [Errno 98] Address already in use",
]  # fmt: skip
NOISE = [
    "loss: 0.3 reward 0.5",
    "/x/y.py:26: UserWarning: Apex is not installed. Falling back to Torch Norm",
    "INFO:x:y.py:3: ModuleNotFoundError: No module named 'apex'",
    "uuid=? | nvml_error: Failed to initialize NVML: NVML Shared Library Not Found",
    "Warning: Exception during strict loading: Error(s) in loading state_dict for GPTModel:",
    "the model says: Max number of steps has been reached",
    "repr=MegatronPolicyWorker[rank=0])",
    "Async GRPO training complete!",
    "\r 10%|#| 1/10\r 20%|##| 2/10",
    "Skipping aggregation for x",
    "",
]
CAUGHT = (
    "Import of FP8 from megatron.core failed with: Traceback (most recent call last):\n"
    '  File "/snap/bridge/src/megatron/bridge/utils/import_utils.py", line 324, in safe_import_from\n'
    "    return getattr(imported_module, symbol), True\n"
    "AttributeError: module 'megatron.core' has no attribute 'FP8'\n"
)


def bridge_traceback(rng: random.Random) -> str:
    """A Ray traceback through the Bridge, as the driver prints it."""
    error = rng.choice(
        ["TypeError: bad operand", "RuntimeError: shape [2, 3] is wrong", "AssertionError", "KeyError: 'q'"]
    )
    return (
        "Traceback (most recent call last):\n"
        '  File "/snap/nemo_rl/examples/run_grpo.py", line 258, in <module>\n    main()\n'
        "ray.exceptions.RayTaskError(X): \x1b[36mray::MegatronPolicyWorker.train()\x1b[39m (pid=7, ip=192.0.2.2)\n"
        '  File "/snap/nemo_rl/nemo_rl/models/megatron/setup.py", line 18, in setup\n    get_model(\n'
        f'  File "/snap/bridge/src/megatron/bridge/models/x.py", line {rng.randrange(1, 999)}, in convert\n    call()\n'
        f"{error}\n"
    )


@dataclass
class World:
    """One attempt before it is written. `at` is the stage it reaches, `reached` the last step that it logs."""

    steps: int
    truth: Verdict = PASS
    failure_class: str | None = None
    at: str = "end"
    reached: int = 0
    rc: int | None = 0
    reason: str = "exited"
    error: str = ""
    actor: str = "MegatronPolicyWorker"
    optional: bool = False
    probe: Verdict | None = PASS
    exit_written: bool = True
    origins: tuple[Origin, ...] = (
        Origin("megatron.bridge", "/snap/bridge/src/megatron/bridge/__init__.py", "w", expected=True),
    )
    conversion: str | None = None
    damage: Reason | None = None
    missing: tuple[str, ...] = ()
    tmpe: float = 1.001
    loss: tuple[float, ...] = ()
    tail: str = ""
    cut: int = 0
    events: bool = True
    forbidden: bool = False
    causes: list[str] = field(default_factory=list)


def dies(
    world: World, rng: random.Random, errors: list[str], truth: Verdict, failure_class: str, *, at: str = ""
) -> None:
    """End the run somewhere before its last step with one of the errors."""
    world.at = at or rng.choice(STAGES[:5])
    world.reached = rng.randrange(world.steps) if world.at == "training" else 0
    world.error = rng.choice(errors)
    world.rc, world.truth, world.failure_class = rng.choice([1, 1, 134, -6]), truth, failure_class


def cause_environment(world: World, rng: random.Random) -> None:
    dies(world, rng, ENVIRONMENT, BLOCKED, "environment")


def cause_infrastructure(world: World, rng: random.Random) -> None:
    dies(world, rng, INFRASTRUCTURE, BLOCKED, "infrastructure")
    if rng.random() < 0.3:
        world.rc, world.reason = None, rng.choice(["timeout", "silent"])


def cause_configuration(world: World, rng: random.Random) -> None:
    dies(world, rng, CONFIGURATION, BLOCKED, "configuration", at="config")


def cause_early_death_without_a_word(world: World, rng: random.Random) -> None:
    dies(world, rng, ["something odd"], BLOCKED, "environment", at="config")
    world.tail = "no followers"


def cause_change(world: World, rng: random.Random) -> None:
    dies(world, rng, CHANGE, FAIL, "change")


def cause_bridge_frame(world: World, rng: random.Random) -> None:
    dies(world, rng, [bridge_traceback(rng)], FAIL, "change")


def cause_refit(world: World, rng: random.Random) -> None:
    error = "\u274c Error: Updating weights for the generation policy failed during refit." + "\n." * 70
    dies(world, rng, [error], FAIL, "change", at="setup")


def cause_undecided(world: World, rng: random.Random) -> None:
    dies(world, rng, UNDECIDED, FAIL, "undecided", at="training")
    world.tail = "no followers"


def cause_silence_in_training(world: World, rng: random.Random) -> None:
    world.at, world.reached = "training", rng.randrange(world.steps)
    world.rc, world.reason, world.truth = None, rng.choice(["timeout", "silent"]), FAIL


def cause_early_end(world: World, rng: random.Random) -> None:
    world.at, world.reached = rng.choice(["training", "done", "end"]), rng.randrange(world.steps)
    world.truth, world.failure_class = FAIL, "early_end"


def cause_teardown(world: World, rng: random.Random) -> None:
    world.at, world.rc = rng.choice(["done", "end"]), rng.choice([1, 134, -6, -11])
    world.truth, world.failure_class = FAIL, "teardown"


def cause_hang(world: World, rng: random.Random) -> None:
    world.at, world.rc, world.reason = "done", None, rng.choice(["hang", "timeout", "silent"])
    world.truth, world.failure_class = FAIL, "hang"


def cause_skip(world: World, rng: random.Random) -> None:
    world.at, world.reached, world.events = "config", 0, False
    world.error = rng.choice(
        ["SKIP: needs two GPUs", "FAST: Skipping: x.sh", "[INFO] Target step 5 reached, skipping run"]
    )
    world.optional = rng.random() < 0.5
    world.truth, world.tail = SKIPPED if world.optional else BLOCKED, "no followers"


def cause_check(world: World, rng: random.Random) -> None:
    world.tmpe, world.truth = rng.choice([1.0501, 7.0, 0.0, 0.89, 1e30]), FAIL


def cause_non_finite(world: World, rng: random.Random) -> None:
    world.loss, world.truth = (rng.choice([float("nan"), float("inf"), float("-inf")]),), FAIL


def cause_no_real_work(world: World, rng: random.Random) -> None:
    world.loss, world.truth = (0.0,) * world.steps, FAIL


def cause_no_events(world: World, rng: random.Random) -> None:
    world.events, world.truth = False, FAIL


def cause_cut_events(world: World, rng: random.Random) -> None:
    world.cut, world.truth = rng.randrange(1, 60), FAIL


def cause_other_backend(world: World, rng: random.Random) -> None:
    world.actor, world.truth = rng.choice(["DTensorPolicyWorker", "MegatronValueWorker", "Foo"]), FAIL


def cause_old_conversion(world: World, rng: random.Random) -> None:
    world.conversion, world.truth = "Checkpoint already exists at /cache/q. Skipping import.", FAIL


def cause_other_tree(world: World, rng: random.Random) -> None:
    other = Origin("megatron.bridge", "/opt/vendored/megatron/bridge/__init__.py", "worker", expected=False)
    world.origins = rng.choice([(), (other,), (*world.origins, other)])
    world.truth = FAIL


def cause_forbidden_line(world: World, rng: random.Random) -> None:
    world.forbidden, world.truth = True, FAIL


def cause_missing_file(world: World, rng: random.Random) -> None:
    world.missing, world.truth = ("results/step_*/config.yaml",), FAIL


def cause_stopped(world: World, rng: random.Random) -> None:
    world.at, world.rc = rng.choice(STAGES), rng.choice([None, -15, 143, 0])
    world.reason = rng.choice(["terminated", "runner_gone", "spawn_failed", "stopped", "engine_lost", "oom"])
    world.reached = rng.randrange(world.steps + 1) if world.at in STAGES[4:] else 0
    world.truth = BLOCKED


def cause_no_exit(world: World, rng: random.Random) -> None:
    world.exit_written, world.truth = False, BLOCKED


def cause_no_probe(world: World, rng: random.Random) -> None:
    world.probe, world.truth = rng.choice([None, FAIL, BLOCKED, SKIPPED]), BLOCKED


def cause_damage(world: World, rng: random.Random) -> None:
    world.damage, world.truth = Reason("snapshot", "bridge", "changed while it ran"), BLOCKED


CAUSES = {name.removeprefix("cause_"): value for name, value in list(globals().items()) if name.startswith("cause_")}


def prefix(rng: random.Random, actor: str) -> str:
    rank = f"[rank={rng.randrange(8)}]" if rng.random() < 0.5 else ""
    address = ", ip=192.0.2.3" if rng.random() < 0.3 else ""
    text = f"({actor}{rank} pid={rng.randrange(2, 9999)}{address})"
    return f"\x1b[36m{text}\x1b[0m " if rng.random() < 0.7 else f"{text} "


def decorated(rng: random.Random, error: str) -> list[str]:
    """An error as one rank or several print it."""
    if "\n" in error or error.startswith(("SKIP", "FAST", "[INFO]", "(raylet)")):
        return [error]
    lines = [(prefix(rng, "Worker") if rng.random() < 0.6 else "") + error for _ in range(rng.choice([1, 1, 1, 4]))]
    if rng.random() < 0.2:
        lines.append(f"(Worker pid=9) {error} [repeated 7x across cluster]")
    return [line + rng.choice(["", "", "\r", "\x1b[0m"]) for line in lines]


def write_log(world: World, rng: random.Random, path: Path) -> None:
    """Write the log of a run that reaches `world.at`: noise, banners, the error, and what follows it."""
    lines: list[str] = []
    last = STAGES.index(world.at)

    def noise() -> None:
        for _ in range(rng.choice([0, 0, 1, 3])):
            text = rng.choice(NOISE)
            lines.append((prefix(rng, rng.choice(["MathEnvironment", "Other"])) if rng.random() < 0.3 else "") + text)
        if rng.random() < 0.1:
            lines.append(CAUGHT)

    noise()
    if last >= 1:
        lines.append("\rInitializing lm_policy workers:   0%| | 0/1\rInitializing lm_policy workers: 100%|#| 1/1")
        lines.append(prefix(rng, world.actor) + "Using default megatron checkpoint dir: /c")
        if world.conversion:
            lines.append(prefix(rng, world.actor) + world.conversion)
        if last >= 2 and rng.random() < 0.3:  # retried and overcome
            lines += ["429 Too Many Requests: retrying", "HTTP Error 429 thrown while requesting GET https://x"]
    noise()
    if last >= 2:
        lines.append("  \u2713 1 workers initialized in 3.10s")
    noise()
    if last >= 3:
        lines.append("                  SETUP COMPLETE")
    noise()
    for number in range(1, world.reached + 1):
        lines.append(f"{'=' * 25} Step {number}/{world.steps} {'=' * 25}")
        noise()
    if world.forbidden:
        lines.append("the loss went wild")
    if last >= 5:
        lines.append("Max number of steps has been reached, stopping training early")
    if last >= 6:
        lines.append("Shutting down environment...")
    if world.error:
        lines += decorated(rng, world.error)
    failed = world.rc != 0 or world.reason != "exited" or not world.exit_written
    if failed and world.tail != "no followers" and rng.random() < 0.5 and (world.error or last >= 5):
        for error in rng.sample(FOLLOWERS, rng.randrange(1, 4)):
            lines += ["." for _ in range(rng.choice([0, 3]))] + decorated(rng, error)
    path.write_bytes(("\n".join(lines) + rng.choice(["", "\n"])).encode())


def write_events(world: World, rng: random.Random, home: Path) -> None:
    """Write event files: one, or two of which the second has the validation only; other tags count seconds."""
    if not world.events:
        return
    records = []
    for number in range(1, world.reached + 1):
        loss = world.loss[min(number, len(world.loss)) - 1] if world.loss else 0.5 / number
        records.append(event_log.scalars({"train/loss": loss, TMPE: world.tmpe}, number))
    folder = home / "exp_001" / "tensorboard"
    path = event_log.write(folder / "events.out.tfevents.1.h.1.0", records)
    if world.cut:
        path.write_bytes(path.read_bytes()[: -world.cut])
    if rng.random() < 0.5:
        event_log.write(
            folder / "events.out.tfevents.2.h.1.1", [event_log.scalar("ray/gpu", second, 1.0) for second in (1, 30)]
        )


def judged(world: World, rng: random.Random, folder: Path) -> Decision:
    """Write the attempt, read it as a real one, decide."""
    folder.mkdir()
    write_log(world, rng, folder / "run.log")
    write_events(world, rng, folder / "logs")
    merged = metrics.merge(folder / "logs")
    ask = Expectation(
        steps=world.steps, checks=(f'max(data["{TMPE}"]) < 1.05', f'min(data["{TMPE}"]) > 0.9'), real_work=("train/loss",),
        expect_log=("SETUP COMPLETE",), forbid_log=("went wild",), files=("results/*",), optional=world.optional,
    )  # fmt: skip
    log = read_log(
        folder / "run.log", expect=ask.expect_log, forbid=ask.forbid_log, path_map={"/snap/bridge": "/home/me/bridge"}
    )
    evidence = Evidence(
        exit={"rc": world.rc, "reason": world.reason} if world.exit_written else None,
        facts=log,
        series=json.loads(metrics.to_json(merged)),
        event_files=merged.files,
        missing_files=world.missing,
        origins=world.origins,
        probe=world.probe,
        damage=world.damage,
        foreign_conversion=log.import_lines[0] if log.import_lines else None,
    )
    return decide(ask, evidence)


def imagine(rng: random.Random) -> World:
    """Draw an attempt: mostly one cause, sometimes none, sometimes several."""
    steps = rng.randrange(1, 6)
    world = World(steps=steps, reached=steps)
    kind = rng.random()
    names = [] if kind < 0.15 else rng.sample(sorted(CAUSES), 1 if kind < 0.8 else rng.randrange(2, 4))
    for name in names:
        CAUSES[name](world, rng)
        world.causes.append(name)
    return world


@pytest.mark.slow
@pytest.mark.parametrize("start", range(0, ATTEMPTS, CHUNK))
def test_verdict_is_the_one_known_by_construction(tmp_path: Path, start: int) -> None:
    for seed in range(start, min(start + CHUNK, ATTEMPTS)):
        rng = random.Random(seed)  # noqa: S311 - reproducible, not secret
        world = imagine(rng)
        decision = judged(world, rng, tmp_path / str(seed))
        said = f"seed {seed}: {world}\n{decision}\n{(tmp_path / str(seed) / 'run.log').read_text(errors='replace')}"
        assert (decision.verdict is PASS) == (not world.causes), said
        if len(world.causes) > 1:
            continue
        assert decision.verdict is world.truth, said
        if world.failure_class is not None:
            assert decision.failure_class == world.failure_class, said
        if world.causes == ["bridge_frame"]:
            frames = [r.subject for r in decision.reasons if r.kind == "bridge_frame"]
            assert frames == ["/home/me/bridge/src/megatron/bridge/models/x.py"], said
        assert (decision.verdict is PASS) == (not decision.reasons), said


@pytest.mark.parametrize("name", sorted(CAUSES))
def test_each_cause_alone_without_noise(tmp_path: Path, name: str) -> None:
    for seed in range(8):
        rng = random.Random(seed)  # noqa: S311 - reproducible, not secret
        world = World(steps=2, reached=2)
        CAUSES[name](world, rng)
        assert judged(world, rng, tmp_path / str(seed)).verdict is world.truth, (name, seed)
