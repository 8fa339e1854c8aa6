"""`LLM` and `SamplingParams`: the synchronous engine as NeMo-RL's vllm_worker.py calls it.

One process, one model, no key-value cache: each token costs a full forward pass, which is cheap for a tiny model and
leaves nothing that could be stale after a refit. Log probabilities are those after temperature, top-k and top-p
("processed_logprobs", the mode that grpo_math_1B.yaml sets). Options that would change results and are not done here
raise NotImplementedError when the engine is built.
"""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from .sampling import Sequence, next_token
from .weights import build

# option of LLM(...) -> the values that this engine does
_DONE: dict[str, tuple[Any, ...]] = {
    "tensor_parallel_size": (1,),
    "pipeline_parallel_size": (1,),
    "enable_expert_parallel": (False,),
    "speculative_config": (None,),
    "quantization": (None,),
    "kv_cache_dtype": ("auto",),
    "hf_overrides": ({}, None),
    "logprobs_mode": ("processed_logprobs",),
}


@dataclass(slots=True)
class SamplingParams:
    """vLLM's name and defaults for what NeMo-RL sets; another keyword is a TypeError."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int | None = 16
    logprobs: int | None = None
    stop_token_ids: list[int] | None = None
    stop: list[str] | None = None
    include_stop_str_in_output: bool = False
    bad_words: list[str] | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.bad_words:
            msg = "bad_words is not answered by the CPU stand-in of vLLM"
            raise NotImplementedError(msg)


class LLM:
    """An engine that sleeps, wakes, is refitted through its worker, and generates."""

    def __init__(
        self,
        model: str,
        worker_extension_cls: str,
        max_model_len: int | None = None,
        seed: int | None = 0,
        dtype: str = "float32",
        load_format: str = "auto",
        **options: Any,
    ) -> None:
        import torch

        from vllm.v1.worker.gpu_worker import Worker

        for name, value in options.items():
            if name in _DONE and value not in _DONE[name]:
                msg = f"LLM({name}={value!r}) is not answered by the CPU stand-in of vLLM"
                raise NotImplementedError(msg)
        if not torch.distributed.is_initialized():  # a vLLM worker is always a rank, and NeMo-RL's refit asks which
            torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        self._name = model
        self._model, self._config = build(model, seed or 0, str(dtype))
        if load_format != "dummy":  # vLLM reads the checkpoint here; NeMo-RL asks for it in evaluation only
            from safetensors.torch import load_file

            self._model.load_weights(load_file(os.path.join(model, "model.safetensors")).items())
        config = SimpleNamespace(
            model=model,
            max_model_len=max_model_len or self._config.max_position_embeddings,
            architectures=list(self._config.architectures or []),
        )
        module, _, name = worker_extension_cls.rpartition(".")
        self._worker = type("Worker", (getattr(importlib.import_module(module), name), Worker), {})()
        self._worker.device = torch.device("cuda:0")
        self._worker.model_config = config
        self._worker.model_runner = SimpleNamespace(
            model=self._model, model_config=config, vllm_config=SimpleNamespace(model_config=config)
        )
        self.llm_engine = SimpleNamespace(model_config=config, reset_prefix_cache=lambda: True)
        self._random = torch.Generator().manual_seed(int(seed or 0))
        self._asleep = False
        self._tokenizer: Any = None

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call `method` on the only worker."""
        return [getattr(self._worker, method)(*args, **(kwargs or {}))]

    def sleep(self, level: int = 1) -> None:
        """Refuse to generate until the next wake_up."""
        self._asleep = True

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Accept generate() again."""
        self._asleep = False

    def get_metrics(self) -> list[Any]:
        """Return no metrics, as an engine that has none."""
        return []

    def get_tokenizer(self) -> Any:
        """Return the checkpoint's tokenizer."""
        if self._tokenizer is None:
            from transformers import AutoTokenizer

            self._tokenizer = AutoTokenizer.from_pretrained(self._name)
        return self._tokenizer

    def generate(
        self,
        prompts: list[dict[str, Any]],
        sampling_params: SamplingParams | list[SamplingParams],
        use_tqdm: bool = False,
    ) -> list[SimpleNamespace]:
        """Generate for all prompts; RuntimeError on a sleeping engine."""
        each = sampling_params if isinstance(sampling_params, list) else [sampling_params] * len(prompts)
        sequences = [Sequence(self.prompt(p), params) for p, params in zip(prompts, each, strict=True)]
        while running := [sequence for sequence in sequences if sequence.finish_reason is None]:
            self.step(running)
        return [sequence.output() for sequence in sequences]

    def step(self, running: list[Sequence]) -> None:
        """Add a token to each sequence; RuntimeError on a sleeping engine, as its weights may be gone in vLLM."""
        if self._asleep:
            msg = "generate() on a sleeping engine"
            raise RuntimeError(msg)
        ends = self._config.eos_token_id
        stops = set(ends if isinstance(ends, list) else [ends])
        limit = self.llm_engine.model_config.max_model_len
        for sequence, logits in zip(running, self._logits(running), strict=True):
            token, log_probability = next_token(logits, sequence.params, self._random)
            sequence.append(token, log_probability)
            sequence.finish_reason = sequence.end(stops, limit, self.get_tokenizer)

    def prompt(self, prompt: dict[str, Any]) -> list[int]:
        """Return the tokens of a prompt given as text or tokens; NotImplementedError for pictures and sound."""
        if "multi_modal_data" in prompt:
            msg = "multi_modal_data is not answered by the CPU stand-in of vLLM"
            raise NotImplementedError(msg)
        if "prompt_token_ids" in prompt:
            return list(prompt["prompt_token_ids"])
        tokens: list[int] = self.get_tokenizer()(prompt["prompt"]).input_ids
        return tokens

    def _logits(self, running: list[Sequence]) -> Any:
        """Return the logits after the last token of each sequence, (sequences, vocabulary), float32."""
        import torch

        width = max(len(sequence.tokens) for sequence in running)
        ids = torch.zeros(len(running), width, dtype=torch.long)
        mask = torch.zeros(len(running), width, dtype=torch.long)
        for row, sequence in enumerate(running):
            ids[row, : len(sequence.tokens)] = torch.tensor(sequence.tokens)
            mask[row, : len(sequence.tokens)] = 1
        last = torch.tensor([len(sequence.tokens) - 1 for sequence in running])
        with torch.no_grad():
            logits = self._model(input_ids=ids, attention_mask=mask).logits.float()
        return logits[torch.arange(len(running)), last]
