"""Bytes of a log: ends of lines, blocks, control characters, size; in flat memory and bounded time."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tasks import triage
from tasks.triage import read_log
from tasks.triage.prefixes import split
from tasks.triage.scan import BLOCK, LONGEST_LINE, Watch, clean, scan
from tasks.triage.signatures import KINDS, shipped
from tests.triage.logs import EXAMPLES, MEGATRON, QUICK, RAY_LOG, SETUP, facts, step, traceback


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"step 2/2 done\r", "step 2/2 done"),
        (b"1%\r2%\r3%", "3%"),
        (b"1%\r2%\r   \r", "2%"),
        (b"\x1b[1;31mred\x1b[0m", "red"),
        (b"\x1b]0;title\x07x", "x"),
        (b"a\0b", "ab"),
        (b"\xff\xfe", "\ufffd\ufffd"),
        (b"x" * 20000, "x" * LONGEST_LINE),
    ],
)
def test_lines_are_what_a_terminal_shows(raw: bytes, text: str) -> None:
    assert clean(raw) == text


def test_carriage_returns_do_not_hide_the_end_of_a_line(tmp_path: Path) -> None:
    bar = b"".join(b"\r%3d%%|####      | %d/500" % (n // 5, n) for n in range(500))
    found = facts(tmp_path, bar + b"\r\nMax number of steps has been reached\r\nstep 2/2 done\r\n", expect=["done$"])
    assert found.training_done
    assert found.expected == {"done$": True}
    assert found.lines == 3


def test_error_glued_to_a_progress_bar_is_found(tmp_path: Path) -> None:
    log = b"\r 10%|#| 1/9\r 20%|#| 2/9" + traceback("ValueError: x", "/x/megatron/bridge/a.py").encode()
    assert facts(tmp_path, log).bridge_frame is not None


def test_line_without_end_does_not_fill_memory_and_what_follows_is_read(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    with path.open("wb") as out:
        for _ in range(60):
            out.write(b"x" * (1 << 18))
        out.write(b"\n429 Too Many Requests\n" + b"\rbar" * 200000 + b"\rOSError: [Errno 28] No space left on device")
    found = read_log(path)
    assert [(f.signature, f.line) for f in found.findings] == [("hub-rate-limit", 2), ("disk-full", 3)]
    assert max(len(f.text) for f in found.findings) < 600


@pytest.mark.parametrize("offset", [*range(-40, 3)])
def test_line_across_a_block_border_is_whole(tmp_path: Path, offset: int) -> None:
    line = b"OSError: [Errno 28] No space left on device"
    log = b"." * (BLOCK + offset - 1) + b"\n" + line + b"\n"
    found = facts(tmp_path, log)
    assert found.first is not None
    assert (found.first.line, found.lines, found.first.text) == (2, 2, line.decode())


def test_findings_carry_no_control_characters(tmp_path: Path) -> None:
    found = facts(tmp_path, b"\x1b[31mOSError: [Errno 28]\x1b[0m \x00 \x07 \x0b ]]> 5%\n")
    assert found.first is not None
    assert found.first.text == "OSError: [Errno 28]  \ufffd \ufffd ]]> 5%"


def test_missing_and_empty_logs_have_no_facts(tmp_path: Path) -> None:
    none, empty = read_log(tmp_path / "gone.log", expect=["a"], forbid=["b"]), facts(tmp_path, b"")
    assert (none.lines, none.size_bytes, none.first, none.expected, none.forbidden) == (
        0,
        0,
        None,
        {"a": False},
        {"b": None},
    )
    assert (empty.lines, empty.megatron_worker, empty.training_done, empty.warnings) == (0, False, False, ())


@given(
    st.one_of(
        st.binary(max_size=3000),
        st.lists(
            st.one_of(
                st.binary(max_size=40),
                st.sampled_from(
                    [line.encode() for _, line in EXAMPLES]
                    + RAY_LOG.encode().splitlines()
                    + [
                        MEGATRON.encode(),
                        b"Traceback (most recent call last):",
                        step(2, 3).encode(),
                        b"\r",
                        b"\x1b[",
                        b"",
                    ]
                ),
            ),
            max_size=40,
        ).map(b"\n".join),
    )
)
@example(b"\x1b[36m(MegatronPolicyWorker pid=")
@example(b"Traceback (most recent call last):\n" * 3000)
@QUICK
def test_arbitrary_bytes_never_crash_and_never_prove_anything(tmp_path: Path, log: bytes) -> None:
    found = facts(tmp_path, log, expect=["x"], forbid=[r"\d{3}"])
    assert found.size_bytes == len(log)
    assert found.lines == log.count(b"\n") + (not log.endswith(b"\n") and bool(log))
    plain = re.sub(rb"\x1b\[[0-9;]*m|\0", b"", log)
    if found.megatron_worker:
        assert re.search(rb"\(Megatron\w*PolicyWorker(?:\[[^]]*\])? pid=\w+", plain)
    if found.training_done:
        assert b"Max number of steps has been reached" in plain
    for finding in found.findings:
        assert 1 <= finding.line <= found.lines
        assert finding.echoes >= 0
        assert finding.kind in KINDS[:-1]


@given(
    st.lists(st.tuples(st.integers(0, len(EXAMPLES) - 1), st.booleans(), st.integers(0, 3)), min_size=1, max_size=12)
)
@QUICK
def test_fast_search_hands_out_every_line_that_a_signature_matches(
    tmp_path: Path, plan: list[tuple[int, bool, int]]
) -> None:
    lines: list[str] = []
    for index, prefixed, noise in plan:
        lines += ["noise " * 20] * noise + [(MEGATRON if prefixed else "") + EXAMPLES[index][1]]
    path = tmp_path / "run.log"
    path.write_text("\n".join(lines), encoding="utf-8")
    watch = Watch({n for s in shipped() for n in s.needles})
    handed = {line.number for line in scan(path, watch)}
    matching = {i for i, line in enumerate(lines, 1) if any(s.pattern.search(split(line.replace("\x1b[36m", "").replace("\x1b[0m", ""))[0].text) for s in shipped())}  # fmt: skip
    assert matching <= handed
    assert watch.lines == len(lines)


def test_a_needle_that_matched_nothing_for_long_is_looked_for_again_after_a_step(tmp_path: Path) -> None:
    noise, known = "ValueError: nothing special\n" * 40_000, "ValueError: flashinfer is not installed\n"
    step = f"{'=' * 25} Step 1/2 {'=' * 25}\n"
    assert "missing" not in str(facts(tmp_path, (noise + known).encode()).first)  # the price of a bounded time
    found = facts(tmp_path, (noise + step + known).encode()).first
    assert found is not None
    assert (found.kind, found.line) == ("environment", 40_002)


def test_long_log_is_read_fast_in_flat_memory(tmp_path: Path) -> None:
    """24 MB here, 200 MB in bench/bench_triage.py; the limit leaves room for a slow, busy machine."""
    body = "".join(f"{MEGATRON}step {n} loss: 0.{n} reward 0.5 generation took {n} s\n" for n in range(2000))
    path = tmp_path / "run.log"
    with path.open("w", encoding="utf-8") as out:
        while out.tell() < 24_000_000:
            out.write(body)
        out.write(traceback("ValueError: x", "/x/megatron/bridge/a.py"))
    code = (
        "import resource, sys, time; from pathlib import Path; from tasks.triage import read_log; "
        "read_log(Path('/nowhere')); read_log(Path(sys.argv[2])); peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss; "
        "start = time.process_time(); facts = read_log(Path(sys.argv[1])); "
        "print(facts.first.signature, time.process_time() - start, "
        "resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak)"
    )
    small = tmp_path / "small.log"
    small.write_text(body * 4, encoding="utf-8")
    root = Path(triage.__file__).parents[2]
    ran = subprocess.run(
        [sys.executable, "-c", code, str(path), str(small)],
        cwd=root, env={**os.environ, "PYTHONPATH": str(root)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    signature, seconds, kib = ran.stdout.split()
    assert signature == "bridge-frame"
    assert float(seconds) < 3
    assert int(kib) < 16_000


def test_error_that_comes_again_after_progress_is_seen_although_its_counting_was_paused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triage, "MOST_ECHOES", 1000)
    limit = "429 Too Many Requests\n"
    log = limit * 40_000 + SETUP + "\n" + limit
    found = facts(tmp_path, log.encode())
    assert found.first is not None
    assert (found.first.line, found.first.echoes) == (40_002, 0)
    assert found.findings[0].recovered
    assert 1000 <= found.findings[0].echoes < 39_999  # the paused rest was not even looked at


def test_log_of_nothing_but_errors_is_read_in_bounded_time() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.log"
        path.write_text(
            traceback("ValueError: x", "/x/megatron/bridge/a.py") * 5000
            + "OSError: [Errno 28] No space left on device\n" * 5000,
            encoding="utf-8",
        )
        start = time.process_time()
        found = read_log(path)
        assert time.process_time() - start < 10
    counted = [(f.signature, f.echoes) for f in found.findings]
    assert counted == [("bridge-frame", triage.MOST_TRACEBACKS - 1), ("disk-full", 4999)]
