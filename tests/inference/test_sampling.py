"""Tokens are drawn from the distribution they should be drawn from, by a number of their own."""

import numpy as np
import pytest
import torch

from mage_async.inference.sampling import SamplingParameters, draw, uniforms

PROBABILITIES = np.array([0.05, 0.4, 0.0, 0.3, 0.15, 0.1])
LOGITS = torch.from_numpy(np.log(np.maximum(PROBABILITIES, 1e-30)).astype(np.float32))


def drawn(num: int, *, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0):
    """`num` evenly spaced chances through one distribution: tokens and log-probs."""
    rules = SamplingParameters(
        np.full(num, temperature, np.float32), np.full(num, top_p, np.float32), np.full(num, top_k)
    )
    return draw(LOGITS.expand(num, -1), rules, (np.arange(num) + 0.5) / num)


def shares(tokens: np.ndarray) -> np.ndarray:
    return np.bincount(tokens, minlength=6) / len(tokens)


def test_every_token_has_its_share_of_the_chances() -> None:
    tokens, logprobs = drawn(1000)
    np.testing.assert_allclose(shares(tokens), PROBABILITIES, atol=2e-3)
    np.testing.assert_allclose(np.exp(logprobs), PROBABILITIES[tokens], rtol=1e-5)


@pytest.mark.parametrize(
    ("limits", "kept"),
    [
        ({"top_k": 1}, [1]),
        ({"top_k": 2}, [1, 3]),
        ({"top_k": 50}, [0, 1, 3, 4, 5]),
        ({"top_p": 0.01}, [1]),
        ({"top_p": 0.39}, [1]),
        ({"top_p": 0.5}, [1, 3]),
        ({"top_p": 0.71}, [1, 3, 4]),
        ({"top_p": 0.6, "top_k": 2}, [1, 3]),  # 0.4 of the 0.7 that top-k left is 0.571
        ({"top_p": 0.56, "top_k": 2}, [1]),
    ],
)
def test_top_k_and_top_p_keep_the_right_tokens_in_their_proportions(limits, kept) -> None:
    tokens, logprobs = drawn(2000, **limits)
    expected = np.zeros(6)
    expected[kept] = PROBABILITIES[kept] / PROBABILITIES[kept].sum()
    np.testing.assert_allclose(shares(tokens), expected, atol=2e-3)
    np.testing.assert_allclose(np.exp(logprobs), PROBABILITIES[tokens], rtol=1e-5)  # untruncated


def test_temperature_sharpens_the_draw_and_the_logprobs() -> None:
    tokens, logprobs = drawn(2000, temperature=0.5)
    expected = PROBABILITIES**2 / (PROBABILITIES**2).sum()
    np.testing.assert_allclose(shares(tokens), expected, atol=2e-3)
    np.testing.assert_allclose(np.exp(logprobs), expected[tokens], rtol=1e-5)


def test_temperature_zero_takes_the_most_probable_token_at_its_logprob_of_temperature_one() -> None:
    tokens, logprobs = drawn(10, temperature=0.0)
    assert set(tokens.tolist()) == {1}
    np.testing.assert_allclose(np.exp(logprobs), 0.4, rtol=1e-5)


def test_rows_with_and_without_limits_do_not_disturb_each_other() -> None:
    rules = SamplingParameters(
        np.ones(3, np.float32), np.array([1.0, 0.5, 1.0], np.float32), np.array([0, 0, 1])
    )
    tokens, _ = draw(LOGITS.expand(3, -1), rules, np.full(3, 0.97))
    assert tokens.tolist() == [5, 3, 1]


@pytest.mark.parametrize("chance", [0.0, np.nextafter(1.0, 0.0)])
def test_the_first_and_the_last_chance_draw_possible_tokens(chance) -> None:
    logits = torch.full((1, 6), -200.0)
    logits[0, 2] = 0.0
    rules = SamplingParameters(
        np.ones(1, np.float32), np.ones(1, np.float32), np.zeros(1, np.int64)
    )
    assert draw(logits, rules, np.array([chance]))[0].tolist() == [2]


def test_chances_of_neighbouring_seeds_and_tokens_are_spread_evenly_and_unrelated() -> None:
    seeds, numbers = np.meshgrid(np.arange(400, dtype=np.uint64), np.arange(50))
    chances = uniforms(seeds.ravel(), numbers.ravel()).reshape(seeds.shape)
    assert (chances >= 0).all()
    assert (chances < 1).all()
    counts = np.histogram(chances, 20, (0, 1))[0]
    assert ((counts - 1000) ** 2 / 1000).sum() < 45  # chi-square with 19 degrees: p = 0.0007
    assert abs(np.corrcoef(chances[:-1].ravel(), chances[1:].ravel())[0, 1]) < 0.03
    assert abs(np.corrcoef(chances[:, :-1].ravel(), chances[:, 1:].ravel())[0, 1]) < 0.03
    assert len(np.unique(chances)) == chances.size
