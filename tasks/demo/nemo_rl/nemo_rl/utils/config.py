"""Configuration: YAML files with `defaults`, and overrides in Hydra's notation on top."""

from pathlib import Path

import yaml


class OverridesError(Exception):
    """Raised for an override that names a key the configuration does not have."""


def _merge(base, extra):
    for key, value in extra.items():
        base[key] = _merge(base.get(key) or {}, value) if isinstance(value, dict) else value
    return base


def load_config(path):
    """Return the nested dictionary of a YAML file, merged over the file that its `defaults` names."""
    path = Path(path)
    own = yaml.safe_load(path.read_text())
    parent = own.pop("defaults", None)
    return _merge(load_config(path.parent / parent), own) if parent else own


def parse_hydra_overrides(config, overrides):
    """Apply `a.b=value`, `+a.b=value` (new key), `++a.b=value` (either) and `~a.b` (remove) in order, in place."""
    for override in overrides:
        name, _, text = override.partition("=")
        key = name.lstrip("+~")
        *parents, last = key.split(".")
        node = config
        for parent in parents:
            node = node.setdefault(parent, {}) if name.startswith("+") else node.get(parent)
            if not isinstance(node, dict):
                raise OverridesError(f"Failed to parse Hydra overrides: Could not override '{key}'.")
        if name.startswith("+") != (last not in node) and not name.startswith("++"):
            raise OverridesError(f"Failed to parse Hydra overrides: Could not override '{key}'.")
        if name.startswith("~"):
            del node[last]
        else:
            node[last] = yaml.safe_load(text)
    return config
