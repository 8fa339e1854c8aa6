"""Write the pages and schemas that follow from the code: `python docs/generate.py`; `--check` only tells what is stale.

Nothing here is written by hand twice: settings, commands, keys, levels, signatures and schemas are read from the
modules that use them. tests/test_docs.py fails while a generated file is not what this program would write.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent))


def levels_schema() -> str:
    """Return the JSON Schema of levels.yaml, for editors; what needs more than one key is checked by tasks.levels."""
    from tasks.levels_models import FileModel

    schema = _plain(FileModel.model_json_schema())
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "urn:nemo-rl-e2e:levels:1",
        "title": "levels.yaml of nemo-rl-e2e, version 1",
    }
    return json.dumps({**head, **schema}, indent=1) + "\n"


def _plain(node: Any) -> Any:
    """Return a schema without the titles that pydantic derives from names, and durations as people write them."""
    if isinstance(node, list):
        return [_plain(item) for item in node]
    if not isinstance(node, dict):
        return node
    kept = {k: _plain(v) for k, v in node.items() if not (k == "title" and isinstance(v, str))}
    if isinstance(kept.get("default"), float):
        kept["default"] = duration(kept["default"])
    return kept


def duration(seconds: float) -> str:
    """Return 2700.0 as 45m."""
    return f"{seconds / 60:g}m" if seconds >= 60 else f"{seconds:g}s"


HEAD = "<!-- written by docs/generate.py: change the code it is read from, not this file -->\n"


def settings_page() -> str:
    """Return the settings with the variable that may carry each."""
    from tasks import settings

    rows = [
        (
            f"`{name}=`",
            f"`{settings.ENVIRONMENT[name]}`" if name in settings.ENVIRONMENT else "",
            setting.text,
        )
        for name, setting in settings.SETTINGS.items()
    ]
    text = (
        "Words `name=value` anywhere on the command line; the same names in `site.yaml` beside `levels.yaml`. The command "
        "line wins over the environment, the environment over `site.yaml`. An unknown name is an error. A name with a dot, "
        "or one that begins with `+` or `~`, is a Hydra override and reaches the run as typed.\n\n"
        f"`runtime` is one of {', '.join(settings.RUNTIMES)}. `E2E_NOTIFY_URL` is a webhook that gets the answer as JSON; "
        "it is read from the environment alone, because such an address is a secret.\n"
    )
    return _page("Settings", text, _table(("setting", "environment", "what"), rows))


def commands_page() -> str:
    """Return our commands with their own words, then the tasks of dodo.py with theirs."""
    import ast
    import importlib
    import tomllib

    root = DOCS.parent
    rows = []
    plugins = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["doit"]["plugins"]["command"]
    for name, where in sorted(plugins.items()):
        module, _, attribute = where.partition(":")
        command = getattr(importlib.import_module(module), attribute)
        usage = command.doc_usage if name != "run" else "TASK ... [name=value ...]"
        rows.append((f"`doit {name}`", f"`{usage}`" if usage.strip() else "", command.doc_purpose))
    tasks = [
        (f"`{found.name.removeprefix('task_')}`", (ast.get_docstring(found) or "").partition("\n")[0])
        for found in ast.parse((root / "dodo.py").read_text()).body
        if isinstance(found, ast.FunctionDef) and found.name.startswith("task_")
    ]
    return _page(
        "Commands",
        "`doit NAME`: a task or command of this project; doit's own are in `doit help`. Exit status: 0 Pass, 1 Fail, "
        "2 Blocked or a mistake, 130 and 143 after a signal. The last two lines are the answer and the report.\n",
        _table(("command", "arguments", "what"), rows),
        "## Tasks\n",
        _table(("function of dodo.py", "what"), tasks),
    )


def keys_page() -> str:
    """Return the keys of levels.yaml, a section for each model."""
    schema = json.loads(levels_schema())
    parts = [("The file", schema)]
    parts += [(part["description"].rstrip("."), part) for part in schema["$defs"].values()]
    sections = []
    for title, part in parts:
        needed = part.get("required", [])
        rows = [
            (f"`{key}`" + (" *" if key in needed else ""), _kind(value), _default(value), value.get("description", ""))
            for key, value in part["properties"].items()
        ]
        sections += [f"## {title}\n", _table(("key", "value", "default", "what"), rows)]
    text = (
        "Editors complete and check these by the first line of the file; the same as "
        "[JSON Schema](../schema/levels-1.json). A key with * is needed. One word may stand for a list of one. Unknown keys "
        "are errors, and `doit levels` names every mistake in a file with its line.\n"
    )
    return _page("Keys of levels.yaml", text, *sections)


def report_page() -> str:
    """Return what report.json holds, a section for each object of its schema."""
    schema = json.loads((DOCS / "schema/report-1.json").read_text())
    sections = []
    for title, part in [("report.json", schema), *schema["$defs"].items()]:
        if "properties" not in part:
            continue
        needed = part.get("required", [])
        rows = [
            (f"`{key}`" + (" *" if key in needed else ""), _kind(value), value.get("description", ""))
            for key, value in part["properties"].items()
        ]
        sections += [f"## {title}\n", part.get("description", "") + "\n", _table(("key", "value", "what"), rows)]
    text = "[JSON Schema](../schema/report-1.json), version 1. A key with * is always there.\n"
    return _page("report.json", text, *sections)


def signatures_page() -> str:
    """Return the lines of a log that are known, and what each means."""
    from tasks.triage import signatures

    rows = [(f"`{one.id}`", one.kind, one.remedy, one.source) for one in signatures.shipped()]
    text = (
        "What a line of a run's log is known to mean, in the order in which they are tried. `change` speaks against the "
        "change, `undecided` asks for a baseline, `infrastructure` is tried once more, `environment` and `configuration` "
        "are Blocked, a `warning` is repeated in the report.\n"
    )
    return _page("Signatures", text, _table(("id", "kind", "what to do", "printed by"), rows))


def levels_page() -> str:
    """Return the levels with what each proves and does not."""
    from tasks import levels

    sections = []
    for level in levels.load(DOCS.parent / "levels.yaml").levels.values():
        sections.append(f"## {level.id}: {level.title}\n")
        sections += [f"Proves: {level.proves.rstrip('.')}.\n"] if level.proves else []
        sections += ["Does not prove:\n\n" + "".join(f"- {text}\n" for text in level.does_not_prove)]
        sections += [f"Called for when {level.required_when.rstrip('.')}.\n"] if level.required_when else []
        rows = [
            (
                f"`{c.id}`" + (" (optional)" if c.optional else ""),
                c.title,
                str(c.gpus),
                f"{c.minutes:g}",
                c.compares or "-",
            )
            for c in level.cases
        ]
        sections.append(_table(("case", "what", "GPUs", "minutes", "compares"), rows))
    text = (
        "Read from `levels.yaml`; `doit levels` shows the same with the state of each case. A level is up to date when its "
        "unit suites and its cases that are not optional pass. The Bridge's own CI has unrelated tiers called L0, L1, L2.\n"
    )
    return _page("Levels", text, *sections)


def _page(title: str, *parts: str) -> str:
    return "\n".join([HEAD, f"# {title}\n", *parts]).rstrip() + "\n"


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join(f"| {' | '.join(_cell(cell) for cell in row)} |\n" for row in lines)


def _cell(text: str) -> str:
    return re.sub(r"<(?=[A-Za-z/!])", "&lt;", " ".join(text.split()).replace("|", "\\|"))


def _kind(value: dict[str, Any]) -> str:
    """Return the type of a schema in a word or two."""
    if "$ref" in value:
        return value["$ref"].rpartition("/")[2].removesuffix("Model").lower()
    if "anyOf" in value:
        kinds = dict.fromkeys(_kind(part) for part in value["anyOf"] if part.get("type") != "null")
        return "list" if list(kinds) == ["string", "list of string"] else " or ".join(kinds)
    if "const" in value or "enum" in value:
        return ", ".join(str(word) for word in value.get("enum", [value.get("const")]))
    if value.get("pattern", "").endswith("s)?$"):
        return "duration"
    if value.get("type") == "array":
        inner = value.get("items", {})
        return f"list of {_kind(inner)}" if inner else "list"
    if isinstance(value.get("additionalProperties"), dict) and value["additionalProperties"]:
        return f"name: {_kind(value['additionalProperties'])}"
    kind = value.get("type", "any")
    return " or ".join(kind) if isinstance(kind, list) else kind


def _default(value: dict[str, Any]) -> str:
    given = value.get("default")
    return "" if given in (None, "", [], {}) else f"`{json.dumps(given).strip(chr(34))}`"


GENERATED: dict[str, Callable[[], str]] = {
    "schema/levels-1.json": levels_schema,
    "levels.md": levels_page,
    "reference/settings.md": settings_page,
    "reference/commands.md": commands_page,
    "reference/levels.md": keys_page,
    "reference/report.md": report_page,
    "reference/signatures.md": signatures_page,
}


def stale() -> list[str]:
    """Return the generated files that are not what the code says."""
    return [
        name for name, made in GENERATED.items() if not (DOCS / name).is_file() or (DOCS / name).read_text() != made()
    ]


def main(words: list[str]) -> int:
    """Write what is stale, or with --check only name it; 1 if anything was."""
    found = stale()
    for name in found:
        print(f"{'stale' if '--check' in words else 'written'}: docs/{name}")
        if "--check" not in words:
            (DOCS / name).parent.mkdir(parents=True, exist_ok=True)
            (DOCS / name).write_text(GENERATED[name](), encoding="utf-8")
    return 1 if found and "--check" in words else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
