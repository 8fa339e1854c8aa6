"""`json_dump_tb_logs.py LOG_DIR --output_path FILE`: all scalars under a folder as {tag: {step: value}}; the newest file wins."""

import argparse
import json
import struct
import sys
from pathlib import Path


def read_scalars(path):
    """Yield (tag, step, value) of one event file. A record: length (8 bytes), its checksum (4), the event, its checksum (4)."""
    from tensorboard.compat.proto.event_pb2 import Event

    data, place = path.read_bytes(), 0
    while place + 12 <= len(data):
        (length,) = struct.unpack_from("<Q", data, place)
        event = Event.FromString(data[place + 12 : place + 12 + length])
        for value in event.summary.value:
            yield value.tag, event.step, value.simple_value
        place += length + 16


def merged(log_dir):
    """Return {tag: {step: value}} of all event files below a folder; FileNotFoundError if there are none."""
    files = sorted(Path(log_dir).rglob("events*tfevents*"), key=lambda path: (path.stat().st_mtime_ns, path))
    if not files:
        raise FileNotFoundError(f"no event files below {log_dir}")
    series = {}
    for path in files:
        for tag, step, value in read_scalars(path):
            series.setdefault(tag, {})[str(step)] = value
    return series


def main():
    """Write the file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("log_dir")
    parser.add_argument("--output_path", required=True)
    args = parser.parse_args()
    Path(args.output_path).write_text(json.dumps(merged(args.log_dir), indent=2))
    print(f"Metrics written to {args.output_path}")


if __name__ == "__main__":
    sys.exit(main())
