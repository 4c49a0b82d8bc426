"""M2PO (arXiv 2510.01161): its formula, and the threshold of its authors' code
(`kpo_clip_harmful_tokens`), each worked in plain Python.
"""

import math
import random

import torch

from mage_async.learning.corrections import M2po, Tokens

BOUND = 0.04
SOURCE = random.Random(5)
ADVANTAGES = [SOURCE.choice([-1.0, 1.0]) for _ in range(400)]
GAPS = [SOURCE.gauss(0.0, 0.35) for _ in ADVANTAGES]
"""Log-prob now minus log-prob when sampled."""
HARMFUL = sorted(abs(gap) for gap, own in zip(GAPS, ADVANTAGES, strict=True) if gap * own > 0)
"""Log-ratios of the tokens that would be pushed further away, without signs."""


def is_masked():
    behaviour = torch.full((400,), -3.0, dtype=torch.float64)
    current = behaviour + torch.tensor(GAPS, dtype=torch.float64)
    fresh, turns = torch.zeros(400, dtype=torch.int32), torch.arange(400)
    advantages = torch.tensor(ADVANTAGES, dtype=torch.float64)
    given = Tokens(current, current, behaviour, advantages, fresh, turns, turns)
    return M2po(max_second_moment=BOUND).surrogate(given).is_masked.tolist()


def masked_beyond(threshold):
    rows = zip(GAPS, ADVANTAGES, strict=True)
    return [gap * own > 0 and abs(gap) > threshold for gap, own in rows]


def test_the_mean_square_of_as_many_harmful_tokens_as_possible_is_bounded():
    def second_moment(count):
        return sum(gap**2 for gap in HARMFUL[:count]) / count

    kept = max(count for count in range(1, len(HARMFUL) + 1) if second_moment(count) <= BOUND)
    assert is_masked() == masked_beyond(HARMFUL[kept - 1])


def authors_threshold():
    """The largest log-ratio such that the mean square is bounded if larger ones are cut there."""
    capped = [sum(min(gap, most) ** 2 for gap in HARMFUL) / len(HARMFUL) for most in HARMFUL]
    return HARMFUL[max(place for place, moment in enumerate(capped) if moment < BOUND)]


def test_the_authors_code_counts_masked_tokens_too_and_has_a_lower_threshold():
    ours, threshold = is_masked(), authors_threshold()
    theirs = masked_beyond(threshold)
    assert sum(theirs) > sum(ours)
    assert all(their or not our for our, their in zip(ours, theirs, strict=True))
    # But their loss never masks a ratio between 0.7 and 1.5 (`miniclip_low`, `miniclip_high`).
    floored = [
        their and not 0.7 <= math.exp(gap) <= 1.5 for their, gap in zip(theirs, GAPS, strict=True)
    ]
    assert 0 < sum(floored) < sum(theirs)
