"""The mappings, each by itself: what goes in comes out again, in the right shape."""

from types import SimpleNamespace

import numpy as np
import pytest

from megatron.bridge.models.adder.adder_bridge import AdderBridge
from megatron.bridge.models.conversion.param_mapping import DirectMapping, GatedMLPMapping, QKVMapping

CONFIG = SimpleNamespace(hidden_size=8, num_attention_heads=4, num_query_groups=2, head_dim=2)
SHAPES = {"q": (8, 8), "k": (4, 8), "v": (4, 8), "gate": (6, 8), "up": (6, 8), "weight": (5, 8)}
CASES = [(DirectMapping, ["weight"], 5), (QKVMapping, ["q", "k", "v"], 16), (GatedMLPMapping, ["gate", "up"], 12)]


def tensors(roles):
    rng = np.random.default_rng(0)
    return {role: rng.normal(size=SHAPES[role]) for role in roles}


@pytest.mark.parametrize(("kind", "roles", "rows"), CASES)
def test_round_trip_is_the_identity(kind, roles, rows):
    mapping, before = kind("core", **{role: role for role in roles}), tensors(roles)
    after = mapping.megatron_to_hf(mapping.hf_to_megatron(before, CONFIG), CONFIG)
    assert after.keys() == before.keys()
    for role in roles:
        assert np.array_equal(after[role], before[role]), f"{role} does not come back as it went in"


@pytest.mark.parametrize(("kind", "roles", "rows"), CASES)
def test_fused_parameter_has_the_rows_of_its_parts(kind, roles, rows):
    mapping = kind("core", **{role: role for role in roles})
    assert mapping.hf_to_megatron(tensors(roles), CONFIG).shape == (rows, 8)


def test_star_is_the_layer_number_on_both_sides():
    mapping = DirectMapping("decoder.layers.*.w", weight="model.layers.*.w").resolve(3)
    assert (mapping.megatron, mapping.hf) == ("decoder.layers.3.w", {"weight": "model.layers.3.w"})


def test_no_hugging_face_tensor_is_mapped_twice():
    names = [name for mapping in AdderBridge().mapping_registry() for name in mapping.hf.values()]
    assert len(names) == len(set(names))


@pytest.mark.accelerator
def test_round_trip_on_an_accelerator():
    pytest.skip("the demo has no accelerator")
