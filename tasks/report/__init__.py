"""The four faces of one report: report.json for programs, junit.xml for CI, summary.md for a pull request, index.html.

All of them are pure functions of the report (docs/schema/report-1.json) and of the
attempts' files: no clock, no host, so the same report gives the same bytes. `write` puts them down atomically,
report.json last: where it is there, the others belong to it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks import files
from tasks.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tasks.reason import Verdict

SCHEMA_VERSION = 1
NAMES = ("junit.xml", "summary.md", "index.html", "report.json")


def overall(report: Mapping[str, Any]) -> tuple[Verdict, str]:
    """Return Fail if anything failed, else Blocked if anything is blocked, else Pass; and one sentence that says why.

    A report in which nothing that was asked for passed is Blocked: nothing executed is not a Pass.
    """
    from tasks.report import answer

    return answer.overall(report)


def complete(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return `report` with schema number, result and sentence filled in; a result that claims too much is put right."""
    from tasks.report import answer

    verdict, sentence = answer.headline(report)
    return {**report, "schema": SCHEMA_VERSION, "result": verdict.value, "sentence": sentence}


def render_all(report: Mapping[str, Any], root: Path) -> dict[str, bytes]:
    """Return the bytes of junit.xml, summary.md, index.html and report.json; logs and metrics are read below `root`."""
    from tasks.report import html, junit, summary

    done = complete(report)
    return {
        "junit.xml": junit.render(done, root),
        "summary.md": summary.render(done).encode(),
        "index.html": html.render(done, root).encode(),
        "report.json": _json_bytes(done),
    }


def write(report: Mapping[str, Any], root: Path) -> Path:
    """Write the reports into `root/report` and return that folder; `root` is the workspace folder.

    An unchanged report is not rendered again (a call that finds everything fresh would spend most of its time on it):
    its files are only touched, because CI servers refuse reports older than the build. Raises OSError where the files
    cannot be written; the earlier ones are then as they were.
    """
    folder = root / "report"
    done = complete(report)
    if _is_current(folder, _json_bytes(done)):
        for name in NAMES:
            os.utime(folder / name)
        return folder
    for name, data in render_all(done, root).items():
        files.write_bytes(folder / name, data)
    return folder


def publish(folder: Path | None, into: Path) -> None:
    """Copy the four files from the workspace to where a CI job picks them up; None takes old ones away from there.

    A run begins with the latter, so that what a job finds is what it ran. report.json is written first and removed
    last: a page or summary without it is somebody else's. Raises UserError for such a folder, OSError where it cannot
    be used.
    """
    if folder is None:
        theirs = [name for name in ("index.html", "summary.md") if (into / name).exists()]
        if theirs and not (into / "report.json").exists():
            raise UserError(
                f"{into / theirs[0]} is not ours and would be overwritten: reports=DIR names another folder"
            )
        for name in NAMES:
            (into / name).unlink(missing_ok=True)
        return
    for name in reversed(NAMES):
        files.write_bytes(into / name, (folder / name).read_bytes())


def _json_bytes(report: Mapping[str, Any]) -> bytes:
    """Return report.json; numbers that JSON does not have are written as the words that metrics.json uses."""
    try:
        return files.json_bytes(report)
    except ValueError:
        return files.json_bytes(_finite(json.loads(json.dumps(report))))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_finite(v) for v in value]
    if isinstance(value, float) and (value != value or value in {float("inf"), float("-inf")}):  # noqa: PLR0124 - NaN
        return {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}[str(value)]
    return value


def _is_current(folder: Path, data: bytes) -> bool:
    """Tell whether `folder` holds this very report, written by this program's present source."""
    try:
        if (folder / "report.json").read_bytes() != data:
            return False
        oldest = min((folder / name).stat().st_mtime_ns for name in NAMES)
        return oldest > max(p.stat().st_mtime_ns for p in Path(__file__).parent.iterdir() if p.is_file())
    except OSError:
        return False
