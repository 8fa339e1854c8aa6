"""Lines that a CI service shows beside the changed code: one for each deliverable that is no Pass, at its Bridge line.

`doit report annotations=github` prints workflow commands, `annotations=azure` logging commands. A Fail is an error,
what is Blocked a warning (it says nothing against the change), a known Fail in quarantine a notice.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from tasks.reason import Verdict
from tasks.report import facts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

_AT = re.compile(r"(/[^\n]*?\.py):(\d+)")


def lines(report: Mapping[str, Any], service: str) -> list[str]:
    """Return the annotations of `report` in the words of `service`, a key of FORMATS."""
    root = facts.table(facts.table(report.get("provenance")).get("bridge")).get("path")
    return [FORMATS[service](*one) for one in _found(report, str(root or "").rstrip("/") + "/")]


def _found(report: Mapping[str, Any], root: str) -> Iterator[tuple[str, str, str, str, str]]:
    """Yield level, title, message, file relative to the Bridge checkout, and line; the last two may be empty."""
    for one in facts.deliverables(report):
        if one.verdict in {Verdict.PASS, Verdict.SKIPPED} or one.dependent:
            continue
        level = "notice" if one.quarantined else "error" if one.verdict is Verdict.FAIL else "warning"
        texts = facts.reason_texts(one.item)
        places = [m for text in texts for m in _AT.finditer(text) if m[1].startswith(root) and root != "/"]
        file, line = (places[0][1].removeprefix(root), places[0][2]) if places else ("", "")
        yield level, f"{one.verdict}: {one.id}", "\n".join(texts[:3]), file, line


def _github(level: str, title: str, message: str, file: str, line: str) -> str:
    where = {"file": file, "line": line, "title": title}
    shown = ",".join(f"{k}={_escaped(v, ':,')}" for k, v in where.items() if v)
    return f"::{level} {shown}::{_escaped(message)}"


def _azure(level: str, title: str, message: str, file: str, line: str) -> str:
    where = {"type": "error" if level == "error" else "warning", "sourcepath": file, "linenumber": line}
    shown = "".join(f"{k}={_escaped(v, ';]', '%AZP25')};" for k, v in where.items() if v)
    return f"##vso[task.logissue {shown}]{_escaped(f'{title}: {message}', percent='%AZP25')}"


def _escaped(text: str, more: str = "", percent: str = "%25") -> str:
    """Return `text` as one line that no command can be hidden in: 5% -> 5%25."""
    text = text.replace("%", percent)
    for char in f"\r\n{more}":
        text = text.replace(char, f"%{ord(char):02X}")
    return text


FORMATS: dict[str, Callable[[str, str, str, str, str], str]] = {"github": _github, "azure": _azure}
