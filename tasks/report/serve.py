"""`doit report open=1`: the report folder on this machine's own address until Ctrl-C."""

from __future__ import annotations

import os
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

HERE = "127.0.0.1"


class _Files(SimpleHTTPRequestHandler):
    """The files of one folder: no listing, no log, and no answer to another host's name (DNS rebinding)."""

    def send_head(self) -> Any:
        """Refuse what was not asked of this machine by its own name."""
        if (self.headers.get("Host") or "").rpartition(":")[0] not in (HERE, "localhost"):
            return self.send_error(403)
        return super().send_head()

    def list_directory(self, path: str | os.PathLike[str]) -> Any:
        """Refuse."""
        return self.send_error(404)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name is the library's
        """Say nothing."""


def server(folder: Path, port: int = 0) -> ThreadingHTTPServer:
    """Return a server of `folder` on a free port of this machine only."""
    return ThreadingHTTPServer((HERE, port), partial(_Files, directory=os.fspath(folder)))


def serve(folder: Path, page: str) -> None:
    """Serve until Ctrl-C; a browser is opened where there is a display, text browsers are left alone."""
    with server(folder) as serving:
        address = f"http://{HERE}:{serving.server_port}/{page}"
        print(f"Open: {address} (Ctrl-C ends)", flush=True)
        if os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
            import webbrowser

            webbrowser.open(address)
        try:
            serving.serve_forever()
        except KeyboardInterrupt:
            print()
