"""Loaded by every interpreter that has this folder on its path: driver, Ray workers, actors.

Python imports `sitecustomize` at start-up, before any code of NeMo-RL, so the same unmodified sources can be run on a
machine without a GPU. What is done depends on E2E_CPU alone, and nothing at all is done without it:

    E2E_CPU=import   only what importing takes (unit suites, probes): names of newer Pythons, transformer_engine's names
    E2E_CPU=run      also what running takes: cuda -> cpu, nccl -> gloo, plain layers in Megatron-Core's GPT spec

Each patch waits for the module it changes (`e2e_cpu.after_import`); an interpreter without torch pays nothing.
"""

import os

_mode = os.environ.get("E2E_CPU", "")
if _mode:
    import e2e_cpu

    e2e_cpu.install(_mode)
