"""The documentation: what is generated is what the code says, what is published describes what is written."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from tasks import demo, levels, settings

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


# -- every command in the documentation is run, or says what it needs ----------------------------------------------------

PAGES = [
    p for p in (*sorted(DOCS.rglob("*.md")), ROOT / "README.md") if p.relative_to(ROOT).parts[1:2] != ("reference",)
]
NEEDS = re.compile(r"# (needs|takes) .+")


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```sh\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def test_commands_stand_in_blocks_that_are_run_or_say_what_they_need() -> None:
    """Only tutorial.md has blocks without a need: those are run below, in order."""
    for page in PAGES:
        text = page.read_text()
        assert not re.search(r"^```(bash|shell|console)", text, re.MULTILINE), page
        if page.name != "tutorial.md":
            assert [b for b in blocks(page) if not NEEDS.match(b)] == [], page


def test_every_word_after_doit_is_a_task_command_or_setting() -> None:
    """In all pages, also where a block cannot be run here: names that were renamed do not survive in prose."""
    commands = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["doit"]["plugins"]["command"])
    own = {"help", "list", "forget", "ignore", "info", "clean", "dumpdb", "strace", "tabcompletion", "reset-dep"}
    dodo = (ROOT / "dodo.py").read_text()
    tasks = {*re.findall(r"def task_(\w+)", dodo), *re.findall(r'"basename": "(\w+)"', dodo), "rehearse", "baseline"}
    known = levels.load(ROOT / "levels.yaml")
    tasks |= {*known.levels, *(c.id for c in known.cases())}
    for page in PAGES:
        for line in re.findall(
            r"(?:\./doitw|`doit) ([^`\n#]+)", page.read_text().partition("## What it does not do yet")[0]
        ):
            name, *more = line.split()
            stage = name.partition(":")[0]
            assert stage in commands | own | tasks or stage.isupper() or "=" in name or name == "...", (page.name, line)
            for word in more:
                setting, equals, _ = word.partition("=")
                if equals and setting.isidentifier():
                    assert setting in settings.SETTINGS, (page.name, line)


@pytest.mark.slow
def test_the_tutorial_does_what_it_says(tmp_path: Path) -> None:
    """Run its blocks in order in one folder that stands for this project's; exit statuses are those it names."""
    (tmp_path / "build").mkdir()
    (tmp_path / "tasks").symlink_to(ROOT / "tasks")
    stub = tmp_path / "doitw"
    stub.write_text(
        f'#!/bin/bash\nhere=$PWD\ngiven=("${{@/=build\\//=$PWD/build/}}")\ncd "{ROOT}"\n'
        f'exec "{sys.executable}" -m doit "${{given[@]}}" build="$here/build"\n'
    )
    stub.chmod(0o755)
    kept = {k: v for k, v in os.environ.items() if not k.endswith("_REPO") and not k.startswith("E2E_")}
    seen = ""
    for block in blocks(DOCS / "tutorial.md"):
        if NEEDS.match(block):
            continue
        for line in block.splitlines():
            wanted = int(found[1]) if (found := re.search(r"# exit status (\d+)$", line)) else 0
            done = subprocess.run(
                ["bash", "-c", line], cwd=tmp_path, env=kept, capture_output=True, text=True, timeout=300, check=False
            )
            seen += done.stdout
            assert done.returncode == wanted, f"{line}\n{done.stdout}{done.stderr}"
    assert re.search(r"Result: Pass.*\n(.*\n)*.*Result: Fail.*\n(.*\n)*.*Result: Pass", seen)
    assert "src/megatron/bridge/models/conversion/param_mapping.py" in seen  # doit why names the file
    assert len(re.findall(r" run:level0\.grpo_megatron: \.\.\. recorded\n", seen)) == 2  # first Pass and the Fail


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("mkdocs is not installed")
    argv = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", tmp_path]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (tmp_path / "schema/report-1.json").read_bytes() == (DOCS / "schema/report-1.json").read_bytes()
