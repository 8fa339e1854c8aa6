"""Write down where every process of a run takes megatron.bridge, megatron.core and nemo_rl from.

This folder is the last of ours on PYTHONPATH, so Ray workers, which inherit it, load this file, too: a probe before
the run cannot see what a worker with its own environment imports later. Each process appends lines
`{"module", "path", "process", "pid"}` to its own file in $E2E_ORIGINS. Nothing is imported earlier than it would be,
and a sitecustomize that this one hides is executed afterwards.
"""

import importlib.machinery
import importlib.util
import json
import os
import sys

WATCHED = ("megatron.bridge", "megatron.core", "nemo_rl")


class _Watch:
    """A finder that never finds: it notes what the ordinary path search is about to return."""

    def find_spec(self, name, path=None, target=None):  # noqa: ANN001, ANN202 - the protocol's, any Python
        if name in WATCHED:
            spec = None
            for finder in sys.meta_path:
                if finder is not self and hasattr(finder, "find_spec"):
                    spec = finder.find_spec(name, path, target)
                    if spec is not None:
                        break
            _note(name, getattr(spec, "origin", None))


def _note(name: str, origin: "str | None") -> None:
    folder = os.environ.get("E2E_ORIGINS", "")
    argv = getattr(sys, "orig_argv", None) or ["?"]
    process = " ".join(os.path.basename(word) for word in argv[:3])[:120]
    line = json.dumps({"module": name, "path": origin or "", "process": process, "pid": os.getpid()})
    try:
        with open(os.path.join(folder, f"{os.uname().nodename}.{os.getpid()}.jsonl"), "a", encoding="utf-8") as out:
            out.write(line + "\n")
    except OSError as error:  # a run must not die of its witness; the missing line is noticed by the verdict
        print(f"e2e origins: cannot write to {folder}: {error}", file=sys.stderr)


if os.environ.get("E2E_ORIGINS"):
    sys.meta_path.insert(0, _Watch())

_here = os.path.dirname(os.path.abspath(__file__))
_rest = [p for p in sys.path if os.path.abspath(p or ".") != _here]
_hidden = importlib.machinery.PathFinder.find_spec("sitecustomize", _rest)
if _hidden is not None and _hidden.loader is not None:
    _module = importlib.util.module_from_spec(_hidden)
    sys.modules["sitecustomize"] = _module
    _hidden.loader.exec_module(_module)
