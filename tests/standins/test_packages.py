"""The stand-ins of whole packages, and what the shim changes in torch, against definitions; and what they refuse.

Runs in the CPU environment with shim and stand-ins on PYTHONPATH (tests/real/test_standins.py).
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import time
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip(
    "torch", reason="torch is in the CPU environment only: tests/real/test_standins.py runs these"
)
if os.environ.get("E2E_CPU") != "run":
    pytest.skip("the stand-ins are not installed (E2E_CPU)", allow_module_level=True)

import vllm  # noqa: E402
from flashinfer import sampling as flashinfer  # noqa: E402
from nccl.core import SUM, Communicator  # noqa: E402
from nccl.core.utils import UniqueId, get_unique_id  # noqa: E402
from torch.multiprocessing import reductions  # noqa: E402
from vllm.sampling import Sequence, next_token  # noqa: E402
from vllm.weights import _load  # noqa: E402

LOGITS = torch.tensor([2.0, 1.0, 0.5, -1.0])


@pytest.mark.parametrize(
    ("words", "left"),
    [
        ({}, [0, 1, 2, 3]), ({"temperature": 0.5}, [0, 1, 2, 3]), ({"top_k": 2}, [0, 1]), ({"top_p": 0.7}, [0, 1]),
        ({"top_k": 3, "top_p": 0.9, "temperature": 2.0}, [0, 1, 2]), ({"temperature": 0.0}, [0, 1, 2, 3]),
    ],
)  # fmt: skip
def test_a_token_is_drawn_from_what_temperature_and_cuts_leave(words: dict[str, Any], left: list[int]) -> None:
    params = vllm.SamplingParams(**words)
    expected = torch.full((4,), float("-inf"))
    expected[left] = (LOGITS / (params.temperature or 1))[left].log_softmax(0)
    random = torch.Generator().manual_seed(0)
    drawn = [next_token(LOGITS, params, random) for _ in range(2000)]
    assert {token for token, _ in drawn} == ({0} if params.temperature == 0 else set(left))
    assert max(abs(log - float(expected[token])) for token, log in drawn) < 1e-5


@pytest.mark.parametrize(
    ("words", "tokens", "reason"),
    [
        ({}, [5, 9], "stop"), ({"ignore_eos": True, "max_tokens": 2}, [5, 9], "length"), ({"stop": ["5-6"]}, [5, 6], "stop"),
        ({"stop_token_ids": [6]}, [5, 6], "stop"), ({"max_tokens": 1}, [5], "length"), ({"max_tokens": 99}, [5, 6], "length"),
    ],
)  # fmt: skip
def test_a_sequence_ends_by_its_own_rules(words: dict[str, Any], tokens: list[int], reason: str) -> None:
    text = SimpleNamespace(decode=lambda ids: "-".join(map(str, ids)))
    sequence = Sequence([1, 2], vllm.SamplingParams(**words))
    for token in tokens:
        assert sequence.end({9}, 4, lambda: text) is None or token == tokens[0]
        sequence.append(token, -1.0)
    assert sequence.end({9}, 4, lambda: text) == reason
    assert sequence.output().outputs[0].token_ids == tokens
    assert sequence.output().prompt_token_ids == [1, 2]


class _Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = torch.nn.Parameter(torch.zeros(2, 6, 4))
        self.down_proj = torch.nn.Parameter(torch.zeros(2, 4, 3))

    def named_parameters(self, *_: Any, **__: Any) -> Any:
        return [("l.experts.gate_up_proj", self.gate_up_proj), ("l.experts.down_proj", self.down_proj)]


def test_each_expert_fills_its_own_part_of_the_layers_tensors() -> None:
    model, parts = _Model(), {"gate": (3, 4), "up": (3, 4), "down": (4, 3)}
    weights = {f"l.experts.{e}.{p}_proj.weight": torch.randn(s) for e in (0, 1) for p, s in parts.items()}
    assert _load(model, weights.items(), tied=False) == set(weights)
    for e in (0, 1):
        both = torch.cat([weights[f"l.experts.{e}.{p}_proj.weight"] for p in ("gate", "up")])
        assert torch.equal(model.gate_up_proj[e], both)
        assert torch.equal(model.down_proj[e], weights[f"l.experts.{e}.down_proj.weight"])
    with pytest.raises(KeyError):
        _load(model, [("l.experts.2.up_proj.weight", torch.zeros(3, 4))], tied=False)
    with pytest.raises(ValueError, match="does not fit"):
        _load(model, [("l.experts.0.up_proj.weight", torch.zeros(4, 4))], tied=False)


def test_an_engine_is_the_only_rank_of_its_own_group_for_its_refit_asks_which(tmp_path: Any) -> None:
    from transformers import Qwen2Config

    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    Qwen2Config(**sizes, num_attention_heads=2, num_key_value_heads=1, architectures=["Qwen2"]).save_pretrained(
        tmp_path
    )
    vllm.LLM(str(tmp_path), "types.SimpleNamespace", load_format="dummy")
    try:
        assert (torch.distributed.get_rank(), torch.distributed.get_world_size()) == (0, 1)
    finally:
        torch.distributed.destroy_process_group()


class _Engine:
    """In place of a model: counts up; a refit takes its time and must not meet a token in the making."""

    def __init__(self) -> None:
        self.inside = False

    def prompt(self, prompt: dict[str, Any]) -> list[int]:
        return list(prompt["prompt_token_ids"])

    def step(self, running: list[Sequence]) -> None:
        assert not self.inside, "a token while the weights change"
        for sequence in running:
            sequence.append(sequence.tokens[-1] + 1, 0.0)
            sequence.finish_reason = sequence.end(set(), 9, lambda: None)

    def collective_rpc(self, method: str, *_: Any) -> list[Any]:
        self.inside = True
        time.sleep(0.05)  # in a thread: long enough for the event loop to make a token, if it may
        self.inside = False
        return [True]


def test_the_asynchronous_engine_serves_requests_in_turn_and_refits_between_tokens() -> None:
    engine = vllm.AsyncLLM(_Engine())

    async def one(start: int) -> list[int]:
        params = vllm.SamplingParams(max_tokens=3)
        async for out in engine.generate({"prompt_token_ids": [start]}, params, request_id=str(start)):
            last = out
        return last.outputs[0].token_ids

    async def all_of_it() -> list[Any]:
        return await asyncio.gather(one(1), engine.collective_rpc("update"), one(4))

    assert asyncio.run(all_of_it()) == [[2, 3, 4], [True], [5, 6, 7]]


def test_the_names_by_which_nemo_rl_knows_the_asynchronous_engine_lead_to_it() -> None:
    from vllm.config import CompilationConfig  # imported, not used
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.loggers import PrometheusStatLogger
    from vllm.v1.metrics.reader import get_metrics_snapshot

    assert (AsyncEngineArgs, AsyncLLM) == (vllm.AsyncEngineArgs, vllm.AsyncLLM)
    assert get_metrics_snapshot() == []
    for name in (CompilationConfig, PrometheusStatLogger):
        with pytest.raises(NotImplementedError):
            name()


@pytest.mark.parametrize(
    "call",
    [
        lambda: vllm.AsyncEngineArgs(enable_lora=True), lambda: vllm.AsyncEngineArgs().create_model_config(),
        lambda: vllm.AsyncLLM.from_engine_args(vllm.AsyncEngineArgs(), stat_loggers=[1]),
        lambda: vllm.SamplingParams(bad_words=["x"]), lambda: Communicator(None, 0).send,
        lambda: Communicator(None, 0).allreduce(sendbuf=1, recvbuf=1, op="max"),
    ],
)  # fmt: skip
def test_what_is_not_done_is_refused(call: Any) -> None:
    with pytest.raises(NotImplementedError, match="is not answered by the CPU stand-in|are not answered by the CPU"):
        call()


def _member(rank: int, identity: bytes, answer: Any) -> None:
    group = Communicator.init(nranks=2, rank=rank, unique_id=UniqueId.from_bytes(identity))
    sent = torch.arange(4.0) if rank == 0 else torch.zeros(4)
    group.broadcast(sendbuf=sent, recvbuf=sent, root=0, stream=0)
    added = torch.full((2,), rank + 1.0)
    group.allreduce(sendbuf=added, recvbuf=added, op=SUM)
    answer.put((sent.tolist(), added.tolist()))


def test_two_processes_broadcast_and_add_up_over_nccls_names() -> None:
    fork = multiprocessing.get_context("fork")
    answer, identity = fork.Queue(), get_unique_id().as_bytes
    assert len(identity) == 128
    members = [fork.Process(target=_member, args=(rank, identity, answer)) for rank in (0, 1)]
    for process in members:
        process.start()
    assert [answer.get(timeout=60) for _ in members] == [([0.0, 1.0, 2.0, 3.0], [3.0, 3.0])] * 2
    for process in members:
        process.join()


def test_flashinfer_renormalises_the_most_probable() -> None:
    probabilities = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.1, 0.2, 0.3, 0.4]])
    top = flashinfer.top_k_renorm_probs(probabilities, torch.tensor([2, 3]))
    torch.testing.assert_close(top, torch.tensor([[0.625, 0.375, 0, 0], [0, 2 / 9, 3 / 9, 4 / 9]]))
    nucleus = flashinfer.top_p_renorm_probs(probabilities, 0.6)
    torch.testing.assert_close(nucleus, torch.tensor([[0.625, 0.375, 0, 0], [0, 0, 3 / 7, 4 / 7]]))


def test_an_ipc_handle_carries_the_bytes() -> None:
    tensor = torch.randn(3, 5, dtype=torch.bfloat16).T
    rebuild, fields = reductions.reduce_tensor(tensor)
    assert torch.equal(rebuild(*fields), tensor)
    assert reductions.rebuild_cuda_tensor is rebuild


def test_the_device_cuda_is_the_cpu_and_what_is_not_answered_still_raises() -> None:
    assert torch.zeros(2, device="cuda:1").device.type == "cpu"
    assert torch.ones(2).cuda().to("cuda").device.type == "cpu"
    before = torch.cuda.current_device()
    with torch.cuda.device("cuda:1"):
        assert torch.cuda.current_device() == 1
    assert torch.cuda.current_device() == before
    assert not torch.cuda.is_available()
    with pytest.raises((RuntimeError, AssertionError)):
        torch.cuda.CUDAGraph().replay()
