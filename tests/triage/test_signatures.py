"""Signatures are data: each has a line that it finds, a remedy and a source."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.triage.signatures import KINDS, SignatureError, parse, shipped
from tests.triage.logs import EXAMPLES, MEGATRON, facts

WARNINGS = [
    ("unmapped-parameter", "WARNING: No mapping found for megatron_param: decoder.layers.0.foo"),
    ("missing-hf-key", "WARNING: Can't find model.layers.0.self_attn.out_proj.weight in hf_keys"),
    (
        "whitelisted-shape",
        "WARNING: Shape mismatch for megatron param embedding.weight allowed by whitelist. Skipping.",
    ),
    ("image-mismatch", "WARNING: Container/Code Version Mismatch Detected!"),
    ("incomplete-save", "Checkpoint finalization failed while handling an exception; boom"),
]


@pytest.mark.parametrize(("name", "line"), EXAMPLES, ids=[f"{n}-{i}" for i, (n, _) in enumerate(EXAMPLES)])
def test_known_line_is_found_under_ray_prefix_and_colours(tmp_path: Path, name: str, line: str) -> None:
    kind = next(s.kind for s in shipped() if s.id == name)
    for text in (line, MEGATRON + line, f"\x1b[1m{line}\x1b[0m\r", f"[rank3]: {line}", f"\r 1%\r 2%\r{line}"):
        found = facts(tmp_path, f"noise\n{text}\nnoise\n".encode())
        assert found.first is not None, text
        assert (found.first.signature, found.first.kind, found.first.line, found.first.echoes) == (name, kind, 2, 0)
        assert found.first.remedy
        assert "\x1b" not in found.first.text


@pytest.mark.parametrize(("name", "line"), WARNINGS, ids=[n for n, _ in WARNINGS])
def test_warnings_are_listed_and_are_no_errors(tmp_path: Path, name: str, line: str) -> None:
    log = f"{MEGATRON}WARNING:megatron.bridge.x:x.py:3: {line}\n" * 3
    found = facts(tmp_path, log.encode())
    assert found.first is None
    assert found.findings == ()
    assert len(found.warnings) == 1
    assert found.warnings[0].endswith("(2 similar)")
    assert found.warning_lines == {name: 1}
    assert found.stale_weights == (name not in {"image-mismatch", "incomplete-save"})


def test_every_signature_has_an_example_remedy_and_source() -> None:
    assert {s.id for s in shipped()} == {name for name, _ in EXAMPLES + WARNINGS}
    assert all(s.remedy and s.source and s.kind in KINDS and s.needles for s in shipped())
    assert all(len(n) >= 3 for s in shipped() for n in s.needles)
    assert shipped() is shipped()


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"schema": 2, "signatures": []},
        {"schema": 1, "signatures": [{"id": "a", "kind": "odd", "patterns": ["abcd"], "remedy": "r", "source": "s"}]},
        {"schema": 1, "signatures": [{"id": "a", "kind": "change", "patterns": [r"\w+"], "remedy": "r", "source": "s"}]},
        {"schema": 1, "signatures": [{"id": "a", "kind": "change", "patterns": ["(abc"], "remedy": "r", "source": "s"}]},
        {"schema": 1, "signatures": [{"id": "a", "kind": "change", "patterns": ["abcd"], "remedy": "r", "source": "s"}] * 2},
        {"schema": 1, "signatures": [{"id": "a", "kind": "change", "patterns": ["abcd"], "remedy": "r", "source": "s", "x": 1}]},
    ],
)  # fmt: skip
def test_faulty_signature_data_is_refused(document: dict[str, object]) -> None:
    with pytest.raises(SignatureError, match=r"signatures\.yaml"):
        parse(document)
