"""Measure what Megatron-Bridge makes of one model family, without a GPU: `python proof.py FAMILY RESULT`.

Two processes. The **reference** is this file started again without PYTHONPATH and E2E_CPU, so transformers and torch
are as installed (patches of torch.cuda once left garbage in a rotary table; the table is compared with its definition):
it makes the tiny model, saves it and keeps logits, loss and gradients. The **Megatron side** runs under the CPU
stand-ins with Bridge and Core on PYTHONPATH: AutoBridge imports the checkpoint, a provider builds the model, and the
export, the logits, and loss and gradients of one training step are compared. No Hugging Face code computes here.

RESULT: {"schema", "family", "origins": {module: file}, "checks": [{"name", "value", "text"}], "seconds", "problem"}.
Only values; what is good enough is decided by tasks/proof.py. "problem" is None or {"stage", "type", "text",
"missing": package or None, "frames": [[file, line, function]]}, outermost frame first. A number that is not finite is
written as a string.

The sizes are awkward (no two equal, vocabulary not a multiple of Core's padding, rotary base and epsilon no defaults)
and the scale is large, about 1.5/sqrt(fan in): with small weights swapped gate and up differ by 2e-5 and go unseen.
Gradients are exported by the Bridge itself, from a model whose weights were replaced by them: export only cuts and
renames, and so an export that copied the checkpoint would be seen. The loss is cross entropy over the true vocabulary.
Not measured: tied embeddings, sliding windows shorter than the sequence, scaled rotary embeddings, LoRA, parallelism,
saving, Transformer Engine itself, bf16.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

SCHEMA = 1
BATCH, LENGTH, LAYERS, VOCABULARY = 2, 23, 3, 331
ROTARY_BASE = 50021.0
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 72,
    "intermediate_size": 100,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 192,
    "rms_norm_eps": 3e-3,  # large enough that a provider which drops it is seen
    "rope_parameters": {"rope_type": "default", "rope_theta": ROTARY_BASE},
    "tie_word_embeddings": False,
}
# family -> (configuration class, model class, sizes of its own); a head size of 20 makes heads wider than hidden
RECIPES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 20}),
    "llama": ("LlamaConfig", "LlamaForCausalLM", {"head_dim": 20}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"head_dim": 20}),
}


# the reference: untouched transformers -------------------------------------------------------------------------------


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
    return made


def tokens() -> tuple[Any, Any]:
    """Return input ids and labels, both (BATCH, LENGTH), seeded."""
    import torch

    source = torch.Generator().manual_seed(2)
    ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=source)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def loss_of(logits: Any, labels: Any) -> Any:
    """Return the mean cross entropy of `logits` (batch, length, vocabulary)."""
    import torch

    return torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))


def reference(family: str, folder: Path) -> None:
    """Write the model below `folder`/model and what it computes to `folder`/reference.pt."""
    import torch
    import transformers

    touched = sorted(name for name in sys.modules if name.partition(".")[0] in ("e2e_cpu", "megatron"))
    if touched:
        msg = f"the reference process has loaded {touched[0]}"
        raise RuntimeError(msg)
    torch.set_num_threads(1)
    made = make_model(family)
    made.save_pretrained(folder / "model")
    # loaded again, as a user loads it: the rotary table comes from from_pretrained
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    rotary = model.model.rotary_emb.inv_freq
    size = SIZES["hidden_size"] // SIZES["num_attention_heads"]
    size = RECIPES[family][2].get("head_dim", size)
    defined = ROTARY_BASE ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    ids, labels = tokens()
    logits = model(ids).logits
    loss = loss_of(logits, labels)
    loss.backward()
    kept = {
        "rotary": difference(rotary.double(), defined),
        "logits": logits.detach(),
        "loss": loss.item(),
        "gradients": {name: p.grad for name, p in model.named_parameters()},
    }
    torch.save(kept, folder / "reference.pt")


def start_reference(family: str, folder: Path) -> subprocess.Popen[bytes]:
    """Start the reference process, without our stand-ins and without Bridge and Core."""
    hidden = ("PYTHONPATH", "E2E_CPU", "PYTHONHOME", "PYTHONSTARTUP")
    env = {name: value for name, value in os.environ.items() if name not in hidden}
    return subprocess.Popen([sys.executable, __file__, "--reference", family, os.fspath(folder)], env=env)


# the Megatron side ---------------------------------------------------------------------------------------------------


def build(model: Path) -> tuple[Any, list[Any]]:
    """Return the AutoBridge of the checkpoint `model` and the Megatron model that it filled, in float32."""
    import torch
    from megatron.bridge import AutoBridge
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    bridge = AutoBridge.from_hf_pretrained(os.fspath(model), trust_remote_code=False, dtype=torch.float32)
    provider = bridge.to_megatron_provider(load_weights=True)
    provider.use_cpu_initialization = True
    provider.perform_initialization = False
    provider.bf16 = provider.fp16 = False
    provider.params_dtype = provider.autocast_dtype = torch.float32
    # kernels of CUDA and Apex; none changes what is computed
    provider.persist_layer_norm = False
    for fusion in ("gradient_accumulation", "masked_softmax", "bias_dropout", "bias_activation"):
        setattr(provider, f"{fusion}_fusion", False)
    provider.apply_rope_fusion = False
    provider.finalize()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(0, force_reset_rng=True)
    return bridge, provider.provide_distributed_model(
        wrap_with_ddp=False, use_cpu_initialization=True, bf16=False, fp16=False
    )


def exported(bridge: Any, model: list[Any]) -> dict[str, Any]:
    """Return a copy of every tensor that the Bridge exports, by Hugging Face name."""
    return {
        name: weight.detach().clone() for name, weight in bridge.export_hf_weights(model, cpu=True, show_progress=False)
    }


def measure(bridge: Any, model: list[Any], kept: dict[str, Any], checkpoint: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the checks, in order; `kept` is the reference's, `checkpoint` the tensors of the saved model."""
    import torch

    weights = exported(bridge, model)
    missing = sorted(set(checkpoint) - set(weights))
    extra = sorted(set(weights) - set(checkpoint))
    unequal = {
        name: difference(weights[name], checkpoint[name])
        for name in sorted(set(weights) & set(checkpoint))
        if weights[name].dtype != checkpoint[name].dtype or not torch.equal(weights[name], checkpoint[name])
    }
    worst = max(unequal, key=lambda name: _order(unequal[name]), default=None)
    text = f"{len(weights)} tensors exported, {len(unequal)} differ"
    checks = [
        check("rotary table", kept["rotary"], "inv_freq of the reference against its definition"),
        check("export missing", len(missing), _names("not exported", missing)),
        check("export extra", len(extra), _names("exported, not in the checkpoint", extra)),
        check("export unequal", len(unequal), text if worst is None else f"{text}, worst {worst} by {unequal[worst]}"),
    ]
    ids, labels = tokens()
    positions = torch.arange(LENGTH)[None].expand(BATCH, -1)
    model[0].train()  # dropout that the family does not have would be seen
    whole = model[0](input_ids=ids, position_ids=positions, attention_mask=None)
    logits = whole[..., :VOCABULARY]
    apart, scale = difference(logits.detach(), kept["logits"]), kept["logits"].abs().max().item()
    checks.append(check("logits", _ratio(apart, scale), f"largest difference {apart:.3g} of {scale:.3g}"))
    loss = loss_of(logits, labels)
    here, there = loss.item(), kept["loss"]
    checks.append(check("loss", _ratio(abs(here - there), abs(there)), f"{here:.6f}, reference {there:.6f}"))
    loss.backward()
    with torch.no_grad():
        for parameter in model[0].parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    found, expected = exported(bridge, model), kept["gradients"]
    apart_by = {
        name: _ratio(difference(found[name], value), value.abs().max().item()) if name in found else math.inf
        for name, value in expected.items()
    }
    worst = max(apart_by, key=lambda name: _order(apart_by[name]))
    checks.append(check("gradients", apart_by[worst], f"{len(apart_by)} gradients, worst {worst}"))
    return checks


def difference(one: Any, other: Any) -> float:
    """Return the largest difference of two tensors; infinite where the shapes differ, NaN where a NaN is."""
    if one.shape != other.shape:
        return math.inf
    found: float = (one.double() - other.double()).abs().max().item()
    return found


def _order(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _ratio(apart: float, scale: float) -> float:
    """Return `apart` / `scale`; NaN for a scale that is no yardstick."""
    return apart / scale if scale > 0 and math.isfinite(scale) else math.nan


def _names(what: str, names: list[str]) -> str:
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"{what}: {shown or 'none'}"


def check(name: str, value: float, text: str) -> dict[str, Any]:
    """Return one measured value as RESULT carries it."""
    return {"name": name, "value": value if math.isfinite(value) else str(value), "text": text}


# one run -------------------------------------------------------------------------------------------------------------


def problem(stage: str, error: BaseException) -> dict[str, Any]:
    """Return what `error` says and where it was raised, its first cause first in the chain."""
    root = error
    while (cause := root.__cause__ or (None if root.__suppress_context__ else root.__context__)) is not None:
        root = cause
    frames = [[f.filename, f.lineno, f.name] for f in traceback.extract_tb(root.__traceback__)]
    if root is not error:  # who called what failed
        frames = [[f.filename, f.lineno, f.name] for f in traceback.extract_tb(error.__traceback__)] + frames
    missing = root.name if isinstance(root, ImportError) else None
    return {
        "stage": stage, "type": type(root).__name__, "text": str(root)[:2000], "missing": missing, "frames": frames,
    }  # fmt: skip


def prove(family: str, folder: Path, result: dict[str, Any]) -> None:
    """Fill `result`; an exception of any stage is kept in it, with its traceback in the log."""
    started = time.monotonic()
    stage, beside = "reference", None
    try:
        if family not in RECIPES:
            msg = f"no tiny model is known for {family!r}"
            raise LookupError(msg)  # noqa: TRY301 - kept like every other
        beside = start_reference(family, folder)
        stage = "import"
        import megatron.bridge
        import megatron.core
        import torch

        torch.set_num_threads(1)
        result["origins"] = {m.__name__: m.__file__ for m in (megatron.bridge, megatron.core)}
        result["seconds"]["import"] = round(time.monotonic() - started, 1)
        stage = "reference"
        if code := beside.wait():
            msg = f"the reference process ended with {code}"
            raise RuntimeError(msg)  # noqa: TRY301 - kept like every other
        from safetensors.torch import load_file

        kept = torch.load(folder / "reference.pt", weights_only=True)
        checkpoint: dict[str, Any] = {}
        for path in (folder / "model").glob("*.safetensors"):
            checkpoint.update(load_file(path))
        stage = "build"
        bridge, model = build(folder / "model")
        stage = "measure"
        result["checks"] = measure(bridge, model, kept, checkpoint)
    except Exception as error:  # noqa: BLE001 - whatever was raised is the finding, and judged elsewhere
        traceback.print_exc()
        result["problem"] = problem(stage, error)
    finally:
        if beside is not None and beside.poll() is None:
            beside.kill()
            beside.wait()
    result["seconds"]["all"] = round(time.monotonic() - started, 1)


def main(family: str, target: Path) -> int:
    """Prove `family`, write the answer to `target`; return 1 where something was raised."""
    result: dict[str, Any] = {
        "schema": SCHEMA, "family": family, "origins": {}, "checks": [], "seconds": {}, "problem": None,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        prove(family, Path(folder), result)
    for found in result["checks"]:
        print(f"{family}: {found['name']}: {found['value']} ({found['text']})", flush=True)
    making = target.with_name(f"{target.name}.new")
    making.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    making.rename(target)
    return 1 if result["problem"] else 0


if __name__ == "__main__":
    if sys.argv[1] == "--reference":
        reference(sys.argv[2], Path(sys.argv[3]))
    else:
        sys.exit(main(sys.argv[1], Path(sys.argv[2])))
