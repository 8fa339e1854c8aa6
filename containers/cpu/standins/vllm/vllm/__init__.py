"""Stand-in for vLLM 0.25 as NeMo-RL 7ea279abf uses it: Hugging Face's model on a CPU behind vLLM's names.

Its weights are random until NeMo-RL's own worker extension has loaded them (ZMQ, manifest, `load_weights` with strict
names and shapes), so the policy's export through Megatron-Bridge is what generates. That makes generation an
independent reference for the trained model: a wrong mapping shows as token_mult_prob_error.
Real here: LLM, AsyncLLM, SamplingParams, the worker base class, the file that NeMo-RL patches in place. Every other
name below `vllm.` can be imported and raises NotImplementedError when it is used.
"""

from . import unanswered
from .async_engine import AsyncEngineArgs, AsyncLLM
from .llm import LLM, SamplingParams

__version__ = "0.25.0+e2e.cpu"
__all__ = ["LLM", "SamplingParams"]

unanswered.answer("vllm.engine.arg_utils", AsyncEngineArgs=AsyncEngineArgs)
unanswered.answer("vllm.v1.engine.async_llm", AsyncLLM=AsyncLLM)
unanswered.install()
