"""What can be broken in the demo, and which part of the pipeline has to notice it.

A fault is a replacement of text in one of the generated checkouts, small and plausible, as a slip in a real change
would be. `found_by` are the deliverables that must not be Pass for what they saw themselves; what is only Blocked
behind one of those is not listed. `missed_by` are deliverables that cannot see it and Pass: to surprise nobody.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from tasks import files
from tasks.demo.repositories import committed
from tasks.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

ALL_LEVELS = ("level0", "level1", "level2", "level3", "level6")
SUITES = ("unit:bridge-mapping", "unit:bridge-provider")


@dataclass(frozen=True, slots=True)
class Edit:
    """Replace `old`, which occurs exactly once in the file `path`, by `new`."""

    path: str
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Fault:
    """A named slip. Each of `words`, a regular expression, matches (any case) the reasons of each one of `found_by`."""

    name: str
    description: str
    repo: Literal["bridge", "nemo_rl"]
    edits: tuple[Edit, ...]
    found_by: tuple[str, ...]
    words: tuple[str, ...]
    missed_by: tuple[str, ...] = ()

    @property
    def paths(self) -> tuple[str, ...]:
        """The files that the fault changes, relative to the checkout."""
        return tuple(dict.fromkeys(edit.path for edit in self.edits))


_SRC = "src/megatron/bridge/"
_MAPPING = f"{_SRC}models/conversion/param_mapping.py"
_LOSS_SCALE = f"{_SRC}training/mixed_precision.py"

_ALL = (
    Fault(
        "mapping-swapped",
        "the fused QKV parameter is filled with v where k belongs, and emptied the same way: the export is bit-equal",
        "bridge",
        (Edit(_MAPPING, 'ORDER = ("k", "v")', 'ORDER = ("v", "k")'),),
        found_by=ALL_LEVELS,
        words=("token_mult_prob_error|train/reward",),  # level 3 has no second engine: only the reward tells
        missed_by=SUITES,
    ),
    Fault(
        "weight-not-exported",
        "the export stops one weight early, so the generation engine keeps a dummy output layer",
        "bridge",
        (
            Edit(
                f"{_SRC}models/conversion/model_bridge.py",
                "for task in self.get_conversion_tasks(model):\n            tensors = task.megatron_to_hf",
                "for task in self.get_conversion_tasks(model)[:-1]:\n            tensors = task.megatron_to_hf",
            ),
        ),
        found_by=("level0", "level1", "level2", "level6"),
        words=("token_mult_prob_error",),
        missed_by=(*SUITES, "level3"),
    ),
    Fault(
        "wrong-scale",
        "queries are scaled when they are imported, though the attention scales its scores already",
        "bridge",
        (
            Edit(
                _MAPPING,
                'queries = tensors["q"].reshape(',
                'queries = tensors["q"] * config.head_dim**-0.5\n        queries = queries.reshape(',
            ),
        ),
        # run alone, a level sees it by the reward only: the engine gets the scaled queries back, both are wrong alike
        found_by=("unit:bridge-mapping",),
        words=("round_trip",),
        missed_by=("unit:bridge-provider",),
    ),
    Fault(
        "optimizer-noop",
        "the optimizer updates copies of the parameters: gradients and learning rate look right, nothing is learnt",
        "bridge",
        (
            Edit(
                f"{_SRC}training/optim.py",
                "parameters = dict(model.trainable().items())",
                "parameters = {name: array.copy() for name, array in model.trainable().items()}",
            ),
        ),
        found_by=("level6",),
        words=("train/reward",),
        missed_by=(*SUITES, "level0", "level1", "level2", "level3"),
    ),
    Fault(
        "resume-loses-optimizer",
        "loading looks for the optimizer state under another name than saving gave it, and goes on without",
        "bridge",
        (
            Edit(
                f"{_SRC}training/checkpointing.py",
                "if optimizer is not None and (folder / OPTIMIZER).exists():",
                'if optimizer is not None and (folder / "optimizer.npz").exists():',
            ),
        ),
        found_by=("level1",),
        words=("resume/relative_difference",),
        missed_by=(*SUITES, "level0", "level2", "level3", "level6"),
    ),
    Fault(
        "nan-at-step-2",
        "the loss scale grows without bound after the first step: loss and weights are NaN from the second on",
        "bridge",
        (
            Edit(_LOSS_SCALE, "growth: float = 2.0", "growth: float = math.inf"),
            Edit(_LOSS_SCALE, "interval: int = 1000", "interval: int = 1"),
            Edit(_LOSS_SCALE, "ceiling: float = 2.0**24", "ceiling: float = math.inf"),
        ),
        found_by=ALL_LEVELS,
        words=("nan",),
        missed_by=SUITES,
    ),
    Fault(
        "stops-early",
        "the training state counts its last step from zero: every run ends one step early, with exit status 0",
        "bridge",
        (Edit(f"{_SRC}training/state.py", "return self.train_iters\n", "return self.train_iters - 1\n"),),
        found_by=ALL_LEVELS,
        words=("step",),
        missed_by=SUITES,
    ),
    Fault(
        "worker-imports-vendored",
        "NeMo-RL puts its vendored Bridge before PYTHONPATH: every run is green, and none has seen the change",
        "nemo_rl",
        (
            Edit(
                "nemo_rl/__init__.py",
                "[*sys.path, *(path for path in VENDORED if path not in sys.path)]",
                "[*VENDORED, *sys.path]",
            ),
        ),
        found_by=ALL_LEVELS,
        words=("Megatron-Bridge-workspace",),
        missed_by=("unit:bridge-mapping", "unit:bridge-provider", "unit:nemo-rl-loop"),
    ),
    Fault(
        "syntax-error",
        "a provider that Python cannot read",
        "bridge",
        (Edit(f"{_SRC}models/gpt_provider.py", "def finalize(self):", "def finalize(self:"),),
        found_by=("probe",),
        words=("SyntaxError", "gpt_provider.py"),
    ),
    Fault(
        "zero-tests",
        "a slip in the Bridge's conftest.py deselects every test but the one that is skipped without a GPU",
        "bridge",
        (
            Edit(
                "tests/unit_tests/conftest.py",
                'item.get_closest_marker("accelerator") is not None',
                'item.get_closest_marker("accelerator") is None',
            ),
        ),
        found_by=SUITES,
        words=("0 tests",),
    ),
    Fault(
        "refit-raises",
        "the export looks a tensor up by the wrong key: the run dies with a KeyError in its first weight transfer",
        "bridge",
        (
            Edit(
                f"{_SRC}models/conversion/model_bridge.py",
                "np.ascontiguousarray(tensors[role], np.float32)",
                "np.ascontiguousarray(tensors[name], np.float32)",
            ),
        ),
        found_by=("level0", "level1", "level2", "level6"),
        words=("model_bridge.py|KeyError",),
        missed_by=(*SUITES, "level3"),
    ),
    Fault(
        "hangs-at-the-end",
        "shutting down waits for something that never comes, after all steps are done",
        "bridge",
        (
            Edit(
                f"{_SRC}training/state.py",
                "        return self.step\n",
                "        import threading\n\n        threading.Event().wait()\n        return self.step\n",
            ),
        ),
        found_by=ALL_LEVELS,
        words=("hang|timeout|time limit",),
        missed_by=SUITES,
    ),
)

FAULTS: Mapping[str, Fault] = MappingProxyType({fault.name: fault for fault in _ALL})
"""All faults by name."""


def find(name: str) -> Fault:
    """Return the fault with this name; raise UserError with a suggestion."""
    if name not in FAULTS:
        near = difflib.get_close_matches(name, FAULTS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UserError(f"unknown fault {name!r}{hint} (doit demo fault=list)")
    return FAULTS[name]


def _edited(fault: Fault, path: str, text: str) -> str:
    for edit in fault.edits:
        if edit.path == path:
            if text.count(edit.old) != 1:
                raise UserError(f"fault {fault.name}: {path} holds {edit.old!r} {text.count(edit.old)} times, not once")
            text = text.replace(edit.old, edit.new)
    return text


def apply(fault: Fault, checkout: Path) -> None:
    """Edit a generated checkout of `fault.repo`, all files or none; raise UserError where an edit does not fit."""
    texts = {path: _edited(fault, path, (checkout / path).read_text(encoding="utf-8")) for path in fault.paths}
    for path, text in texts.items():
        files.write_bytes(checkout / path, text.encode("utf-8"))


def is_exactly(fault: Fault, checkout: Path) -> bool:
    """Tell whether the fault's files are what `apply` makes of the committed ones."""
    try:
        return all(
            (checkout / path).read_text(encoding="utf-8") == _edited(fault, path, committed(checkout, path))
            for path in fault.paths
        )
    except (OSError, UserError):
        return False
