"""Checkpoints of a run: step_N/{policy, training_info.json, config.yaml}, written as tmp_step_N and renamed when whole."""

import json
import os
import re
import shutil
from pathlib import Path

import yaml


class CheckpointManager:
    """The numbered checkpoints in one folder."""

    def __init__(self, folder):
        self.folder = Path(folder)

    def latest(self):
        """Return the folder of the highest finished step, or None."""
        found = [p for p in self.folder.glob("step_*") if re.fullmatch(r"step_\d+", p.name)]
        return max(found, key=lambda p: int(p.name[5:]), default=None)

    def save(self, step, config, info, save_policy):
        """Write step_<step>; `save_policy(folder)` writes the policy's part."""
        partial, final = self.folder / f"tmp_step_{step}", self.folder / f"step_{step}"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        save_policy(str(partial / "policy"))
        (partial / "training_info.json").write_text(json.dumps(info))
        (partial / "config.yaml").write_text(yaml.safe_dump(config))
        shutil.rmtree(final, ignore_errors=True)
        os.replace(partial, final)
