"""One token after another: the choice of a token, and the sequence that it ends or not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def next_token(logits: Any, params: Any, random: Any) -> tuple[int, float]:
    """Return (token, its log probability) for logits of shape (vocabulary,).

    Order as in vLLM: temperature, top-k, top-p, then the log probabilities of what is left. Temperature 0 is greedy.
    """
    import torch

    if params.temperature:
        logits = logits / params.temperature
    if params.top_k and params.top_k > 0:
        least = logits.topk(min(params.top_k, logits.numel())).values[-1]
        logits = logits.masked_fill(logits < least, float("-inf"))
    if params.top_p < 1:
        values, order = logits.sort(descending=True)
        probabilities = values.softmax(-1)
        beyond = probabilities.cumsum(-1) - probabilities > params.top_p
        logits = logits.index_fill(0, order[beyond], float("-inf"))
    log_probabilities = logits.log_softmax(-1)
    if params.temperature:
        token = int(torch.multinomial(log_probabilities.exp(), 1, generator=random))
    else:
        token = int(logits.argmax())
    return token, float(log_probabilities[token])


class Sequence:
    """A prompt, what was generated after it, and why it ended."""

    def __init__(self, prompt: list[int], params: Any) -> None:
        self.tokens = list(prompt)
        self.params = params
        self.finish_reason: str | None = None
        self._prompt_length = len(prompt)
        self._log_probabilities: list[dict[int, SimpleNamespace]] = []

    def append(self, token: int, log_probability: float) -> None:
        """Add one generated token."""
        self.tokens.append(token)
        self._log_probabilities.append({token: SimpleNamespace(logprob=log_probability)})

    def end(self, stops: set[int], limit: int, tokenizer: Callable[[], Any]) -> str | None:
        """Return "stop" or "length" if the last token ends the sequence, else None."""
        token, generated = self.tokens[-1], self.tokens[self._prompt_length :]
        if (token in stops and not self.params.ignore_eos) or token in (self.params.stop_token_ids or ()):
            return "stop"
        if self.params.stop and any(text in tokenizer().decode(generated) for text in self.params.stop):
            return "stop"
        if len(generated) >= (self.params.max_tokens or limit) or len(self.tokens) >= limit:
            return "length"
        return None

    def output(self) -> SimpleNamespace:
        """Return what vLLM's RequestOutput gives NeMo-RL: token ids and log probabilities (text is not used)."""
        generated = SimpleNamespace(
            token_ids=self.tokens[self._prompt_length :],
            logprobs=self._log_probabilities,
            finish_reason=self.finish_reason,
            text="",
        )
        return SimpleNamespace(prompt_token_ids=self.tokens[: self._prompt_length], outputs=[generated])
