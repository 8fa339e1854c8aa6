"""Import probe: the files that each interpreter of a run takes the packages under test from.

`probe.py SPEC` runs inside the runtime, under the agent, exactly as a case does. SPEC is JSON:
{"interpreters": {role: {"candidates": [path], "mode": "import" | "locate", "modules": []}}, "timeout_s", "result"}
Each role is asked in its own process with a time limit, and answers through a file, not through stdout, where
libraries print. Roles that only locate never import: the driver's and the generation worker's environments lack
Transformer Engine, and a failing import there says nothing about the change (NeMo-RL docker/Dockerfile, venvs.py).
"""

import importlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import traceback


def look(mode: str, module: str) -> dict:
    """Return {"path", "namespace", "version"} of a module, or {"error": {...}} with the deepest frame."""
    try:
        if mode == "import":
            found = importlib.import_module(module)
            path, version = getattr(found, "__file__", None), getattr(found, "__version__", None)
        else:
            spec = importlib.util.find_spec(module)
            path, version = (spec.origin if spec else None), None
            if spec is None:
                raise ModuleNotFoundError(f"No module named {module!r}", name=module)  # noqa: TRY301
        parent = sys.modules.get(module.partition(".")[0])
        return {
            "path": path and os.path.realpath(path),
            "version": version if isinstance(version, str) else None,
            "namespace": [os.path.realpath(p) for p in getattr(parent, "__path__", [])],
        }
    except BaseException as error:  # noqa: BLE001
        frames = [
            [os.path.realpath(f.filename), f.lineno, f.name]
            for f in traceback.extract_tb(error.__traceback__)
            if "importlib" not in f.filename and f.filename != __file__
        ]
        if isinstance(error, SyntaxError) and error.filename:  # the compiler has no frame in the file it read
            frames.append([os.path.realpath(error.filename), error.lineno, "<module>"])
        return {
            "error": {
                "type": type(error).__name__,
                "text": str(error)[:2000],
                "missing": getattr(error, "name", None) if isinstance(error, ImportError) else None,
                "frame": frames[-1] if frames else None,
                "frames": [frame[0] for frame in frames],
            }
        }


def child(mode: str, result: str, modules: list) -> None:
    """Look at the modules in this interpreter and write the answer to `result`."""
    answer = {
        "executable": sys.executable,
        "python": sys.version.split()[0],
        "modules": {module: look(mode, module) for module in modules},
    }
    with open(result, "w", encoding="utf-8") as out:
        json.dump(answer, out)


def ask(role: dict, timeout_s: float) -> dict:
    """Return one role's answer, or {"error": text} when its interpreter is missing, hangs or dies."""
    found = next((p for p in map(shutil.which, role["candidates"]) if p), None)
    if found is None:
        return {"error": f"no interpreter: none of {', '.join(role['candidates'])} exists"}
    with tempfile.TemporaryDirectory() as folder:
        result = os.path.join(folder, "answer.json")
        argv = [found, os.path.abspath(__file__), "child", role["mode"], result, *role["modules"]]
        try:
            done = subprocess.run(argv, stdin=subprocess.DEVNULL, timeout=timeout_s, check=False)
        except subprocess.TimeoutExpired:
            return {"error": f"{found}: importing {', '.join(role['modules'])} took longer than {timeout_s:.0f} s"}
        except OSError as error:
            return {"error": f"{found}: {error.strerror}"}
        try:
            with open(result, encoding="utf-8") as answer:
                return {**json.load(answer), "first_choice": found == shutil.which(role["candidates"][0])}
        except (OSError, ValueError):
            return {"error": f"{found}: ended with rc {done.returncode} and no answer"}


def main(argv: list) -> int:
    """Answer the spec, or, as `child`, one interpreter's part of it."""
    if argv[0] == "child":
        child(argv[1], argv[2], argv[3:])
        return 0
    with open(argv[0], encoding="utf-8") as source:
        spec = json.load(source)
    answers = {role: ask(what, spec["timeout_s"]) for role, what in spec["interpreters"].items()}
    part = spec["result"] + ".part"
    with open(part, "w", encoding="utf-8") as out:
        json.dump(answers, out, indent=1, sort_keys=True)
    os.replace(part, spec["result"])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
