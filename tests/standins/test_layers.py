"""The layers under Transformer Engine's names, each against its definition written out here, and what they refuse.

Runs in the CPU environment with the shim and Megatron-Core on PYTHONPATH (tests/real/test_standins.py).
"""

from __future__ import annotations

import math
import multiprocessing
import os
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip(
    "torch", reason="torch is in the CPU environment only: tests/real/test_standins.py runs these"
)
pytest.importorskip(
    "megatron.core", reason="Megatron-Core is not on PYTHONPATH: tests/real/test_standins.py runs these"
)
if os.environ.get("E2E_CPU") != "run":
    pytest.skip("the stand-ins are not installed (E2E_CPU)", allow_module_level=True)

from e2e_cpu import megatron_attention  # noqa: E402
from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.dist_checkpointing.mapping import is_main_replica  # noqa: E402
from megatron.core.extensions import transformer_engine as te  # noqa: E402
from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from megatron.core.process_groups_config import ProcessGroupCollection  # noqa: E402
from megatron.core.transformer.enums import AttnMaskType  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

EXACT = {"rtol": 1e-5, "atol": 1e-6}


@pytest.fixture(scope="module", autouse=True)
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    store = torch.distributed.FileStore(str(tmp_path_factory.mktemp("dist") / "store"), 1)
    torch.distributed.init_process_group("nccl", store=store, rank=0, world_size=1)  # the shim makes it gloo
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(7)
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def config(**changes: Any) -> TransformerConfig:
    sizes = {"num_layers": 1, "hidden_size": 12, "num_attention_heads": 6, "num_query_groups": 2, "kv_channels": 5}
    return TransformerConfig(**{**sizes, "masked_softmax_fusion": False, "attention_dropout": 0.0, **changes})


def linear(kind: Any, inner: TransformerConfig, *, bias: bool = True, skip: bool = False, **changes: Any) -> Any:
    words = {"config": inner, "init_method": torch.nn.init.normal_, "bias": bias, "skip_bias_add": skip}
    made = kind(12, 10, **{**words, "is_expert": False, **changes})
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter)
    return made


COLUMN, ROW = {"gather_output": False}, {"input_is_parallel": True}


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("TEColumnParallelLinear", COLUMN), ("TERowParallelLinear", ROW), ("TELinear", {"parallel_mode": "duplicated"}),
    ],
)  # fmt: skip
def test_linear_is_x_times_weight_transposed_and_bias(name: str, more: dict[str, Any]) -> None:
    layer, x = linear(getattr(te, name), config(), **more), torch.randn(4, 3, 12)
    out, bias = layer(x)
    torch.testing.assert_close(out, torch.einsum("sbi,oi->sbo", x, layer.weight) + layer.bias, **EXACT)
    assert bias is None
    assert (layer.in_features, layer.out_features) == (12, 10), "Bridge's LoRA sizes its adapters by them"


def test_a_skipped_bias_is_handed_back_not_added() -> None:
    layer, x = linear(te.TEColumnParallelLinear, config(), skip=True, **COLUMN), torch.randn(4, 3, 12)
    out, bias = layer(x)
    torch.testing.assert_close(out, x @ layer.weight.T, **EXACT)
    assert bias is layer.bias


def normed(x: Any, weight: Any, bias: Any, eps: float) -> Any:
    if bias is None:
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * weight + bias


@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("centred", [False, True])
def test_norms_alone_and_before_a_linear_layer(kind: str, centred: bool) -> None:
    inner = config(normalization=kind, layernorm_zero_centered_gamma=centred, layernorm_epsilon=0.01)
    x = torch.randn(4, 3, 12)
    alone = te.TENorm(inner, 12, eps=0.1)
    assert (alone.weight == (0 if centred else 1)).all(), "the norm starts as the identity"
    torch.nn.init.normal_(alone.weight)
    torch.testing.assert_close(alone(x), normed(x, alone.weight + centred, alone.bias, 0.1), **EXACT)
    layer = linear(te.TELayerNormColumnParallelLinear, inner, **COLUMN)
    expected = normed(x, layer.layer_norm_weight + centred, layer.layer_norm_bias, 0.01)
    torch.testing.assert_close(layer(x)[0], expected @ layer.weight.T + layer.bias, **EXACT)
    layer.return_layernorm_output = True
    torch.testing.assert_close(layer(x)[0][1], expected, **EXACT)


def test_grouped_linear_gives_each_expert_its_rows_also_none() -> None:
    groups = ProcessGroupCollection.use_mpu_process_groups()
    for name in ("TEColumnParallelGroupedLinear", "TERowParallelGroupedLinear"):
        layer = getattr(te, name)(
            3, 12, 10, config=config(num_moe_experts=3), init_method=torch.nn.init.normal_, bias=False,
            skip_bias_add=False, is_expert=True, pg_collection=groups,
        )  # fmt: skip
        x = torch.randn(7, 12)
        out, _ = layer(x, torch.tensor([5, 0, 2]))
        torch.testing.assert_close(out, torch.cat([x[:5] @ layer.weight0.T, x[5:] @ layer.weight2.T]), **EXACT)


def test_each_rank_of_experts_writes_its_own_to_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    class Group:
        def __init__(self, rank: int, size: int) -> None:
            self.rank, self.size = (lambda: rank), (lambda: size)

    alone, second = Group(0, 1), Group(1, 2)
    monkeypatch.setattr(parallel_state, "get_expert_model_parallel_rank", second.rank)
    monkeypatch.setattr(parallel_state, "get_expert_model_parallel_world_size", second.size)
    layer = te.TEColumnParallelGroupedLinear(
        2, 12, 10, config=config(num_moe_experts=4), init_method=torch.nn.init.normal_, bias=False, skip_bias_add=False,
        is_expert=True, pg_collection=SimpleNamespace(expt_tp=alone, expt_dp=alone),
    )  # fmt: skip
    shards = layer.sharded_state_dict("fc.", metadata={"dp_cp_group": second})
    assert {name: (t.key, t.global_shape, t.global_offset) for name, t in shards.items()} == {
        f"fc.weight{n}": ("fc.weight", (4, 10, 12), (2 + n, 0, 0)) for n in (0, 1)
    }
    assert all(is_main_replica(t.replica_id) for t in shards.values()), "nobody would write these experts"


def attention(inner: TransformerConfig, **more: Any) -> Any:
    words = {"layer_number": 1, "attn_mask_type": AttnMaskType.causal, "attention_type": "self"}
    return te.TEDotProductAttention(config=inner, **{**words, **more})


def defined(q: Any, k: Any, v: Any, seen: Any, scale: float) -> Any:
    """Softmax attention of one sequence, loop by loop: (tokens, heads, size), `seen` (queries, keys)."""
    out = torch.zeros(q.shape[0], q.shape[1], v.shape[2])
    for head in range(q.shape[1]):
        group = head * k.shape[1] // q.shape[1]
        scores = q[:, head] @ k[:, group].T * scale
        out[:, head] = scores.masked_fill(~seen, -math.inf).softmax(-1) @ v[:, group]
    return out.flatten(1)


def qkv(tokens: int, value_size: int = 5) -> tuple[Any, Any, Any]:
    return torch.randn(tokens, 6, 5), torch.randn(tokens, 2, 5), torch.randn(tokens, 2, value_size)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("scale", [None, 0.7])
def test_causal_attention_with_grouped_heads_windows_and_a_scale(window: int | None, scale: float | None) -> None:
    inner = config(window_size=None if window is None else (window, 0))
    q, k, v = qkv(9)
    here, there = torch.arange(9)[:, None], torch.arange(9)[None]
    seen = (there <= here) & ((here - there) <= (window if window is not None else 9))
    mask = ~seen[None, None]
    out = attention(inner, softmax_scale=scale)(q[:, None], k[:, None], v[:, None], mask, AttnMaskType.causal)
    torch.testing.assert_close(out[:, 0], defined(q, k, v, seen, scale or 5**-0.5), **EXACT)


def test_values_may_have_another_size_than_keys() -> None:
    q, k, v = qkv(9, value_size=3)
    seen = torch.ones(9, 9).tril().bool()
    layer = attention(config(), k_channels=5, v_channels=3)
    out = layer(q[:, None], k[:, None], v[:, None], ~seen[None, None], AttnMaskType.causal)
    torch.testing.assert_close(out[:, 0], defined(q, k, v, seen, 5**-0.5), **EXACT)


def pack(edges: list[int]) -> PackedSeqParams:
    bounds = torch.tensor(edges, dtype=torch.int32)
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds)


def test_packed_sequences_do_not_see_each_other() -> None:
    q, k, v = qkv(11)
    out = attention(config())(q, k, v, packed_seq_params=pack([0, 4, 5, 11]))
    parts = [
        defined(q[a:b], k[a:b], v[a:b], torch.ones(b - a, b - a).tril().bool(), 5**-0.5)
        for a, b in ((0, 4), (4, 5), (5, 11))
    ]
    torch.testing.assert_close(out, torch.cat(parts), **EXACT)


EDGES = [0, 8, 12, 24]  # each a multiple of 2 parts for each of 2 ranks


def _of_rank(rank: int, folder: str, tensors: Any, answer: Any) -> None:
    import torch.distributed as dist

    store = dist.FileStore(f"{folder}/cp", 2)
    group = dist.ProcessGroupGloo(dist.PrefixStore("cp", store), rank, 2, dist.constants.default_pg_timeout)
    dist.all_gather = lambda parts, part, group: group.allgather([parts], [part]).wait()  # a group without a world
    dist.all_reduce = lambda whole, group: group.allreduce([whole]).wait()
    own = megatron_attention.own_positions(EDGES, rank, 2)
    q, k, v, weight = tensors
    parts = [t[own].clone().requires_grad_() for t in (q, k, v)]
    out = megatron_attention.packed(*parts, EDGES, 0.4, group)
    (out * weight[own]).sum().backward()
    answer.put((rank, out.detach().tolist(), [p.grad.tolist() for p in parts]))


def test_context_parallel_ranks_together_are_the_whole_forwards_and_backwards(tmp_path: Any) -> None:
    tensors = (*qkv(24), torch.randn(24, 30))
    whole = [t.clone().requires_grad_() for t in tensors[:3]]
    out = megatron_attention.packed(*whole, EDGES, 0.4, None)
    (out * tensors[3]).sum().backward()
    fork = multiprocessing.get_context("fork")
    answer = fork.Queue()
    ranks = [fork.Process(target=_of_rank, args=(r, str(tmp_path), tensors, answer)) for r in (0, 1)]
    for process in ranks:
        process.start()
    for rank, part, grads in sorted(answer.get(timeout=60) for _ in ranks):
        own = megatron_attention.own_positions(EDGES, rank, 2)
        torch.testing.assert_close(torch.tensor(part), out[own].detach(), **EXACT)
        for grad, of in zip(grads, whole, strict=True):
            torch.testing.assert_close(torch.tensor(grad), of.grad[own], **EXACT)
    assert sorted(p for r in (0, 1) for p in megatron_attention.own_positions(EDGES, r, 2)) == list(range(24))
    for process in ranks:
        process.join()


def test_a_rank_holds_the_positions_for_which_core_turns_its_tokens() -> None:
    from megatron.core.models.common.embeddings.rope_utils import _get_thd_freqs_on_this_cp_rank as of_core

    assert megatron_attention.own_positions([0, 8, 12], 0, 2) == [0, 1, 6, 7, 8, 11]
    for rank in range(3):
        held = of_core(rank, 3, torch.zeros(4), torch.arange(12)).tolist()
        assert megatron_attention.own_positions([0, 12], rank, 3) == held


def test_rotary_positions_turn_pairs_and_begin_anew_in_each_packed_sequence() -> None:
    from megatron.core.models.common.embeddings import apply_rotary_pos_emb
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    inner = config(kv_channels=6, apply_rope_fusion=False)
    table = RotaryEmbedding(6, rotary_percent=1.0, rotary_base=100, use_cpu_initialization=True)(5)
    x = torch.randn(5, 1, 2, 6)
    angle = torch.arange(5)[:, None] * 100 ** (-torch.arange(3) / 3)
    a, b = x[..., :3], x[..., 3:]
    cos, sin = angle.cos()[:, None, None], angle.sin()[:, None, None]
    expected = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    torch.testing.assert_close(apply_rotary_pos_emb(x, table, inner), expected, **EXACT)
    twice = torch.cat([x, x[:3]])[:, 0]
    group = parallel_state.get_context_parallel_group()
    bounds = torch.tensor([0, 5, 8], dtype=torch.int32)
    out = apply_rotary_pos_emb(twice, table, inner, cu_seqlens=bounds, cp_group=group)
    torch.testing.assert_close(out, torch.cat([expected, expected[:3]])[:, 0], **EXACT)


def test_tokens_permuted_to_their_experts_come_back_weighted() -> None:
    from megatron.core.transformer.moe.moe_utils import permute, unpermute

    tokens, routed = torch.randn(5, 4), torch.tensor([[1, 1, 0], [0, 1, 0], [1, 0, 1], [0, 0, 1], [1, 0, 0]]).bool()
    weight = torch.rand(5, 3) * routed
    sent = permute(tokens, routed, probs=weight, num_out_tokens=int(routed.sum()))
    torch.testing.assert_close(sent[0], torch.cat([tokens[routed[:, expert]] for expert in range(3)]), **EXACT)
    back = unpermute(sent[0] * sent[1][:, None], sent[2], restore_shape=tokens.shape)
    torch.testing.assert_close(back, tokens * weight.sum(1, keepdim=True), **EXACT)


def test_fused_permutation_may_be_asked_for_when_a_model_is_built_but_is_never_done() -> None:
    from megatron.core.transformer.moe.moe_utils import permute, unpermute

    config(num_moe_experts=3, moe_permute_fusion=True)
    routed = torch.ones(5, 3).bool()
    with pytest.raises(ValueError, match="not available"):
        permute(torch.zeros(5, 4), routed, num_out_tokens=15, fused=True)
    with pytest.raises(ValueError, match="not available"):
        unpermute(torch.zeros(15, 4), torch.arange(15), torch.Size((5, 4)), fused=True)


def test_cross_entropy_and_its_gradient() -> None:
    logits, wanted = torch.randn(4, 3, 12, requires_grad=True), torch.randint(12, (4, 3))
    loss = tensor_parallel.vocab_parallel_cross_entropy(logits.clone(), wanted)
    expected = -logits.log_softmax(-1).gather(-1, wanted[..., None])[..., 0]
    torch.testing.assert_close(loss, expected, **EXACT)
    (got,) = torch.autograd.grad(loss.sum(), logits)
    torch.testing.assert_close(got, logits.softmax(-1) - torch.nn.functional.one_hot(wanted, 12), **EXACT)


def test_the_random_tracker_repeats_its_own_stream_and_leaves_the_other_alone() -> None:
    def draw(*, inside: bool) -> Any:
        tensor_parallel.model_parallel_cuda_manual_seed(11)
        torch.manual_seed(3)
        drawn = []
        for _ in range(2):
            if inside:
                with tensor_parallel.get_cuda_rng_tracker().fork():
                    drawn.append(torch.rand(3))
            else:
                drawn.append(torch.rand(3))
        return drawn, torch.rand(3)

    (first, second), after = draw(inside=True)
    (again, _), _ = draw(inside=True)
    torch.manual_seed(3)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    assert torch.equal(after, torch.rand(3)), "what is drawn inside does not move the outer stream"


REFUSED = {
    "column linear of a sequence": lambda: linear(te.TELinear, config(), parallel_mode="column"),
    "norm": lambda: te.TENorm(_odd(normalization="L2Norm"), 12),
    "norm and linear": lambda: linear(te.TELayerNormColumnParallelLinear, _odd(normalization="L2Norm"), **COLUMN),
    "grouped outside experts": lambda: te.TEColumnParallelGroupedLinear(
        3, 12, 10, config=config(), init_method=None, bias=False, skip_bias_add=False, is_expert=False
    ),
    "packed with a window": lambda: attention(config(window_size=(3, 0)))(*qkv(4), packed_seq_params=pack([0, 4])),
    "packed with a bias": lambda: attention(config())(*qkv(4), attention_bias=1, packed_seq_params=pack([0, 4])),
    "packed with a sink": lambda: attention(config(softmax_type="off-by-one"))(*qkv(4), packed_seq_params=pack([0, 4])),
    "context parallel, not packed": lambda: attention(_odd(context_parallel_size=2))(*qkv(4)),
}


def _odd(**changes: Any) -> TransformerConfig:
    made = config()
    for name, value in changes.items():
        setattr(made, name, value)  # Core's own checks come at the start
    return made


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_done_is_refused(what: str) -> None:
    with pytest.raises(NotImplementedError, match="not answered on a CPU|answered on a CPU for experts only"):
        REFUSED[what]()


def test_a_sequence_that_ranks_cannot_share_is_an_error() -> None:
    with pytest.raises(ValueError, match="6 tokens cannot be cut into 4 parts"):
        megatron_attention.own_positions([0, 6], 0, 2)
