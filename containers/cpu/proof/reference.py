"""The reference: untouched transformers makes each tiny model, and what it computes is kept.

KEPT/FAMILY/model and reference.pt; complete.json, written last, holds their hashes and how to make them (`recipe`).
Patches of torch.cuda once left garbage in a rotary table: nothing of ours is loaded here, and the table is compared
with its definition where the family has the plain one.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

from proof.compare import difference
from proof.families import BATCH, LENGTH, RECIPES, ROTARY_BASE, SIZES, VOCABULARY


def make_model(family: str) -> Any:
    """Return the seeded tiny model of `family` in float32; AttributeError where transformers does not have it."""
    import torch
    import transformers

    config, model, own = RECIPES[family]
    torch.manual_seed(0)
    made = getattr(transformers, model)(getattr(transformers, config)(**{**SIZES, **own})).float()
    source = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in made.named_parameters():
            noise = torch.randn(weight.shape, generator=source)
            if weight.ndim == 1:
                weight.copy_((0.0 if name.endswith("bias") else 1.0) + 0.3 * noise)
            elif "embed" in name:
                weight.copy_(noise)
            else:
                weight.copy_(noise * 1.5 / weight.shape[-1] ** 0.5)
        for name, state in made.named_buffers():
            if name.endswith("e_score_correction_bias"):  # chooses experts; zero would hide that it is lost
                state.copy_(0.1 * torch.randn(state.shape, generator=source))
    return made


def tokens() -> tuple[Any, Any]:
    """Return input ids and labels, both (BATCH, LENGTH), seeded."""
    import torch

    source = torch.Generator().manual_seed(2)
    ids = torch.randint(3, VOCABULARY, (BATCH, LENGTH + 1), generator=source)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def loss_of(logits: Any, labels: Any) -> Any:
    """Return the mean cross entropy of `logits` (batch, length, vocabulary)."""
    import torch

    return torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))


def rotary_apart(family: str, model: Any) -> float:
    """Return how far the reference's rotary table is from its definition; 0 where the family has another one."""
    import torch

    rotary = getattr(getattr(model.model, "rotary_emb", None), "inv_freq", None)
    sizes = {**SIZES, **RECIPES[family][2]}
    if rotary is None or sizes["rope_parameters"] != SIZES["rope_parameters"]:
        return 0.0
    size = sizes.get("head_dim", sizes["hidden_size"] // sizes["num_attention_heads"])
    defined = ROTARY_BASE ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    return difference(rotary.double(), defined)


def keep(family: str, folder: Path) -> None:
    """Write model and reference.pt of one family below `folder`."""
    import torch
    import transformers

    make_model(family).save_pretrained(folder / "model")
    # loaded again, as a user loads it: the rotary table comes from from_pretrained
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "model", dtype=torch.float32, attn_implementation="eager"
    ).eval()
    ids, labels = tokens()
    logits = model(ids).logits
    loss = loss_of(logits, labels)
    loss.backward()
    with torch.no_grad():  # saved as weights are, so that gradients have the names and shapes of the checkpoint
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    model.save_pretrained(folder / "gradients")
    kept = {
        "rotary": rotary_apart(family, model),
        "logits": logits.detach(),
        "loss": loss.item(),
    }
    torch.save(kept, folder / "reference.pt")


def recipe() -> str:
    """Return what the kept references follow from: this code, the interpreter, and its environment."""
    here = Path(__file__).parent
    code = [hashlib.sha256((here / name).read_bytes()).hexdigest() for name in ("reference.py", "families.py")]
    return json.dumps([*code, sys.version, sys.prefix])


def is_kept(folder: Path) -> bool:
    """Return whether `folder` holds a complete reference of this very recipe, every file as it was written."""
    try:
        marker = json.loads((folder / "complete.json").read_text())
        return bool(marker["recipe"] == recipe()) and marker["files"] == _hashes(folder)
    except (OSError, ValueError, KeyError):
        return False


def _hashes(folder: Path) -> dict[str, str]:
    return {
        os.fspath(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "complete.json"
    }


def make(kept: Path, families: list[str]) -> None:
    """Make the references of `families`; what was raised is left in KEPT/FAMILY.problem."""
    import torch

    touched = sorted(name for name in sys.modules if name.partition(".")[0] in ("e2e_cpu", "megatron"))
    if touched:
        msg = f"the reference process has loaded {touched[0]}"
        raise RuntimeError(msg)
    torch.set_num_threads(1)
    for family in families:
        making, place = kept / f"{family}.{os.getpid()}", kept / family
        shutil.rmtree(making, ignore_errors=True)
        making.mkdir(parents=True)
        try:
            keep(family, making)
        except Exception as error:  # noqa: BLE001 - a family that transformers cannot make is a finding
            traceback.print_exc()
            (kept / f"{family}.problem").write_text(f"{type(error).__name__}: {error}")
            shutil.rmtree(making)
            continue
        (making / "complete.json").write_text(json.dumps({"recipe": recipe(), "files": _hashes(making)}))
        shutil.rmtree(place, ignore_errors=True)
        making.rename(place)


def start(kept: Path, families: list[str]) -> subprocess.Popen[bytes]:
    """Start the reference process, without our stand-ins and without Bridge and Core."""
    hidden = ("PYTHONPATH", "E2E_CPU", "PYTHONHOME", "PYTHONSTARTUP")
    env = {name: value for name, value in os.environ.items() if name not in hidden}
    for family in families:
        (kept / f"{family}.problem").unlink(missing_ok=True)
    program = os.fspath(Path(__file__).parent)
    return subprocess.Popen([sys.executable, program, "--reference", os.fspath(kept), *families], env=env)
