"""Fetching models with the real huggingface_hub from a hub of ours: whole, completed, gated, limited, not there.

Needs the CPU environment (E2E_REAL_BUILD, or one below build/); nothing outside this machine is asked.
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tasks import cpu, fetch_models, models
from tasks.settings import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

SHA = "a" * 40
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b'{"x": 1}',
    "model.safetensors.index.json": json.dumps(
        {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    ).encode(),
    "one.safetensors": b"1" * 100,
    "two.safetensors": b"2" * 300_000,
    "original/consolidated.pth": b"never",
}
REFUSED = {"org/gated": (403, "GatedRepo"), "org/limited": (429, ""), "org/none": (404, "RepoNotFound")}
pytestmark = pytest.mark.real


class Hub(BaseHTTPRequestHandler):
    """As much of the hub's API as a snapshot takes."""

    protocol_version = "HTTP/1.1"
    asked: list[str]

    def answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_GET(self) -> None:
        self.asked.append(f"{self.command} {self.path} {self.headers.get('Range', '')}".strip())
        path = self.path.partition("?")[0]
        name = "/".join(path.removeprefix("/api/models").split("/")[1:3])
        if name in REFUSED:
            status, code = REFUSED[name]
            self.answer(status, b"{}", X_Error_Code=code, X_Error_Message=code, Content_Type="application/json")
        elif path.startswith("/api/models/"):
            listed = {"id": name, "sha": SHA, "siblings": [{"rfilename": file} for file in FILES]}
            if "/tree/" in path:
                whole = [{"type": "file", "path": f, "size": len(b), "oid": f} for f, b in FILES.items()]
                self.answer(200, json.dumps(whole).encode(), Content_Type="application/json")
            else:
                self.answer(200, json.dumps(listed).encode(), Content_Type="application/json")
        elif (file := path.split(f"/{SHA}/")[-1]) not in FILES:
            self.answer(404, b"{}")
        else:
            body = FILES[file]
            start = (
                int(self.headers["Range"].removeprefix("bytes=").partition("-")[0]) if self.headers.get("Range") else 0
            )
            self.answer(206 if start else 200, body[start:], X_Repo_Commit=SHA, ETag=f'"{file.replace("/", "-")}"',
                        Accept_Ranges="bytes", Content_Range=f"bytes {start}-{len(body) - 1}/{len(body)}")  # fmt: skip

    do_HEAD = do_GET  # noqa: N815 - http.server looks for this name

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class has it so
        """Say nothing."""


@pytest.fixture
def hub() -> Iterator[str]:
    Hub.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def fetch(folder: Path, endpoint: str, *names: str) -> dict[str, Any]:
    built = cpu.ready(Path(os.environ.get("E2E_REAL_BUILD") or ROOT / "build") / "cpu")
    if built is None:
        pytest.skip("no CPU environment: its huggingface_hub is what is tried here")
    (folder / "question.json").write_text(json.dumps({"models": names, "result": str(folder / "answers.json")}))
    env = {
        "PATH": os.environ["PATH"], "HOME": str(folder), "HF_HOME": str(folder / "hf"), "HF_ENDPOINT": endpoint,
        "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_XET": "1",
    }  # fmt: skip
    argv = [str(built.python), str(ROOT / "containers/fetch_models.py"), str(folder / "question.json")]
    done = subprocess.run(argv, env=env, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode in (0, 1), done.stderr
    return json.loads((folder / "answers.json").read_text())


def test_a_snapshot_is_fetched_whole_kept_and_completed(tmp_path: Path, hub: str) -> None:
    environ = {"HF_HOME": str(tmp_path / "hf")}
    assert "not in" in (models.lacking("org/small", environ) or "")
    assert "path" in fetch(tmp_path, hub, "org/small")["org/small"]
    assert models.lacking("org/small", environ) is None
    assert not any("consolidated" in line for line in Hub.asked)

    Hub.asked.clear()
    fetch(tmp_path, hub, "org/small")
    assert [line for line in Hub.asked if line.startswith("GET") and "/resolve/" in line] == []

    # as an interruption leaves it: no link, a part of the file under another name
    home = tmp_path / "hf/hub/models--org--small"
    (home / "snapshots" / SHA / "two.safetensors").unlink()
    (home / "blobs/two.safetensors").rename(home / "blobs/two.safetensors.1234abcd.incomplete")
    assert "lacks 1 of 2 weight files, first two.safetensors" in (models.lacking("org/small", environ) or "")
    Hub.asked.clear()
    fetch(tmp_path, hub, "org/small")
    assert models.lacking("org/small", environ) is None
    (got,) = [line for line in Hub.asked if line.startswith("GET") and "/resolve/" in line]
    assert "two.safetensors" in got


def test_each_refusal_has_its_word_and_a_rate_limit_ends_the_asking(tmp_path: Path, hub: str) -> None:
    found = fetch(tmp_path, hub, "org/gated", "org/none", "org/limited", "org/small")
    assert {name: answer["error"]["kind"] for name, answer in found.items()} == {
        "org/gated": "gated", "org/none": "missing", "org/limited": "rate_limit"
    }  # fmt: skip
    assert fetch(tmp_path, "http://127.0.0.1:9", "org/small")["org/small"]["error"]["kind"] == "network"
    assert {answer["error"]["kind"] for answer in found.values()} <= set(fetch_models.REMEDY)
