"""Telling somebody the answer: what is told, and that nothing that goes wrong there changes the answer or shows the address."""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from tasks import notify, settings
from tasks.errors import UserError
from tests import report_samples as samples
from tests.miniature import Miniature

SECRET = "T0K3N-of-the-hook"


class Hook(HTTPServer):
    """A webhook that keeps what it was sent and answers `status`."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.heard: list[dict[str, Any]] = []
        self.status = 200
        self.url = f"http://127.0.0.1:{self.server_port}/{SECRET}"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        hook: Any = self.server
        hook.heard.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(hook.status)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def hook() -> Iterator[Hook]:
    with Hook() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "summary.md").write_text("Result: Fail - x\n")
    return tmp_path


REPORT = {**samples.report(samples.failing_case()), "result": "Fail", "sentence": "it failed"}


def test_the_webhook_gets_the_answer(hook: Hook, folder: Path) -> None:
    assert notify.tell(REPORT, folder, (), {notify.VARIABLE: hook.url}) == []
    assert hook.heard == [notify.message(REPORT, folder)]
    assert hook.heard[0]["text"] == "NeMo-RL e2e: Fail - it failed"
    assert hook.heard[0]["bridge"] == samples.PROVENANCE["bridge"]["sha"]


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("{hook}", "answered 500"),
        ("http://127.0.0.1:1/{secret}", "URLError"),
        ("file:///{secret}", "no http(s) address"),
        ("http://[{secret}", "ValueError"),
        ("http://127.0.0.1:1/{secret} x\n", "InvalidURL"),
    ],
)
def test_what_goes_wrong_is_one_line_without_the_address(address: str, words: str, hook: Hook, folder: Path) -> None:
    hook.status = 500
    url = address.format(hook=hook.url, secret=SECRET)
    (warning,) = notify.tell(REPORT, folder, (), {notify.VARIABLE: url})
    assert words in warning
    assert SECRET not in warning
    assert "\n" not in warning


def test_a_server_that_never_answers_is_given_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify, "TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/{SECRET}"
        (warning,) = notify.tell(REPORT, folder, (), {notify.VARIABLE: url})
    assert "not" in warning
    assert SECRET not in warning


def test_the_program_gets_folder_and_summary(folder: Path) -> None:
    code = "import sys, pathlib; pathlib.Path(sys.argv[2], 'told').write_text(sys.argv[1] + sys.stdin.read())"
    assert notify.tell(REPORT, folder, (sys.executable, "-c", code, "a b; "), {}) == []
    assert (folder / "told").read_text() == "a b; Result: Fail - x\n"


def test_a_program_that_fails_hangs_or_is_not_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert notify.tell(REPORT, folder, ("false",), {}) == ["false ended with rc 1"]
    assert notify.tell(REPORT, folder, ("/nowhere/x",), {}) == ["/nowhere/x was not started: No such file or directory"]
    monkeypatch.setattr(notify, "TIMEOUT_S", 0.2)
    started = time.monotonic()
    assert notify.tell(REPORT, folder, ("bash", "-c", "sleep 60 | sleep 60"), {}) == ["bash was stopped after 0.2 s"]
    assert time.monotonic() - started < 10


@pytest.mark.parametrize(
    ("site", "given", "expected"),
    [
        ("notify: [mail-it, --to, me]", {}, ("mail-it", "--to", "me")),
        ("notify: mail-it", {}, ("mail-it",)),
        ("notify: [mail-it]", {"notify": "off"}, ()),
        ("notify: [mail-it]", {"notify": "other"}, ("other",)),
        ("{}", {}, ()),
    ],
)
def test_settings(site: str, given: dict[str, str], expected: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "site.yaml").write_text(site)
    assert settings.load(given, environ={}, root=tmp_path).notify == expected


@pytest.mark.parametrize("site", ["notify: [1]", "notify: [[a]]"])
def test_a_program_that_is_no_list_of_words_is_refused(site: str, tmp_path: Path) -> None:
    (tmp_path / "site.yaml").write_text(site)
    with pytest.raises(UserError, match="notify: must be a list"):
        settings.load({}, environ={}, root=tmp_path)


@pytest.mark.slow
def test_a_dead_webhook_leaves_the_verdict_alone_and_its_address_nowhere(tmp_path: Path, hook: Hook) -> None:
    mini = Miniature(tmp_path)
    done = mini.doit("sync", "notify=false", E2E_NOTIFY_URL=f"http://127.0.0.1:1/{SECRET}")
    assert done.rc == 0
    assert "notify: ... false ended with rc 1" in done.out
    assert "was not reached" in done.out
    assert done.out.rstrip().splitlines()[-2].startswith("Result: Pass")
    assert SECRET not in done.out
    assert not [p for p in mini.build.rglob("*") if p.is_file() and SECRET.encode() in p.read_bytes()]
    assert mini.doit("sync", E2E_NOTIFY_URL=hook.url).rc == 0
    assert hook.heard[0]["result"] == "Pass"
