"""Single-digit addition: prompts `a + b =`, the answer is one token, then the end token."""

import numpy as np

PLUS, EQUALS, END, VOCABULARY = 19, 20, 21, 22
RESPONSE_LENGTH = 2


def prompts(step, count, seed, shuffle):
    """Return `count` prompts [count, 4] of a training step (from 1); without shuffle they come in a fixed order."""
    if shuffle:
        pairs = np.random.default_rng([seed, step]).choice(100, count, replace=count > 100)
    else:
        pairs = (np.arange(count) + (step - 1) * count) * 37 % 100
    a, b = pairs // 10, pairs % 10
    return np.stack([a, np.full_like(a, PLUS), b, np.full_like(a, EQUALS)], 1)


def rewards(tokens):
    """Return 1.0 for each row `a + b = c END` with the right c, else 0.0."""
    return ((tokens[:, 4] == tokens[:, 0] + tokens[:, 2]) & (tokens[:, 5] == END)).astype(float)


def text(row):
    """Return a row of tokens as people write it."""
    return " ".join({PLUS: "+", EQUALS: "=", END: "<end>"}.get(token, str(token)) for token in map(int, row))
