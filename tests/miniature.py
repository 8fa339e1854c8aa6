"""Two miniature checkouts whose whole pipeline takes two seconds, and the command line to run it on them.

The trainer does nothing but leave what a run leaves: banners, event files, an exit status. Modes make it misbehave.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.conftest import run_git

ROOT = Path(__file__).resolve().parent.parent

TRAINER = '''\
"""Leave behind what a run leaves behind."""
import os, sys, time
import megatron.bridge, megatron.core
from megatron.bridge.mapping import FACTOR
from nemo_rl.event_log import scalars, write  # no tensorboard: the same trainer runs in a bare container
given = dict(word.lstrip("+").split("=", 1) for word in sys.argv[1:] if "=" in word)
steps, mode = int(given.get("run.steps", 2)), given.get("run.mode", "good")
print("Initializing lm_policy workers"); print("(MegatronPolicyWorker[rank=0] pid=1) hello", flush=True)
print(f"token {os.environ.get('HF_TOKEN', 'absent')}", flush=True)
if mode == "skip": print("SKIP: needs two GPUs"); sys.exit(0)
if mode == "sleep": open(os.environ.get("HOME") + "/../started", "w").close(); time.sleep(600)
if mode == "die" and FACTOR == 3: print("x", flush=True); os.kill(os.getpid(), 9)
records = []
for step in range(1, steps + 1 - (mode == "early")):
    print("=" * 25 + f" Step {step}/{steps} " + "=" * 25, flush=True)
    while mode == "wait" and step == 1 and not os.path.exists(given["run.until"]): time.sleep(0.02)
    value = float("nan") if mode == "nan" and step == 2 else 2.0 if mode == "badend" else 1.0 * FACTOR
    records.append(scalars({"train/loss": 1.0 / step, "train/token_mult_prob_error": value}, step))
from pathlib import Path
if mode != "noevents": write(Path("logs/exp_001/tensorboard/events.out.tfevents.1.h.1.0"), records)
if mode == "daemon":
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0: time.sleep(600)
        os._exit(0)
print("Max number of steps has been reached, stopping training early", flush=True)
sys.exit(1 if mode in ("teardown", "badend") else 0)
'''

# The part of NeMo-RL's loader that is asked before a run; the real one needs OmegaConf and Hydra.
LOADER = """\
import json

def load_config(path):
    with open(path) as source: return json.load(source)

def parse_hydra_overrides(config, overrides):
    for word in overrides:
        key, _, value = word.lstrip("+").partition("=")
        *path, last = key.split(".")
        node = config
        for part in path: node = node.setdefault(part, {}) if word[0] == "+" else node[part]
        if last not in node and word[0] != "+": raise KeyError(f"Could not override {key!r}")
        node[last] = json.loads(value) if value[:1].isdigit() or value in ("true", "false") else value
    return config
"""

PROGRAM = """\
import os, sys
from nemo_rl.utils.config import load_config, parse_hydra_overrides
DEFAULT = os.path.join(os.path.dirname(__file__), "configs", "mini.yaml")
config = parse_hydra_overrides(load_config(DEFAULT), sys.argv[1:])
sys.argv[1:] = [f"run.steps={config['run']['steps']}"]
exec(open("train.py").read())
"""

CONFIG = {
    "run": {"steps": 2, "api_key": "hush", "note": "x"},
    "policy": {"megatron_cfg": {"enabled": True}, "dtensor_cfg": {"enabled": False}},
}

EVENT_LOG = '''\
"""Event files by hand: record framing and the few protobuf fields that a scalar needs."""
import struct

def crc(data):
    value = 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8): value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
    value ^= 0xFFFFFFFF
    return struct.pack("<I", ((value >> 15 | value << 17) + 0xA282EAD8) & 0xFFFFFFFF)

def framed(data):
    size = struct.pack("<Q", len(data))
    return size + crc(size) + data + crc(data)

def field(number, data): return bytes([number << 3 | 2, len(data)]) + data

def scalars(values, step):
    summary = b"".join(field(1, field(1, tag.encode()) + b"\\x15" + struct.pack("<f", value)) for tag, value in values.items())
    return framed(b"\\x09" + struct.pack("<d", 1.7e9) + bytes([0x10, step]) + b"\\x2a" + varint(len(summary)) + summary)

def varint(number): return bytes([number]) if number < 128 else bytes([number & 127 | 128, number >> 7])

def write(path, records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(framed(b"\\x09" + struct.pack("<d", 1.7e9) + field(3, b"brain.Event:2")) + b"".join(records))
'''

LEVELS = """\
schema: 1
suites:
  mapping: {repo: bridge, paths: [tests/unit_tests/test_mapping.py], min_tests: 1}
levels:
  0:
    title: smoke
    proves: the trainer ran
    required_when: always
    suites: [mapping]
    cases:
      train:
        command: [python, train.py]
        repo: nemo_rl
        gpus: 0
        timeout: 60s
        steps: 2
        logs: logs
        backend: megatron
        checks: ['max(data["train/token_mult_prob_error"]) < 1.05', 'min(data["train/token_mult_prob_error"]) > 0.9']
        real_work: [train/loss]
"""


@dataclass(frozen=True)
class Done:
    """A finished call of doit."""

    rc: int
    out: str
    report: dict[str, Any]

    @property
    def case(self) -> dict[str, Any]:
        """The first case of the report."""
        return self.report["cases"][0]

    def ran(self, task: str) -> bool:
        """Tell whether a run was executed, not reused."""
        return f" {task}: ... recorded\n" in self.out


class Miniature:
    """The checkouts, a build folder, and doit on them."""

    def __init__(self, home: Path) -> None:
        self.home, self.bridge, self.nemo_rl = home, home / "my bridge", home / "rl"
        self.build = home / "build"
        write_tree(self.bridge / "3rdparty/Megatron-LM", {"megatron/core/__init__.py": "", "pyproject.toml": ""})
        write_tree(
            self.bridge,
            {
                "src/megatron/bridge/__init__.py": "",
                "src/megatron/bridge/mapping.py": "FACTOR = 1.0\n",
                "tests/unit_tests/test_mapping.py": "def test_it(): import megatron.bridge.mapping\n",
                "docs/guide.md": "text\n",
                ".gitignore": "3rdparty/\n__pycache__/\n",
            },
        )
        write_tree(
            self.nemo_rl,
            {
                "nemo_rl/__init__.py": "",
                "nemo_rl/event_log.py": EVENT_LOG,
                "nemo_rl/utils/__init__.py": "",
                "nemo_rl/utils/config.py": LOADER,
                "train.py": TRAINER,
                "examples/run_mini.py": PROGRAM,
                "examples/configs/mini.yaml": json.dumps(CONFIG),
                "tests/functional/mini.sh": "set -e\nPROJECT_ROOT=$(realpath .)\n"
                "uv run $PROJECT_ROOT/examples/run_mini.py run.steps=2 $@ 2>&1 | tee run.log\n",
                ".gitignore": "__pycache__/\n",
            },
        )
        self.levels = home / "levels.yaml"
        self.levels.write_text(LEVELS)

    def argv(self, *words: str) -> list[str]:
        """Return the command line."""
        settings = {
            "bridge": self.bridge, "nemo_rl": self.nemo_rl, "levels": self.levels, "build": self.build, "runtime": "local"
        }  # fmt: skip
        given = {word.split("=")[0] for word in words}
        return [sys.executable, "-m", "doit", *words, *(f"{k}={v}" for k, v in settings.items() if k not in given)]

    def environment(self, **env: str) -> dict[str, str]:
        """Return the environment of a call: nothing of the developer's own set-up."""
        kept = {
            k: v
            for k, v in os.environ.items()
            if not k.endswith(("_REPO", "_TOKEN")) and not k.startswith(("E2E_", "COV_"))
        }
        return {**kept, **env}

    def doit(self, *words: str, **env: str) -> Done:
        """Run doit and return status, output and report."""
        done = subprocess.run(
            self.argv(*words),
            cwd=ROOT,
            env=self.environment(**env),
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        return Done(done.returncode, done.stdout + done.stderr, self.report())

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Start doit in the background."""
        return subprocess.Popen(
            self.argv(*words),
            cwd=ROOT,
            env=self.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    @property
    def workspace(self) -> Path:
        """The workspace folder; there is one."""
        return next(p.parent for p in self.build.glob("*/report"))

    def report(self) -> dict[str, Any]:
        """Return report.json, or an empty one."""
        found = list(self.build.glob("*/report/report.json"))
        return json.loads(found[0].read_text()) if found else {}

    def attempts(self, case: str = "level0.train") -> list[Path]:
        """Return the attempt folders of a case, oldest first."""
        return sorted((self.workspace / "attempts" / case).glob("*"))


def write_tree(repo: Path, files: dict[str, str]) -> None:
    """Make a repository of `files` with one commit."""
    for name, text in files.items():
        (repo / name).parent.mkdir(parents=True, exist_ok=True)
        (repo / name).write_text(text)
    run_git(repo, "init", "-q", "-b", "main")
    run_git(repo, "add", "-A")
    run_git(repo, "commit", "-q", "-m", "one")
