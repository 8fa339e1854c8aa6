"""An edit makes a proof stale unless it cannot reach what the proof computed."""

from __future__ import annotations

import hashlib

import pytest

from tasks import proof_trace

MODELS = "src/megatron/bridge/models/"
MINE, OTHER, SHARED = f"{MODELS}qwen/qwen2_bridge.py", f"{MODELS}llama/llama_bridge.py", f"{MODELS}gpt_provider.py"
CONVERSION, UNUSED = f"{MODELS}conversion/utils.py", "src/megatron/bridge/recipes/x.py"
SOURCE = "RATE = 1\n\n@register('a')\nclass A:\n    size: int = 3\n\n    def f(self, n=2):\n        return n\n"
TREE = {
    MINE: SOURCE, OTHER: SOURCE, SHARED: SOURCE, CONVERSION: SOURCE, UNUSED: SOURCE,
    "src/megatron/bridge/data.json": "{}", "pyproject.toml": "",
}  # fmt: skip
TRACE = {MINE: "executed", OTHER: "imported", SHARED: "imported", CONVERSION: "imported"}
BODY = SOURCE.replace("return n", "return n + 1")


def digest_of(folder, tree):
    for path, text in tree.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    proof_trace.skeleton.cache_clear()
    return proof_trace.digest({p: hashlib.sha256(t.encode()).hexdigest() for p, t in tree.items()}, folder, TRACE)


@pytest.mark.parametrize(
    ("change", "stale"),
    [
        ({MINE: BODY}, True),
        ({MINE: SOURCE + "# words"}, True),
        ({SHARED: BODY}, True),  # outside a family's folder: imported is enough
        ({CONVERSION: BODY}, True),
        ({OTHER: BODY}, False),
        ({OTHER: "# words\n" + SOURCE}, False),
        ({UNUSED: BODY}, False),
        # what runs when a module is imported counts everywhere
        ({OTHER: SOURCE.replace("RATE = 1", "RATE = 2")}, True),
        ({OTHER: SOURCE.replace("size: int = 3", "size: int = 4")}, True),
        ({OTHER: SOURCE.replace("n=2", "n=3")}, True),
        ({OTHER: SOURCE.replace("register('a')", "register('b')")}, True),
        ({OTHER: BODY + "def ("}, True),  # it does not even parse
        ({"src/megatron/bridge/new.py": ""}, True),
        ({"src/megatron/bridge/data.json": "[]"}, True),
        ({"pyproject.toml": "[project]"}, True),
    ],
)
def test_what_makes_a_proof_stale(tmp_path, change, stale):
    before = digest_of(tmp_path / "a", TREE)
    assert (digest_of(tmp_path / "b", {**TREE, **change}) != before) is stale
