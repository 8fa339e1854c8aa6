"""Resolve training calls with NeMo-RL's own config loader, before anything is started: no GPU, no Ray, no model.

`resolve.py QUESTION` runs inside the runtime, under the agent, in the driver's interpreter, in the NeMo-RL tree.
QUESTION is JSON: {"cases": {id: [{"program", "arguments", "unread", "variables"}]}, "validate", "secrets", "result"}.
The answer is {id: [call + {"config_file", "config" | null, "errors": [{"kind", "text", "key", "keys"}], "notes"}]}.

What decides is the checkout: load_config with `defaults`, parse_hydra_overrides, OmegaConf's interpolations, and, with
"validate", the MasterConfig that the program itself imports. A program's default config and its resolvers are read from
its source, because importing it would start Ray and torch.
"""

import argparse
import ast
import copy
import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

RESOLVERS = {  # what programs of before `register_omegaconf_resolvers` define for themselves, by lambda
    "mul": lambda a, b: a * b,
    "add": lambda a, b: a + b,
    "div": lambda a, b: a / b,
    "max": max,
}
HIDDEN = ("api_key", "password", "secret", "access_key", "hf_token", "auth_token")


class RefusedError(Exception):
    """The checkout does not take the call: kind, text, and the key that it is about."""

    def __init__(self, kind: str, text: str, key: str = "", keys: Iterable = ()) -> None:
        super().__init__(text)
        self.answer = {"kind": kind, "text": text[:4000], "key": key, "keys": list(keys)}


def program_facts(program: str) -> dict:
    """Return what a program's source says: its default config file, its MasterConfig's module, its resolvers."""
    if not os.path.isfile(program):
        raise RefusedError("program", f"not in this NeMo-RL: {program}")
    with open(program, encoding="utf-8") as source:
        tree = ast.parse(source.read(), program)
    facts = {"config": None, "module": None, "registers": False, "resolvers": []}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and any(name.name == "MasterConfig" for name in node.names):
            facts["module"] = node.module
        elif isinstance(node, ast.Call):
            words = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if called == "join" and words and words[-1].endswith(".yaml") and facts["config"] is None:
                facts["config"] = os.path.join(os.path.dirname(program), *words)
            facts["registers"] |= called == "register_omegaconf_resolvers"
            if called == "register_new_resolver" and words:
                facts["resolvers"].append(words[0])
    return facts


def loader() -> ModuleType:
    """Return NeMo-RL's config module; Refused where the checkout has none that can be asked."""
    try:
        return importlib.import_module("nemo_rl.utils.config")
    except Exception as error:
        raise RefusedError(
            "loader", f"nemo_rl.utils.config cannot be imported: {type(error).__name__}: {error}"
        ) from error


def ask(module: ModuleType, name: str) -> Callable:
    """Return a function of NeMo-RL's config module; Refused where this revision has none of that name."""
    if not hasattr(module, name):
        raise RefusedError("loader", f"not in this NeMo-RL: nemo_rl.utils.config.{name}")
    return getattr(module, name)


LOADED = {}  # config file -> what load_config made of it: many calls share one, and reading it is what takes time


def load(module: ModuleType, path: str) -> Any:
    """Return a config file as NeMo-RL's loader has it, a copy to change at will."""
    if path not in LOADED:
        try:
            LOADED[path] = ask(module, "load_config")(path)
        except RefusedError:
            raise
        except Exception as error:
            raise RefusedError("config", f"{path}: {type(error).__name__}: {error}", path) from error
    return copy.deepcopy(LOADED[path])


def register(names: Iterable) -> None:
    """Register the resolvers that a program defines for itself."""
    for name in names:
        from omegaconf import OmegaConf

        if not OmegaConf.has_resolver(name):
            OmegaConf.register_new_resolver(name, RESOLVERS[name])


def as_plain(config: Any, *, resolve: bool) -> dict:
    """Return the dictionary that a config is, interpolations resolved or as written."""
    if isinstance(config, dict):  # a checkout whose loader needs no OmegaConf
        return config
    from omegaconf import OmegaConf

    return OmegaConf.to_container(config, resolve=resolve)


def keys_of(config: Any, prefix: str = "") -> list:
    """Return every dotted key of a config."""
    found = []
    for key, value in (config or {}).items() if isinstance(config, dict) else ():
        found.append(prefix + str(key))
        found += keys_of(value, f"{prefix}{key}.")
    return found


def refused_overrides(module: ModuleType, path: str, overrides: list) -> list:
    """Return one error for each override that the loader does not take after those before it."""
    errors, config = [], load(module, path)
    known = keys_of(as_plain(config, resolve=False))
    for word in overrides:
        try:
            config = module.parse_hydra_overrides(config, [word])
        except Exception as error:  # noqa: BLE001
            key = word.lstrip("+~").partition("=")[0]
            errors.append(RefusedError("override", f"{word}: {error}", key, known).answer)
    return errors


def resolve(call: dict, answer: dict, *, validate: bool) -> None:
    """Fill `answer` with what one call comes to; raise Refused where it comes to nothing."""
    facts = program_facts(call["program"])
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--config", default=facts["config"])
    known, overrides = parser.parse_known_args(call["arguments"])
    if known.config is None:
        raise RefusedError("config", f"{call['program']}: no --config, and no default can be read from its source")
    answer["config_file"] = known.config
    if call["unread"]:
        what = "not resolved" if "e2e-unread" in known.config else "not judged"
        answer["notes"].append(f"config {what}: the script computes {', '.join(call['unread'])}")
        if "e2e-unread" in known.config:
            return
    if not os.path.isfile(known.config):
        raise RefusedError("config", f"not in this NeMo-RL: {known.config}", known.config)
    module = loader()
    if facts["registers"]:
        ask(module, "register_omegaconf_resolvers")()
    register(name for name in facts["resolvers"] if name in RESOLVERS)
    config = load(module, known.config)
    if overrides:
        apply = ask(module, "parse_hydra_overrides")
        try:
            config = apply(config, overrides)
        except Exception as error:  # noqa: BLE001
            found = refused_overrides(module, known.config, overrides)
            answer["errors"] += found or [RefusedError("override", str(error)).answer]
            return
    try:
        plain = as_plain(config, resolve=True)
    except Exception as error:
        raise RefusedError("interpolation", f"{known.config}: {error}", getattr(error, "full_key", "") or "") from error
    answer["config"] = plain
    if validate and facts["module"] and not call["unread"]:
        try:
            master = importlib.import_module(facts["module"]).MasterConfig
        except Exception as error:  # noqa: BLE001 - says nothing of the config, and the run will say it better
            answer["notes"].append(f"not validated: import {facts['module']}: {type(error).__name__}: {error}"[:500])
            return
        try:
            master(**json.loads(json.dumps(plain)))
        except Exception as error:
            raise RefusedError("validation", f"{facts['module']}.MasterConfig: {error}") from error


def masked(value: Any, secrets: list, name: str = "") -> Any:
    """Return a config without secrets: values of secret variables, and what stands under a key of that kind."""
    if isinstance(value, dict):
        return {str(key): masked(item, secrets, str(key)) for key, item in value.items()}
    if isinstance(value, list):
        return [masked(item, secrets, name) for item in value]
    if isinstance(value, str):
        if value and name.lower().endswith(HIDDEN):
            return "***"
        for secret in secrets:
            value = value.replace(secret, "***")
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def main(argv: list) -> int:
    """Answer every case of the question; one call that cannot be resolved stops no other."""
    with open(argv[0], encoding="utf-8") as source:
        question = json.load(source)
    secrets = [os.environ[name] for name in question["secrets"] if os.environ.get(name)]
    answers = {}
    for case, calls in question["cases"].items():
        answers[case] = []
        for call in calls:
            answer = {**call, "config_file": None, "config": None, "errors": [], "notes": []}
            try:
                resolve(call, answer, validate=question["validate"])
            except RefusedError as error:
                answer["errors"].append(error.answer)
            except Exception:  # noqa: BLE001
                text = "internal error: " + traceback.format_exc(limit=-3)
                answer["errors"].append({"kind": "internal", "text": text[:4000], "key": "", "keys": []})
            answers[case].append(masked(answer, secrets))
    part = question["result"] + ".part"
    with open(part, "w", encoding="utf-8") as out:
        json.dump(answers, out, indent=1, sort_keys=True)
    os.replace(part, question["result"])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
