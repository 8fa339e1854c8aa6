"""Measure what Megatron-Bridge makes of model families, without a GPU: `python proof OUT KEPT FAMILY...`.

One process imports Bridge and Core once and forks a child for each section of each family (sections.py), so that no
section sees another's state; ranks of TP, PP and EP are forks, too. Beside it a **reference** process, started without
PYTHONPATH and E2E_CPU (transformers and torch as installed), makes the tiny models and keeps logits, loss and
gradients below KEPT, where the next run finds them: they do not depend on Bridge or Core. No Hugging Face code
computes on the Megatron side.

OUT/FAMILY.json: {"schema", "family", "origins": {module: file}, "checks": [{"name", "value", "text"}],
"problems": [...], "files": {file: "executed" | "imported"}, "seconds"}; OUT/untried.json: the architectures that the
Bridge registers and no recipe makes. Only values; what is good enough is decided by tasks/proof.py. A problem is
{"section", "stage", "type", "text", "missing": package or None, "frames": [[file, line, function]]}, outermost frame
first. A number that is not finite is written as a string.
"""
