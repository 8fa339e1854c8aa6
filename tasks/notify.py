"""Tell somebody the answer: a program of the user's (`notify:` in site.yaml) and a webhook (E2E_NOTIFY_URL).

The program is called as `PROGRAM ARGUMENTS REPORT_FOLDER` with summary.md as its input; the webhook gets a small JSON
whose `text` is what chat services show. Neither changes the verdict: what goes wrong is one line, without the address,
which is a secret where it carries a token.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

VARIABLE = "E2E_NOTIFY_URL"
TIMEOUT_S = 10.0


def tell(
    report: Mapping[str, Any], folder: Path, argv: Sequence[str], environ: Mapping[str, str] = os.environ
) -> list[str]:
    """Tell the program `argv` and the webhook of the environment, if there are any; return what went wrong."""
    url = environ.get(VARIABLE)
    found = [_run(argv, folder)] if argv else []
    if url:
        answers: list[str | None] = []
        # a thread, because neither the look-up of a name nor a server that drips its answer ends by urllib's limit
        asking = threading.Thread(target=lambda: answers.append(_post(url, message(report, folder))), daemon=True)
        asking.start()
        asking.join(TIMEOUT_S)
        found += answers or [f"the webhook of {VARIABLE} did not answer within {TIMEOUT_S:g} s"]
    return [text for text in found if text]


def message(report: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return what the webhook gets: schema, text, and the report's own words for what was asked and found."""
    source = report.get("provenance") or {}
    return {
        "schema": 1,
        "text": f"NeMo-RL e2e: {report.get('result')} - {report.get('sentence')}",
        **{key: report.get(key) for key in ("result", "sentence", "workspace", "demo", "requested")},
        "bridge": (source.get("bridge") or {}).get("sha"),
        "host": source.get("host"),
        "report": os.fspath(folder),
    }


def _run(argv: Sequence[str], folder: Path) -> str | None:
    """Run the program with the summary as its input, in a process group of its own that ends within the limit."""
    try:
        with (folder / "summary.md").open("rb") as summary:
            process = subprocess.Popen(
                [*argv, os.fspath(folder)], stdin=summary, stdout=subprocess.DEVNULL, start_new_session=True
            )
    except OSError as error:
        return f"{argv[0]} was not started: {error.strerror}"
    try:
        rc = process.wait(TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"{argv[0]} was stopped after {TIMEOUT_S:g} s"
    finally:
        _end(process)
    return f"{argv[0]} ended with rc {rc}" if rc else None


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _post(url: str, body: Mapping[str, Any]) -> str | None:
    from http.client import HTTPException
    from urllib import error, request

    if not url.startswith(("https://", "http://")):
        return f"{VARIABLE} is no http(s) address"
    try:
        asked = request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})  # noqa: S310
        with request.urlopen(asked, timeout=TIMEOUT_S):  # noqa: S310 - the scheme was looked at above
            return None
    except error.HTTPError as refusal:
        refusal.close()
        return f"the webhook of {VARIABLE} answered {refusal.code}"
    except (OSError, HTTPException, ValueError) as problem:  # their texts may quote the address
        return f"the webhook of {VARIABLE} was not reached ({type(problem).__name__})"
