"""Reads a NeMo-RL checkout the way its scripts do, with plain YAML: for tests that hold levels.yaml against it.

OmegaConf is not installed here, so `defaults` chains are merged by hand; interpolations stay as text and decide nothing.
"""

from __future__ import annotations

import ast
import copy
import re
from functools import cache
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from tasks.levels import Case

# The config of an entry point that is called without --config (examples/run_*.py at 7ea279abf).
DEFAULTS = {
    "run_sft.py": "examples/configs/sft.yaml",
    "run_dpo.py": "examples/configs/dpo.yaml",
    "run_grpo.py": "examples/configs/grpo_math_1B.yaml",
    "run_vlm_grpo.py": "examples/configs/vlm_grpo_3B.yaml",
}
ABSENT = object()


def script_text(root: Path, case: Case) -> str:
    """Return the script with its line continuations joined and the variables of the checkout filled in."""
    if case.script is None:
        return ""
    path = root / case.script
    text = path.read_text().replace("\\\n", " ")
    if "test_suites" in case.script:
        config = case.script.replace("tests/test_suites", "examples/configs/recipes").removesuffix(".sh") + ".yaml"
        text = text.replace("$CONFIG_PATH", config)
    values = dict(re.findall(r"^(\w+)=([^\s$`(]+)$", text, re.MULTILINE))
    values |= dict(re.findall(r"^(\w+)=\$\{\w+:-([^}]+)\}$", text, re.MULTILINE))
    values |= {
        "PROJECT_ROOT": ".",
        "model_name": "Qwen/Qwen2.5-0.5B",
        "temp_config": "examples/configs/grpo_math_1B_megatron.yaml",
        "EXEMPLAR_CONFIG": "examples/configs/grpo_math_1B_megatron.yaml",
    }
    values |= {k: v.strip('"') for k, v in re.findall(r'^(\w+)="?\$PROJECT_ROOT/([^"\s]+)"?$', text, re.MULTILINE)}
    for name, value in sorted(values.items(), key=lambda item: -len(item[0])):
        text = text.replace(f"${{{name}}}", value.strip('"')).replace(f"${name}", value.strip('"'))
    return text.replace('"./', '"').replace(" ./", " ")


def words_of(root: Path, case: Case) -> list[str]:
    """Return the words that reach the training program from the script or command, before the case's overrides."""
    if case.command is not None:
        return list(case.command)
    found = re.findall(r"""(?:^|\s)((?:\+\+|\+|~)?[A-Za-z_][\w.]*(?:\.|^)[\w.]*=[^\s]+|--config\s+[^\s]+|~[a-z][\w.]+)""",
                       script_text(root, case))  # fmt: skip
    return [w.replace('"', "") for word in found for w in word.split()]


def config_of(root: Path, words: Iterable[str], entry_text: str) -> dict[str, Any]:
    """Return the merged config that the words name (the last --config counts), or the entry point's own."""
    listed = list(words)
    names = [listed[i + 1] for i, word in enumerate(listed[:-1]) if word == "--config"]
    if names:
        return load(root / names[-1].strip('"'))
    entry = next(name for name in DEFAULTS if name in entry_text)
    return load(root / DEFAULTS[entry])


def load(path: Path) -> dict[str, Any]:
    """Return a config with what it inherits by `defaults`, a copy to change at will."""
    return copy.deepcopy(_loaded(path.resolve()))


@cache
def _loaded(path: Path) -> dict[str, Any]:
    value = yaml.load(path.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506 - safe either way
    parents = value.pop("defaults", None) or []
    merged: dict[str, Any] = {}
    for parent in [parents] if isinstance(parents, str) else parents:
        merged = merge(merged, load(path.parent / parent))
    return merge(merged, value)


def merge(base: Any, other: Any) -> Any:
    """Return `other` over `base`, key by key."""
    if isinstance(base, dict) and isinstance(other, dict):
        return {**base, **{k: merge(base.get(k), v) for k, v in other.items()}}
    return other


def get(config: Any, key: str) -> Any:
    """Return the value at a dotted key, or ABSENT."""
    for part in key.split("."):
        if not isinstance(config, dict) or part not in config:
            return ABSENT
        config = config[part]
    return config


def apply(config: dict[str, Any], words: Iterable[str]) -> list[str]:
    """Apply overrides in place as Hydra does in struct mode; return those that it would refuse."""
    refused, skip = [], False
    for word in words:
        if skip or word == "--config":
            skip = word == "--config"
            continue
        match = re.fullmatch(r"(\+\+|\+|~)?([A-Za-z_][\w.]*)(?:=(.*))?", word, re.DOTALL)
        if not match or ("=" not in word and match[1] != "~"):
            continue
        mark, key, text = match.groups()
        if mark in (None, "~") and get(config, key) is ABSENT:
            refused.append(word)
            continue
        node = config
        *parents, last = key.split(".")
        for part in parents:
            if not isinstance(node.get(part), dict):
                node[part] = {}
            node = node[part]
        if mark == "~":
            node.pop(last, None)
        else:
            node[last] = yaml.safe_load(text) if text and "{" not in text else text
    return refused


def upstream_checks(root: Path, case: Case) -> set[str]:
    """Return the expressions that the script gives check_metrics.py, normalised, without those with unfilled variables."""
    found = set()
    for call in re.findall(r"check_metrics\.py (.*)", script_text(root, case)):
        for single, double in re.findall(r"""'([^']+)'|"((?:[^"\\]|\\.)+)\"""", call):
            text = single or double.replace('\\"', '"')
            if "data[" in text and "$" not in text:
                found.add(normal(text))
    return found


def normal(expression: str) -> str:
    """Return an expression in one spelling."""
    return ast.unparse(ast.parse(expression.strip(), mode="eval"))
