"""`AsyncLLM` and `AsyncEngineArgs`: the asynchronous engine as NeMo-RL's vllm_worker_async.py calls it.

The same model and the same worker as the synchronous engine. Requests take turns token by token, and a call of the
worker (a refit) waits for the token in the making and then has the engine to itself, as in vLLM.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, NoReturn

from .llm import LLM
from .sampling import Sequence

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from types import SimpleNamespace

    from .llm import SamplingParams

# what vLLM's arguments default to and this engine does not do otherwise
_REFUSED = ("enable_return_routed_experts", "speculative_config", "enable_lora")


class AsyncEngineArgs:
    """The options of an engine, by name."""

    def __init__(self, **options: Any) -> None:
        for name in _REFUSED:
            if options.get(name):
                msg = f"AsyncEngineArgs({name}={options[name]!r}) is not answered by the CPU stand-in of vLLM"
                raise NotImplementedError(msg)
        self.options = options
        self.enable_return_routed_experts = False

    def create_model_config(self) -> NoReturn:
        """Refuse: NeMo-RL asks for it to serve HTTP."""
        msg = "an HTTP server is not answered by the CPU stand-in of vLLM"
        raise NotImplementedError(msg)


class AsyncLLM:
    """An engine that is refitted, sleeps, wakes and generates between the steps of an event loop."""

    def __init__(self, engine: LLM) -> None:
        self._engine = engine
        self._busy = asyncio.Lock()

    @classmethod
    def from_engine_args(cls, args: AsyncEngineArgs, stat_loggers: list[Any] | None = None) -> AsyncLLM:
        """Return an engine; NotImplementedError where its metrics are wanted."""
        if stat_loggers:
            msg = "vLLM's metrics are not answered by the CPU stand-in of vLLM"
            raise NotImplementedError(msg)
        return cls(LLM(**args.options))

    async def generate(
        self, prompt: dict[str, Any], sampling_params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncIterator[SimpleNamespace]:
        """Yield the finished request; RuntimeError on a sleeping engine."""
        if any(options.values()):
            msg = f"generate({', '.join(options)}) is not answered by the CPU stand-in of vLLM"
            raise NotImplementedError(msg)
        sequence = Sequence(self._engine.prompt(prompt), sampling_params)
        while sequence.finish_reason is None:
            async with self._busy:
                self._engine.step([sequence])
            await asyncio.sleep(0)
        yield sequence.output()

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,  # noqa: ASYNC109 - vLLM's signature
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call `method` on the only worker, in a thread: it may wait for the trainer."""
        async with self._busy:
            return await asyncio.to_thread(self._engine.collective_rpc, method, timeout, args, kwargs)

    async def sleep(self, level: int = 1) -> None:
        """Refuse to generate until the next wake_up."""
        self._engine.sleep(level)

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Accept generate() again."""
        self._engine.wake_up(tags)

    async def reset_prefix_cache(self) -> None:
        """Do nothing: there is no cache."""

    def shutdown(self) -> None:
        """Do nothing: the engine lives in this process."""
