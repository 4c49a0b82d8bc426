"""Each correction on tokens few enough to do by hand: probabilities are tenths, A is +1 or -1."""

import msgspec
import pytest
import torch

from mage_async.config import config_file
from mage_async.config.schema import AnyCorrection
from mage_async.config.tables import kinds
from mage_async.learning.corrections import (
    AgeMask,
    Cispo,
    Decoupled,
    DecoupledAged,
    Dppo,
    Gspo,
    Icepop,
    Kpop,
    M2po,
    MisGeometric,
    MisSequence,
    MisToken,
    NoCorrection,
    Ppo,
    Tis,
    Tokens,
    Vcpo,
    largest_set_under,
    sums_within,
    turn_means,
)

CLIP = {"clip_low": 0.2, "clip_high": 0.3}


def tokens(
    current, behaviour, advantages, *, proximal=None, staleness=None, turns=None, sequences=None
):
    """Tokens of given probabilities; the proximal policy is the current one unless given."""
    size = len(current)
    logprobs = torch.tensor(current).log().requires_grad_()
    return Tokens(
        logprobs,
        logprobs.detach() if proximal is None else torch.tensor(proximal).log(),
        torch.tensor(behaviour).log(),
        torch.tensor(advantages),
        torch.tensor(staleness or [0] * size, dtype=torch.int32),
        torch.tensor(turns or range(size)),
        torch.tensor(sequences or range(size)),
    )


def gradient(made, given):
    """The gradient of the summed losses with respect to each token's log-prob."""
    made.losses.sum().backward()
    return given.logprobs.grad


def close(values):
    return pytest.approx(values, rel=1e-5, abs=1e-6)


def test_none_clips_around_the_proximal_policy_and_ignores_who_drew_the_token():
    given = tokens([0.6, 0.5, 0.3], [0.1, 0.9, 0.2], [1.0, 1.0, -1.0], proximal=[0.4, 0.4, 0.4])
    made = NoCorrection(**CLIP).surrogate(given)
    # ratios 1.5, 1.25, 0.75: the first is above 1.3 and gains; the last is below 0.8 and falls
    assert made.losses.tolist() == close([-1.3, -1.25, 0.8])
    assert made.is_clipped.tolist() == [True, False, True]
    assert made.weights.tolist() == [1.0, 1.0, 1.0]
    assert gradient(made, given).tolist() == close([0.0, -1.25, 0.0])


def test_ppo_clips_around_the_behaviour_policy():
    given = tokens([0.6, 0.5, 0.3, 0.8], [0.4, 0.4, 0.4, 0.4], [1.0, 1.0, -1.0, -1.0])
    made = Ppo(**CLIP).surrogate(given)
    # the last one moved the wrong way, twofold, and nothing bounds its push
    assert made.losses.tolist() == close([-1.3, -1.25, 0.8, 2.0])
    assert made.is_clipped.tolist() == [True, False, True, False]
    assert gradient(made, given).tolist() == close([0.0, -1.25, 0.0, 2.0])


def test_decoupled_weighs_by_the_truncated_ratio_to_the_behaviour_policy():
    given = tokens([0.6, 0.5, 0.3], [0.1, 0.8, 0.4], [1.0, 1.0, -1.0], proximal=[0.4, 0.4, 0.4])
    made = Decoupled(**CLIP, max_weight=2.0).surrogate(given)
    assert made.weights.tolist() == close([2.0, 0.5, 1.0])
    assert made.losses.tolist() == close([-2.6, -0.625, 0.8])
    assert gradient(made, given).tolist() == close([0.0, -0.625, 0.0])


def test_decoupled_is_the_loss_of_the_first_milestone_bit_for_bit():
    source = torch.Generator().manual_seed(7)
    current, proximal, behaviour = (-3 * torch.rand(3, 500, generator=source)).unbind()
    advantages = torch.randn(500, generator=source)
    current.requires_grad_()
    weights = (proximal - behaviour).exp().clamp(max=2.0)
    ratio = (current - proximal).exp()
    clipped = ratio.clamp(1 - 0.2, 1 + 0.3)
    losses = -weights * torch.minimum(ratio * advantages, clipped * advantages)
    losses.sum().backward()
    expected, current.grad = current.grad, None
    none_known = torch.zeros(500, dtype=torch.int32)
    turns = torch.arange(500)
    given = Tokens(current, proximal, behaviour, advantages, none_known, turns, turns)
    made = Decoupled(**CLIP, max_weight=2.0).surrogate(given)
    made.losses.sum().backward()
    assert torch.equal(made.losses, losses)
    assert torch.equal(current.grad, expected)


def test_tis_truncates_the_weight_and_never_stops_a_gradient():
    given = tokens([0.6, 0.2, 0.4], [0.1, 0.4, 0.4], [1.0, -1.0, -1.0])
    made = Tis(max_weight=2.0).surrogate(given)
    assert gradient(made, given).tolist() == close([-2.0, 0.5, 1.0])
    assert made.is_clipped.tolist() == [True, False, False]


def test_cispo_clips_the_weight_on_both_sides_and_never_stops_a_gradient():
    given = tokens([0.6, 0.2, 0.4], [0.1, 0.4, 0.4], [1.0, -1.0, -1.0])
    made = Cispo(**CLIP).surrogate(given)
    assert gradient(made, given).tolist() == close([-1.3, 0.8, 1.0])
    assert made.is_clipped.tolist() == [True, True, False]


def test_cispo_has_no_lower_bound_by_default_as_in_its_paper():
    given = tokens([0.6, 0.001, 0.2], [0.1, 0.1, 0.4], [1.0, -1.0, 1.0])
    made = Cispo().surrogate(given)
    assert gradient(made, given).tolist() == close([-1.28, 0.01, -0.5])
    assert made.is_clipped.tolist() == [True, False, False]


def test_icepop_leaves_out_tokens_outside_the_band_on_either_side():
    given = tokens([0.6, 0.2, 0.4], [0.1, 0.5, 0.2], [1.0, -1.0, -1.0])
    made = Icepop(**CLIP, keep_low=0.5, keep_high=5.0).surrogate(given)
    assert made.is_masked.tolist() == [True, True, False]  # weights 6, 0.4, 2
    assert made.losses.tolist() == close([0.0, 0.0, 2.0])
    assert gradient(made, given).tolist() == close([0.0, 0.0, 2.0])


def test_kpop_allows_a_rare_token_more_than_a_likely_one():
    # Both are twice as likely as they were: of probability 0.02, and of 0.9.
    given = tokens([0.02, 0.9, 0.45], [0.01, 0.45, 0.9], [1.0, 1.0, -1.0])
    made = Kpop(**CLIP, max_divergence=0.1).surrogate(given)
    assert made.is_masked.tolist() == [False, True, True]
    assert made.losses.tolist() == close([-2.0, 0.0, 0.0])
    certain = tokens([1.0, 1.0], [1.0, 0.9], [1.0, 1.0])
    assert Kpop(max_divergence=0.2).surrogate(certain).is_masked.tolist() == [False, True]


def test_vcpo_gives_each_token_the_truncated_product_of_its_sequence():
    given = tokens([0.4, 0.3, 0.4, 0.4], [0.2, 0.4, 0.2, 0.1], [1.0] * 4, sequences=[0, 0, 1, 1])
    made = Vcpo(max_weight=3.0).surrogate(given)
    assert made.weights.tolist() == close([1.5, 1.5, 3.0, 3.0])  # 2 * 0.75, and 2 * 4
    assert made.is_clipped.tolist() == [False, False, True, True]
    assert gradient(made, given).tolist() == close([-1.5, -1.5, -3.0, -3.0])


def test_mis_leaves_out_a_token_of_large_weight_and_keeps_one_of_small_weight():
    given = tokens([0.6, 0.2, 0.4], [0.1, 0.5, 0.2], [1.0, -1.0, -1.0])
    made = MisToken(**CLIP, max_weight=2.5).surrogate(given)
    assert made.weights.tolist() == close([0.0, 0.4, 2.0])
    assert gradient(made, given).tolist() == close([0.0, 0.4, 2.0])


def test_mis_by_sequence_gives_each_token_the_product_of_its_turn():
    given = tokens([0.4, 0.3, 0.4, 0.4], [0.2, 0.4, 0.2, 0.2], [1.0] * 4, turns=[0, 0, 1, 1])
    made = MisSequence(**CLIP, max_weight=3.0).surrogate(given)
    assert made.weights.tolist() == close([1.5, 1.5, 0.0, 0.0])  # 2 * 0.75, and 2 * 2
    assert made.is_masked.tolist() == [False, False, True, True]


def test_mis_by_geometric_mean_keeps_a_turn_whose_tokens_cancel():
    given = tokens([0.4, 0.1, 0.4, 0.4], [0.1, 0.4, 0.2, 0.2], [1.0] * 4, turns=[0, 0, 1, 1])
    made = MisGeometric(**CLIP, max_weight=2.0, keep_low=0.9, keep_high=1.1).surrogate(given)
    assert made.weights.tolist() == close([2.0, 0.25, 0.0, 0.0])  # means 1 and 2
    assert made.is_masked.tolist() == [False, False, True, True]


def test_mis_by_geometric_mean_has_the_bounds_of_its_authors_by_default():
    """verl's `decoupled_geo_rs_token_tis`: a mean within 0.999 and 1.001, weights of at most 2."""
    ratios = [3.0, 1 / 3, 3.0, 1.004 / 3, 1.0005, 1.0, 1.0, 0.997]
    given = tokens(
        [0.2 * each for each in ratios], [0.2] * 8, [1.0] * 8, turns=[0, 0, 1, 1, 2, 2, 3, 3]
    )
    made = MisGeometric().surrogate(given)
    assert made.weights.tolist() == close([2.0, 1 / 3, 0.0, 0.0, 1.0005, 1.0, 0.0, 0.0])
    assert made.is_masked.tolist() == [False, False, True, True, False, False, True, True]


def test_gspo_clips_a_whole_turn_by_its_geometric_mean():
    given = tokens(
        [0.8, 0.4, 0.8, 0.8], [0.2, 0.4, 0.8, 0.8], [1.0, 1.0, -1.0, -1.0], turns=[0, 0, 1, 1]
    )
    made = Gspo(**CLIP).surrogate(given)
    # turn 0: sqrt(4 * 1) = 2, above 1.3 and gaining; turn 1: 1
    assert made.losses.tolist() == close([-1.3, -1.3, 1.0, 1.0])
    assert made.is_clipped.tolist() == [True, True, False, False]
    assert gradient(made, given).tolist() == close([0.0, 0.0, 1.0, 1.0])


def test_dppo_leaves_out_what_moved_too_far_in_the_direction_it_is_pushed():
    given = tokens(
        [0.6, 0.2, 0.6, 0.03, 0.1], [0.3, 0.5, 0.3, 0.01, 0.5], [1.0, 1.0, -1.0, 1.0, -1.0]
    )
    made = Dppo(max_probability_change=0.2).surrogate(given)
    # up by 0.3 and pushed up; down and pushed up; up and pushed down; threefold, yet by 0.02 only;
    # down by 0.4 and pushed down
    assert made.is_masked.tolist() == [True, False, False, False, True]
    assert gradient(made, given).tolist() == close([0.0, -0.4, 2.0, -3.0, 0.0])


def test_dppo_truncates_the_weight_of_a_token_that_became_far_likelier_and_is_pushed_down():
    given = tokens([0.6, 0.6, 0.12], [0.01, 0.2, 0.01], [-1.0, -1.0, 1.0])
    made = Dppo(max_weight=10.0).surrogate(given)
    assert gradient(made, given).tolist() == close([10.0, 3.0, -10.0])
    assert made.losses.tolist() == close([10.0, 3.0, -10.0])
    assert made.is_clipped.tolist() == [True, False, True]
    assert not made.is_masked.any()


def test_m2po_leaves_out_the_fewest_tokens_that_bring_the_second_moment_under_its_bound():
    behaviour = [0.4 / 1.1, 0.2, 0.4 / 3]
    given = tokens([0.4, 0.4, 0.4], behaviour, [1.0, 1.0, 1.0])  # log-ratios ln 1.1, ln 2, ln 3
    made = M2po(max_second_moment=0.25).surrogate(
        given
    )  # (0.01 + 0.48) / 2 = 0.245; with the third 0.57
    assert made.is_masked.tolist() == [False, False, True]
    assert gradient(made, given).tolist() == close([-1.1, -2.0, 0.0])


def test_m2po_never_leaves_out_what_pulls_a_token_back_nor_counts_what_is_worth_nothing():
    # fivefold and punished, a fifth and rewarded; four times as likely, worth nothing; a quarter
    # and punished; threefold and rewarded
    current, behaviour = [0.5, 0.1, 0.4, 0.1, 0.6], [0.1, 0.5, 0.1, 0.4, 0.2]
    given = tokens(current, behaviour, [-1.0, 1.0, 0.0, -1.0, 1.0])
    made = M2po(max_second_moment=1.21).surrogate(given)  # ln(3) ** 2 = 1.207; with ln(4) ** 2 1.56
    assert made.is_masked.tolist() == [False, False, False, True, False]
    assert gradient(made, given).tolist() == close([5.0, -0.2, 0.0, 0.0, -3.0])


def test_the_largest_set_under_a_bound_is_made_of_the_smallest_values():
    kept = largest_set_under(torch.tensor([9.0, 1.0, 2.0, 6.0]), 3.0)
    assert kept.tolist() == [False, True, True, True]
    assert not largest_set_under(torch.tensor([9.0]), 3.0).any()


def test_an_aged_bound_shrinks_towards_one():
    given = tokens([0.9] * 3, [0.1] * 3, [1.0] * 3, staleness=[0, 1, 2])
    made = DecoupledAged(**CLIP, max_weight=3.0, age_decay=0.5).surrogate(given)
    assert made.weights.tolist() == close([3.0, 2.0, 1.5])


def test_an_age_mask_leaves_out_what_is_over_age_and_nothing_else():
    given = tokens([0.4] * 3, [0.2] * 3, [1.0] * 3, staleness=[0, 2, 3])
    made = AgeMask(**CLIP, max_weight=3.0, max_age=2).surrogate(given)
    assert made.is_masked.tolist() == [False, False, True]
    assert made.losses.tolist() == close([-2.0, -2.0, 0.0])


def test_sums_and_means_over_turns_reach_every_token():
    values, turns = torch.tensor([1.0, 2.0, 3.0, 5.0]), torch.tensor([0, 1, 1, 2])
    assert sums_within(values, turns).tolist() == [1.0, 5.0, 5.0, 5.0]
    assert turn_means(values, turns).tolist() == [1.0, 2.5, 2.5, 5.0]


@pytest.mark.parametrize("name", kinds(AnyCorrection))
def test_every_correction_takes_its_constants_from_the_configuration(name):
    config = config_file.load(config_file.find(None), [f"learner.correction={name}"])
    rules = config.learner.correction
    made = rules.surrogate(tokens([0.4, 0.5], [0.4, 0.5], [1.0, -1.0]))
    assert made.losses.shape == (2,)
    tight = {"clip_high": 0.0, "clip_low": 0.0, "max_weight": 1.0, "keep_low": 1.0}
    tight |= {"keep_high": 1.0, "max_second_moment": 1e-9, "max_probability_change": 0.0}
    tight |= {"max_age": 0, "age_decay": 0.0, "max_divergence": 1e-9}
    own = {key: value for key, value in tight.items() if key in rules.__struct_fields__}
    sharp = msgspec.structs.replace(rules, **own)
    stale = tokens([0.46], [0.4], [1.0], proximal=[0.4002], staleness=[1])
    there = rules.surrogate(stale).losses
    assert not torch.equal(sharp.surrogate(stale).losses, there)
