"""Providers: the shape that they check, and the hooks that they run."""

import pytest

from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.peft.lora import LoRA


def provider(**changes):
    shape = dict(num_layers=1, hidden_size=8, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=6, vocab_size=5)
    return GPTModelProvider(**{**shape, **changes})


def test_model_has_the_shape_that_was_asked_for():
    model = provider().provide_distributed_model()
    assert model.parameters["decoder.layers.0.self_attention.linear_qkv.weight"].shape == (16, 8)
    assert model.parameters["output_layer.weight"].shape == (5, 8)


@pytest.mark.parametrize("changes", [{"hidden_size": 9}, {"num_query_groups": 3}])
def test_uneven_heads_are_refused(changes):
    with pytest.raises(ValueError, match="heads"):
        provider(**changes).provide()


def test_hooks_run_in_order():
    seen, subject = [], provider()
    for number in (1, 2):
        subject.register_pre_wrap_hook(lambda model, number=number: seen.append(number) or model)
    subject.provide_distributed_model()
    assert seen == [1, 2]


def test_new_adapter_leaves_the_weights_as_they_are():
    subject = provider()
    subject.register_pre_wrap_hook(LoRA(dim=2))
    model = subject.provide_distributed_model()
    assert all((model.weights()[name] == base).all() for name, base in model.parameters.items())
    assert set(model.trainable()).isdisjoint(model.parameters)
