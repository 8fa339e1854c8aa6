"""The documentation: what is generated is what the code says, what is published describes what is written."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from tasks import demo, settings

ROOT = settings.ROOT
DOCS = ROOT / "docs"


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


GENERATE = generator()


@pytest.mark.parametrize("name", GENERATE.GENERATED)
def test_generated_files_are_what_the_code_says(name: str) -> None:
    assert (DOCS / name).read_text() == GENERATE.GENERATED[name](), "run: python docs/generate.py"


def every_key(schema: dict) -> list[tuple[str, str]]:
    parts = {"FileModel": schema, **schema["$defs"]}
    return [(f"{m}.{k}", v.get("description", "")) for m, part in parts.items() for k, v in part["properties"].items()]


def test_every_key_of_levels_yaml_is_explained() -> None:
    assert not [key for key, text in every_key(json.loads(GENERATE.levels_schema())) if not text]


@pytest.mark.parametrize("path", [ROOT / "levels.yaml", demo.LEVELS], ids=["shipped", "demo"])
def test_levels_files_name_their_schema_and_follow_it(path: Path) -> None:
    first = path.read_text().splitlines()[0]
    assert first.startswith("# yaml-language-server: $schema=")
    schema = (path.parent / first.partition("=")[2]).resolve()
    assert schema == DOCS / "schema/levels-1.json"
    jsonschema = pytest.importorskip("jsonschema")
    loaded = json.loads(json.dumps(yaml.safe_load(path.read_text())))
    check = jsonschema.Draft202012Validator(json.loads(schema.read_text()))
    assert [e.message for e in check.iter_errors(loaded)] == []
    loaded["levels"]["0"]["titel"] = "x"
    loaded["suites"]["x"] = {"repo": "bridge", "paths": ["a"], "timeout": 5}
    assert len(list(check.iter_errors(loaded))) == 2
