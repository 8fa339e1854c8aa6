"""Checkpoints of a run: trainable weights, optimizer state, step. A folder appears whole or not at all."""

import json
import os
import shutil
from pathlib import Path

import numpy as np

WEIGHTS, OPTIMIZER, STATE = "weights/model.npz", "optimizer/state.npz", "train_state.json"


def save_checkpoint(folder, model, optimizer=None, state=None):
    """Write `folder` by way of `<folder>.saving`; an older folder of that name is replaced."""
    folder = Path(folder)
    partial = folder.with_name(folder.name + ".saving")
    shutil.rmtree(partial, ignore_errors=True)
    (partial / "weights").mkdir(parents=True)
    np.savez(partial / WEIGHTS, **model.trainable())
    if optimizer is not None:
        (partial / "optimizer").mkdir()
        np.savez(partial / OPTIMIZER, **optimizer.state_dict())
    (partial / STATE).write_text(json.dumps({"step": state.step if state else 0}))
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(partial, folder)


def load_checkpoint(folder, model, optimizer=None, state=None):
    """Fill model, optimizer and state in place; KeyError where the checkpoint lacks a weight."""
    folder = Path(folder)
    with np.load(folder / WEIGHTS) as saved:
        for name, array in model.trainable().items():
            array[...] = saved[name]
    if optimizer is not None and (folder / OPTIMIZER).exists():
        with np.load(folder / OPTIMIZER) as saved:
            optimizer.load_state_dict(dict(saved))
    if state is not None:
        state.step = json.loads((folder / STATE).read_text())["step"]
