"""Workers as processes. The driver calls methods over a pipe; what a worker prints travels the same way, in order.

Frames to a worker: (method, arguments). Frames back: ("log", line)..., then ("ok", value) or ("error", summary).
"""

import os
import subprocess
import sys
import tempfile
import time
import traceback
from multiprocessing.connection import Connection, Pipe

CALLS, REFIT = "NRL_CALL_FD", "NRL_REFIT_FD"


class WorkerError(RuntimeError):
    """Raised in the driver when a worker raised; its traceback is in the log already."""


class WorkerDiedError(RuntimeError):
    """Raised in the driver when a worker's process is gone."""


class Worker:
    """One process that runs `python -m module`."""

    def __init__(self, module, name, refit=None, extra_env=None):
        ours, theirs = Pipe()
        fds = [theirs.fileno()] + ([refit.fileno()] if refit else [])
        env = {**os.environ, **(extra_env or {}), CALLS: str(fds[0]), REFIT: str(fds[-1]), "PYTHONUNBUFFERED": "1"}
        self.name, self.pipe, self.stray = name, ours, tempfile.TemporaryFile("w+", errors="replace")
        command = [sys.executable, "-m", module]
        streams = {"stdin": subprocess.DEVNULL, "stdout": self.stray, "stderr": subprocess.STDOUT}
        self.process = subprocess.Popen(command, env=env, pass_fds=fds, **streams)
        theirs.close()

    def _print(self, text):
        for line in text.splitlines():
            print(f"({self.name}[rank=0] pid={self.process.pid}) {line}", flush=True)

    def start(self, method, **arguments):
        """Send a call without waiting for its answer."""
        try:
            self.pipe.send((method, arguments))
        except OSError:
            self._died(method)

    def _died(self, method):
        status = self.process.wait(timeout=10)  # its pipe is closed: it is gone, or going
        self.stray.seek(0)
        self._print(self.stray.read())
        raise WorkerDiedError(f"{self.name} died in {method} (exit status {status})") from None

    def finish(self, method="call"):
        """Wait for the answer to the oldest call and return it."""
        while True:
            try:
                kind, value = self.pipe.recv()
            except (EOFError, OSError):
                self._died(method)
            if kind == "ok":
                return value
            self._print(value)
            if kind == "error":
                raise WorkerError(f"{self.name}.{method}: {value.strip().splitlines()[-1]}")

    def call(self, method, **arguments):
        """Call and wait."""
        self.start(method, **arguments)
        return self.finish(method)

    def close(self):
        """End the process: its pipe closes, it has five seconds, then it is killed."""
        self.pipe.close()
        try:
            self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def start_workers(prefix, *arguments, **keywords):
    """Start a worker with the banners of a worker group and initialise it; return it."""
    print(f"Initializing {prefix} workers: 1 worker", flush=True)
    started, worker_arguments = time.perf_counter(), keywords.pop("init")
    worker = Worker(*arguments, **keywords)
    try:
        worker.call("__init__", **worker_arguments)
    except BaseException:
        worker.close()
        raise
    print(f"  \u2713 1 workers initialized in {time.perf_counter() - started:.2f}s", flush=True)
    return worker


class _Lines:
    """A standard output that sends whole lines as frames."""

    def __init__(self, pipe):
        self.pipe, self.rest = pipe, ""

    def write(self, text):
        *lines, self.rest = (self.rest + text).split("\n")
        for line in lines:
            self.pipe.send(("log", line))
        return len(text)

    def flush(self):
        """Nothing is held back but an unfinished line."""


def refit_channel():
    """Return the pipe on which weights travel between policy and generation."""
    return Connection(int(os.environ[REFIT]))


def serve(kind):
    """Answer calls to one object of class `kind` until the driver closes the pipe."""
    pipe, target = Connection(int(os.environ[CALLS])), None
    sys.stdout = sys.stderr = _Lines(pipe)
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            return
        try:
            if method == "__init__":
                target = kind(**arguments)
            pipe.send(("ok", None if method == "__init__" else getattr(target, method)(**arguments)))
        except Exception:
            pipe.send(("error", traceback.format_exc()))
