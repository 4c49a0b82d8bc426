"""The function of each kind of correction, with the constants of a configuration filled in."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

import msgspec

from mage_async.config.sections import corrections as kinds
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

CORRECTIONS: Mapping[type[kinds.Correction], Callable[..., Surrogate]] = {
    kinds.NoCorrection: none,
    kinds.Ppo: ppo,
    kinds.Decoupled: decoupled,
    kinds.Tis: tis,
    kinds.Icepop: icepop,
    kinds.MisToken: mis_token,
    kinds.MisSequence: mis_sequence,
    kinds.MisGeometric: mis_geometric,
    kinds.Cispo: cispo,
    kinds.Gspo: gspo,
    kinds.Dppo: dppo,
    kinds.M2po: m2po,
    kinds.DecoupledAged: decoupled_aged,
    kinds.AgeMask: age_mask,
}
"""The function of each kind, whose constants are the kind's keys, but for `dual_clip`."""


def correction(rules: kinds.Correction) -> Correction:
    """The configured correction: a function of tokens alone."""
    constants = msgspec.structs.asdict(rules)
    dual_clip = constants.pop("dual_clip", 0.0)
    correct = partial(CORRECTIONS[type(rules)], **constants)
    return DualClip(correct, anchor_of(rules), dual_clip) if dual_clip else correct


def anchor_of(rules: kinds.Correction) -> Literal["proximal", "behaviour"]:
    """Around which policy the ratio of a clipped loss is taken.

    Such a loss is `-weight * min(r A, clip(r) A)` with a weight that does not depend on the current
    policy. For ppo the weight is 1.
    """
    return "behaviour" if isinstance(rules, kinds.Ppo) else "proximal"
