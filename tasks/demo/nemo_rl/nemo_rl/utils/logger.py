"""Experiment folders exp_001, exp_002... and scalars as TensorBoard event files in them."""

import json
import re
import time
from pathlib import Path


def get_next_experiment_dir(log_dir):
    """Create and return the next numbered folder under `log_dir`."""
    root = Path(log_dir)
    root.mkdir(parents=True, exist_ok=True)
    numbers = [int(found[1]) for path in root.iterdir() if (found := re.fullmatch(r"exp_(\d+)", path.name))]
    folder = root / f"exp_{max(numbers, default=0) + 1:03d}"
    folder.mkdir()
    return folder


class Logger:
    """Writes `prefix/name` scalars at a step, and the samples of a step as JSON lines."""

    def __init__(self, folder, tensorboard):
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.folder = Path(folder)
        self.writer = EventFileWriter(str(self.folder / "tensorboard")) if tensorboard else None

    def log_metrics(self, metrics, step, prefix):
        """Write {name: number} at `step`."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        if self.writer:
            values = [Summary.Value(tag=f"{prefix}/{name}", simple_value=float(v)) for name, v in metrics.items()]
            self.writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def log_samples(self, samples, step):
        """Write a list of dictionaries to train_data_step<step>.jsonl."""
        lines = "".join(json.dumps(sample) + "\n" for sample in samples)
        (self.folder / f"train_data_step{step}.jsonl").write_text(lines)

    def close(self):
        """Flush what is buffered to disk."""
        if self.writer:
            self.writer.close()
