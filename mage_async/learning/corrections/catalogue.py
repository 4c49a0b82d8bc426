"""Corrections by the name a configuration gives them, with its constants filled in."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

from mage_async.config.schema import Learner
from mage_async.learning.corrections.aged import age_mask, decoupled_aged
from mage_async.learning.corrections.cispo import cispo
from mage_async.learning.corrections.decoupled import decoupled
from mage_async.learning.corrections.dppo import dppo
from mage_async.learning.corrections.dual_clip import DualClip
from mage_async.learning.corrections.gspo import gspo
from mage_async.learning.corrections.icepop import icepop
from mage_async.learning.corrections.m2po import m2po
from mage_async.learning.corrections.mis import mis_geometric, mis_sequence, mis_token
from mage_async.learning.corrections.none import none
from mage_async.learning.corrections.ppo import ppo
from mage_async.learning.corrections.surrogate import Correction, Surrogate
from mage_async.learning.corrections.tis import tis

CLIP = {"clip_low": "clip_low", "clip_high": "clip_high"}
WEIGHT = {"max_weight": "max_weight"}
BAND = {"keep_low": "keep_low", "keep_high": "keep_high"}

CORRECTIONS: Mapping[str, tuple[Callable[..., Surrogate], Mapping[str, str]]] = {
    "none": (none, CLIP),
    "ppo": (ppo, CLIP),
    "decoupled": (decoupled, CLIP | WEIGHT),
    "tis": (tis, WEIGHT),
    "icepop": (icepop, CLIP | BAND),
    "mis_token": (mis_token, CLIP | WEIGHT),
    "mis_sequence": (mis_sequence, CLIP | WEIGHT),
    "mis_geometric": (mis_geometric, CLIP | WEIGHT | BAND),
    "cispo": (cispo, CLIP),
    "gspo": (gspo, CLIP),
    "dppo": (dppo, {"max_change": "max_probability_change"}),
    "m2po": (m2po, {"max_second_moment": "max_second_moment"}),
    "decoupled_aged": (decoupled_aged, CLIP | WEIGHT | {"age_decay": "age_decay"}),
    "age_mask": (age_mask, CLIP | WEIGHT | {"max_age": "max_age"}),
}
"""Each function, and which key of `[learner]` each of its constants is."""

CLIPPED_AROUND: Mapping[str, Literal["proximal", "behaviour"]] = {
    "none": "proximal",
    "ppo": "behaviour",
    "decoupled": "proximal",
    "icepop": "proximal",
    "mis_token": "proximal",
    "mis_sequence": "proximal",
    "mis_geometric": "proximal",
    "decoupled_aged": "proximal",
    "age_mask": "proximal",
}
"""Those whose loss is `-weight * min(r A, clip(r) A)` with a weight that does not depend on the
current policy, and around which policy `r` is taken. For ppo the weight is 1.
"""


def correction(rules: Learner) -> Correction:
    """The configured correction: a function of tokens alone."""
    function, keys = CORRECTIONS[rules.correction]
    correct = partial(function, **{name: getattr(rules, key) for name, key in keys.items()})
    if not rules.dual_clip:
        return correct
    return DualClip(correct, CLIPPED_AROUND[rules.correction], rules.dual_clip)
