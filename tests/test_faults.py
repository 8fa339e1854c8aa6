"""Generated faults: each parses, differs, keeps line numbers, and lies in a line that a proof ran."""

from __future__ import annotations

import ast
import importlib.util
import sys

from tasks import mutants
from tasks.settings import ROOT

SOURCE = '''\
def entered(self, config):
    """A docstring with 1 number."""
    names = {"a.*.x": "b.*.x", "c": "d"}
    provider.gated = True
    if config.bias:
        raise ValueError("q=1")
    both = Mapping(q="m.*.q", k="m.*.k")
    return torch.cat([both, names], dim=0)


def other():
    return 1
'''


def made(lines=frozenset({3, 4, 5, 7, 8}), most=100):
    name = "proof_faults"
    spec = importlib.util.spec_from_file_location(name, ROOT / "containers/cpu/proof/faults.py")
    assert spec is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return list(module.faults(SOURCE, set(lines), most))


def test_every_operator_has_its_fault_in_a_line_that_ran():
    found = made()
    assert {operator for operator, *_ in found} >= {
        "swap", "dropped entry", "wildcard", "config dropped", "constant", "branch", "axis", "scale", "order", "transposed",
    }  # fmt: skip
    for _, line, what, source in found:
        ast.parse(source)
        assert source != SOURCE
        assert len(source.splitlines()) == len(SOURCE.splitlines())
        assert 2 < line < 10
        assert "docstring" not in what
        assert "q=1" not in what
    assert len({source for *_, source in found}) == len(found)


def test_a_line_that_did_not_run_has_no_fault():
    assert {line for _, line, *_ in made(lines={4})} == {4}


def test_faults_are_thinned_out_evenly():
    assert len(made(most=5)) <= 5


def row(caught):
    return {"caught": caught}


def test_status_of_a_table():
    assert mutants.status({"unmodified": None, "mutants": [row("logits")] * 9 + [row(None)]}) == 0
    assert mutants.status({"unmodified": None, "mutants": [row("logits")] * 8 + [row(None)] * 2}) == 1
    assert mutants.status({"unmodified": "logits", "mutants": [row("logits")]}) == 1, "a false alarm"
    assert mutants.status({"unmodified": None, "mutants": []}) == 2
