"""The project about itself: `doit test` and `doit bench`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.errors import UserError
from tasks.files import read_json, write_json
from tasks.query import Query
from tasks.settings import ROOT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tasks.invocation import Invocation


def _scripts() -> list[str]:
    """Return our shell scripts; those of the demo imitate upstream's and are none."""
    found = (*ROOT.glob(".ci/*"), *ROOT.glob("containers/**/*"), ROOT / "doitw")
    return [
        str(p.relative_to(ROOT))
        for p in sorted(found)
        if p.is_file() and p.read_bytes()[:64].split(b"\n")[0].endswith((b"bash", b"/sh"))
    ]


class Test(Query):
    """Lint and test this project."""

    name = "test"
    doc_purpose = "lint, mypy --strict and pytest: what CI calls"
    doc_usage = "[PATH...]"

    def answer(self, now: Invocation, words: Sequence[str], *, as_json: bool) -> int:
        """Run them all and return 1 if one is not content."""
        python = sys.executable
        steps = (
            [python, "-m", "ruff", "check", "."],
            [python, "-m", "ruff", "format", "--check", "."],
            [python, "-m", "mypy"],
            [str(Path(python).parent / "lint-imports"), "--no-cache"],
            [python, "-m", "yamllint", "--strict", "."],
            [str(Path(python).parent / "shellcheck"), "-x", *_scripts()],
            [python, "-m", "pytest", "-q", "-n", "auto", "--maxprocesses=8", "--dist=loadfile", *words],
        )
        failed = []
        for argv in steps:
            print(f"$ {' '.join([Path(argv[0]).name, *argv[1:]])}", flush=True)
            if subprocess.run(argv, cwd=ROOT, check=False).returncode:
                failed.append(argv[2] if argv[1] == "-m" else Path(argv[0]).name)
        print(
            f"Result: {'Fail' if failed else 'Pass'} - "
            + (", ".join(failed) + " not content" if failed else "lint, types and tests")
        )
        return 1 if failed else 0


class Bench(Query):
    """Measure against peers."""

    name = "bench"
    doc_purpose = "benchmarks of this project against peers, as ratios of one run; also build/bench/bench.json"

    def answer(self, now: Invocation, words: Sequence[str], *, as_json: bool) -> int:
        """Run each benchmark in a process of its own and gather the rows."""
        home = now.settings.build / "bench"
        home.mkdir(parents=True, exist_ok=True)
        rows: list[Any] = []
        for name, *extra in (("noop",), ("metrics", *([] if "full" in words else ["--quick"])), ("triage",)):
            part = home / f"{name}.json"
            argv = [sys.executable, str(ROOT / f"bench/bench_{name}.py"), *extra, "--json", str(part)]
            done = subprocess.run(argv, cwd=ROOT, check=False, stdout=sys.stderr if as_json else None)
            if done.returncode:
                raise UserError(f"bench_{name}.py ended with rc {done.returncode}")
            rows += read_json(part) or []
        write_json(home / "bench.json", rows)
        print(json.dumps(rows, indent=1) if as_json else f"Result: Pass - {len(rows)} rows in {home / 'bench.json'}")
        return 0
