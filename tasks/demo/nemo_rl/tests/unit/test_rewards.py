"""The task and the advantages: what the loop is driven by. Nothing of the Bridge is imported."""

import numpy as np

from nemo_rl.environments import arithmetic
from nemo_rl.utils.config import OverridesError, parse_hydra_overrides


def rows(*answers):
    return np.array([[3, arithmetic.PLUS, 4, arithmetic.EQUALS, *answer] for answer in answers])


def test_only_the_right_sum_and_an_end_are_rewarded():
    right, wrong, endless = (7, arithmetic.END), (8, arithmetic.END), (7, 7)
    assert arithmetic.rewards(rows(right, wrong, endless)).tolist() == [1.0, 0.0, 0.0]


def test_unshuffled_prompts_cover_all_sums():
    seen = {tuple(row[[0, 2]]) for step in range(1, 6) for row in arithmetic.prompts(step, 20, seed=0, shuffle=False)}
    assert len(seen) == 100


def test_override_of_an_unknown_key_is_an_error():
    config = {"grpo": {"max_num_steps": 2}}
    assert parse_hydra_overrides(config, ["grpo.max_num_steps=5"]) == {"grpo": {"max_num_steps": 5}}
    try:
        parse_hydra_overrides(config, ["grpo.max_steps=5"])
    except OverridesError as error:
        assert "Could not override 'grpo.max_steps'" in str(error)
    else:
        raise AssertionError("accepted")
