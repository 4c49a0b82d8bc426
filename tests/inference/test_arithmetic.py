"""Exact arithmetic: the same bits whatever is computed beside it, as near the truth as float32."""

from functools import partial
from typing import get_args

import numpy as np
import pytest
import torch

from mage_async.completion import Completion, Prompt, Sampling
from mage_async.inference.architecture import Activation
from mage_async.inference.arithmetic import ARITHMETICS
from mage_async.inference.model import Model
from mage_async.inference.scheduler import Scheduler
from tests.inference.conftest import FAMILIES

exact, plain = ARITHMETICS["exact"], ARITHMETICS["float32"]


def text(seed: int, num_tokens: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 96, num_tokens, np.int32)


def scheduler_of(reference, arithmetic="exact", **options) -> Scheduler:
    model = Model.load(reference.directory, slots=8, max_tokens=256, arithmetic=arithmetic)
    return Scheduler(model, **options)


def ask(scheduler: Scheduler, context: str, tokens: np.ndarray, **options) -> None:
    seed = options.pop("seed", 0)
    scheduler.submit(Prompt(context, tokens, Sampling(**options), seed, False))


def serve(scheduler: Scheduler) -> dict[str, Completion]:
    done = {}
    while not scheduler.is_idle:
        done |= dict(scheduler.advance())
    return done


def turns(scheduler: Scheduler, crowd: int) -> list[Completion]:
    """Four turns of one context, each beside `crowd` others of many lengths."""
    tokens, drawn = text(99, 9), []
    for turn in range(4):
        for other in range(crowd):
            length = 1 + (17 * other + 31 * turn) % 90
            others = text(100 * turn + other, length)
            ask(scheduler, f"{turn}.{other}", others, seed=other, max_tokens=1 + other)
        ask(scheduler, "mine", tokens, seed=turn, max_tokens=7, temperature=0.8)
        drawn.append(serve(scheduler)["mine"])
        tokens = np.concatenate([tokens, drawn[-1].tokens, text(turn, 5)])
    return drawn


def bits(completions: list[Completion]) -> list[tuple[bytes, bytes]]:
    return [(one.tokens.tobytes(), one.logprobs.tobytes()) for one in completions]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_turn_is_the_same_bit_by_bit_alone_in_a_crowd_in_pieces_and_not_cached(
    references, family
) -> None:
    reference = references[family]
    alone = turns(scheduler_of(reference), 0)
    crowd = turns(scheduler_of(reference), 6)
    pieces = turns(scheduler_of(reference, forward_tokens=8), 6)
    assert bits(alone) == bits(crowd) == bits(pieces)
    last = np.concatenate(
        [text(99, 9)] + [np.r_[c.tokens, text(t, 5)] for t, c in enumerate(alone[:-1])]
    )
    fresh = scheduler_of(reference)
    ask(fresh, "anew", last.astype(np.int32), seed=3, max_tokens=7, temperature=0.8)
    anew = serve(fresh)["anew"]
    assert alone[-1].num_reused > 0 == anew.num_reused
    assert bits([anew]) == bits(alone[-1:])


def test_bfloat16_is_near_float32_and_halves_the_layers_matrices(reference) -> None:
    plain_model, short = (
        Model.load(reference.directory, slots=8, max_tokens=256, arithmetic=kind)
        for kind in ("float32", "bfloat16")
    )
    given = dict(max_tokens=1, temperature=0.0)
    answers = []
    for model in (plain_model, short):
        scheduler = Scheduler(model)
        for seed in range(40):
            ask(scheduler, str(seed), text(seed, 30), seed=seed, **given)
        answers.append(serve(scheduler))
    wide, narrow = answers
    gaps = [
        abs(wide[name].logprobs[0] - narrow[name].logprobs[0])
        for name in wide
        if wide[name].tokens[0] == narrow[name].tokens[0]
    ]
    assert len(gaps) >= 36
    assert 0 < max(gaps) < 0.1
    matrices = sum(
        matrix.nbytes
        for layer in plain_model.weights.layers
        for matrix in (layer.qkv, layer.output, layer.gate_up, layer.down)
    )
    saved = plain_model.weights.num_bytes() - short.weights.num_bytes()
    assert saved == matrices // 2


def test_float32_differs_in_a_crowd_so_the_test_above_can_fail(reference) -> None:
    alone, crowd = (turns(scheduler_of(reference, "float32"), n) for n in (0, 6))
    assert bits(alone) != bits(crowd)


@pytest.mark.parametrize("threads", [1, 2])
def test_bits_do_not_depend_on_the_number_of_threads(reference, threads) -> None:
    expected = bits(turns(scheduler_of(reference), 6))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert bits(turns(scheduler_of(reference), 6)) == expected
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_are_those_of_transformers(references, family) -> None:
    scheduler = scheduler_of(references[family])
    tokens = text(5, 40)
    ask(scheduler, "c", tokens, max_tokens=30)
    completion = serve(scheduler)["c"]
    whole = np.concatenate([tokens, completion.tokens])
    rows = references[family].logprobs(whole[:-1])[len(tokens) - 1 :]
    theirs = rows[np.arange(len(rows)), completion.tokens]
    np.testing.assert_allclose(completion.logprobs, theirs, atol=1e-4, rtol=0)


def random(*shape: int, spread: float = 3.0) -> torch.Tensor:
    """Numbers of very different sizes."""
    return torch.randn(*shape) * torch.exp(spread * torch.randn(shape[0], *[1] * (len(shape) - 1)))


@pytest.mark.parametrize("num_terms", [1, 2, 63, 64, 65, 1000])
def test_a_product_is_the_same_in_any_order_of_its_terms(num_terms) -> None:
    torch.manual_seed(num_terms)
    rows, matrix = random(40, num_terms), random(30, num_terms)
    order = torch.randperm(num_terms)
    expected = exact.linear(rows, exact.matrix(matrix))
    assert torch.equal(exact.linear(rows[:, order], exact.matrix(matrix[:, order])), expected)
    truth = rows.double() @ matrix.double().T
    size = rows.abs().amax(1)[:, None] * matrix.abs().amax(1) * num_terms
    assert ((expected - truth).abs() / size).max() < 2e-6


def test_zeros_and_the_largest_numbers_come_through() -> None:
    rows = torch.tensor([[0.0, 0.0], [3e38, 0.0], [1e-40, -1e-40], [1.0, 1e-30]])
    got = exact.linear(rows, exact.matrix(torch.eye(2)))
    torch.testing.assert_close(got, rows, rtol=1e-6, atol=1e-24)
    zeros = torch.zeros(1, 2, 3, 4)
    mask = torch.zeros(1, 1, 3, 3)
    assert torch.equal(exact.attention(zeros, zeros, zeros, mask, 8, 0.5), zeros)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_is_that_of_torch_and_does_not_see_what_is_masked(kv_heads) -> None:
    torch.manual_seed(0)
    queries = torch.randn(5, 4, 3, 16)
    keys, values = torch.randn(5, kv_heads, 20, 16), random(5, kv_heads, 20, 16, spread=1.0)
    mask = torch.zeros(5, 1, 3, 20).masked_fill(torch.rand(5, 1, 3, 20) < 0.4, -torch.inf)
    mask[..., 0], mask[..., 17:] = 0.0, -torch.inf
    seen = exact.attention(queries, keys, values, mask, 160, 0.3)
    truth = plain.attention(*(t.double() for t in (queries, keys, values, mask)), 160, 0.3)
    assert ((seen - truth).abs() / values.abs().amax()).max() < 2e-6
    fewer = partial(torch.narrow, dim=2, start=0, length=17)
    short = exact.attention(queries, fewer(keys), fewer(values), mask[..., :17], 160, 0.3)
    assert torch.equal(seen, short)
    values[:, :, 18] = 1e30
    assert torch.equal(seen, exact.attention(queries, keys, values, mask, 160, 0.3))


def test_single_operations_are_those_of_torch() -> None:
    torch.manual_seed(1)
    rows = random(50, 32)
    calls = [("activated", (rows, activation)) for activation in get_args(Activation)]
    calls += [("log_softmax", (rows,)), ("normed", (rows, 1e-6))]
    for name, arguments in calls:
        ours, theirs = (getattr(one, name)(*arguments) for one in (exact, plain))
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    heads, turns_ = torch.randn(7, 6, 16), torch.polar(torch.ones(7, 1, 8), torch.randn(7, 1, 8))
    ours, theirs = heads.clone(), heads.clone()
    exact.rotate(ours, turns_)
    plain.rotate(theirs, turns_)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("function", [torch.exp, torch.log])
def test_torch_gives_an_element_the_same_bits_wherever_it_stands(function) -> None:
    """What exactness rests on beside IEEE arithmetic."""
    torch.manual_seed(2)
    values = (torch.randn(3000, dtype=torch.float64) * 6).exp()
    whole = function(values)
    for start in range(9):
        for length in (1, 2, 3, 7, 8, 15, 16, 17, 100, 2000):
            part = slice(start, start + length)
            assert torch.equal(function(values[part]), whole[part])
            assert torch.equal(function(values[part].clone()), whole[part])
    assert torch.equal(function(values.view(50, 60)[:, ::7]), whole.view(50, 60)[:, ::7])
