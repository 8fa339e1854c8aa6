"""What a person sees on a terminal: the stage with step, likely end and GPU memory; of a failure log and next command."""

from __future__ import annotations

import fcntl
import os
import re
import select
import struct
import subprocess
import termios
import time
from typing import TYPE_CHECKING

import pytest

from tasks import gpus
from tasks.live import ending
from tests.miniature import ROOT, Miniature

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

NVIDIA_SMI = """\
#!/bin/sh
case $1 in
  -L) echo "GPU 0: NVIDIA H100 (UUID: GPU-1)" ;;
  *memory*) echo "41984, 81920" ;;
  *) echo 580.1 ;;
esac
"""


class Terminal:
    """doit on a pseudo terminal of 100 columns, and what it has printed."""

    def __init__(self, argv: list[str], env: dict[str, str]) -> None:
        self.fd, theirs = os.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
        self.process = subprocess.Popen(argv, cwd=ROOT, env=env, stdin=theirs, stdout=theirs, stderr=theirs)
        os.close(theirs)
        self.text = ""

    def until(self, pattern: str, seconds: float = 60.0) -> str:
        """Read until `pattern` was printed or doit has ended, and return all text so far."""
        deadline = time.monotonic() + seconds
        while not re.search(pattern, self.text) and time.monotonic() < deadline:
            if not select.select([self.fd], [], [], 0.2)[0]:
                continue
            try:
                data = os.read(self.fd, 65536)
            except OSError:  # Linux ends a terminal that nobody holds any more with EIO
                break
            self.text += re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", data.decode("utf-8", "replace"))
        return self.text


def test_a_terminal_shows_what_runs_and_what_to_do_about_a_failure(tmp_path: Path) -> None:
    mini = Miniature(tmp_path)
    text = mini.levels.read_text().replace("gpus: 0", "gpus: 1")
    mini.levels.write_text(text.replace("suites: [mapping]", "suites: []"))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/nvidia-smi").write_text(NVIDIA_SMI)
    (tmp_path / "bin/nvidia-smi").chmod(0o755)
    path = f"{tmp_path}/bin:{os.environ['PATH']}"
    assert mini.doit("level0", PATH=path).rc == 0  # the earlier record
    (mini.bridge / "src/megatron/bridge/mapping.py").write_text("FACTOR = 3.0\n")
    go = tmp_path / "go"
    env = mini.environment(PATH=path, TERM="xterm-256color")
    env.pop("NO_COLOR", None)
    live = Terminal(mini.argv("level0", "run.mode=wait", f"run.until={go}"), env)
    shown = live.until(r"run:level0\.train .*step 1/2 .*GPU 41/80 GiB .*…")
    go.touch()
    line = next(row for row in shown.splitlines() if re.search("step 1/2 .*GPU 41/80 GiB .*…", row))
    assert re.search(
        r"\d+ s  run:level0\.train  step 1/2  (about \d+ s left \(\d\d:\d\d\)|usually done after \d+ s)  GPU", line
    )
    assert "=…" in line, "the newest line of the log, cut where the terminal ends"
    shown = live.until("Report: .*index.html")
    assert live.process.wait(30) == 1
    os.close(live.fd)
    end = [row for row in shown[shown.index("Fail            check:level0.train") :].splitlines() if row.strip()]
    assert "max(data[" in end[0]  # the cause
    assert end[1].endswith("/run.log")
    next_command = next(n for n, row in enumerate(end) if row.startswith("  next: "))
    assert end[next_command] == "  next: ./doitw why level0.train"
    assert 3 <= next_command - 2 <= 10
    assert "stopping training early" in end[next_command - 1]
    assert shown.index("Result: Fail - ") > shown.index("  next: ")


@pytest.mark.parametrize(
    ("spent", "usual", "words"),
    [
        (1.0, None, r""),
        (10.0, 40.0, r"about 30 s left \(\d\d:\d\d\)"),
        (60.0, 1260.0, r"about 20 min left \(\d\d:\d\d\)"),
        (0.0, 9000.0, r"about 2\.5 h left \(\d\d:\d\d\)"),
        (50.0, 40.0, r"usually done after 40 s"),
    ],
)
def test_the_likely_end_comes_from_earlier_records(spent: float, usual: float | None, words: str) -> None:
    assert re.fullmatch(words, ending(spent, usual))


@pytest.mark.parametrize(
    ("script", "words"),
    [("echo 1024, 81920; echo 2048, 81920", "GPU 3/160 GiB"), ("echo '[N/A], 81920'", ""), ("exit 9", "")],
)
def test_gpu_memory_is_shown_where_it_is_known(
    script: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus.memory() == words
    (tmp_path / "nvidia-smi").unlink()
    assert gpus.memory() == ""
