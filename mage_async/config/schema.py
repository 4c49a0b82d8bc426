"""Define the configuration of a run: all sections in one struct.

Every key has a default that suits a pretrained model; `mage_async/config/defaults.py` has those of
a tiny policy where they differ.
"""

from hashlib import blake2s

import msgspec
from msgspec import field

from mage_async.config.components import CREDITS, ESTIMATORS, AnyAdvantage, AnyCredit
from mage_async.config.learning import Admission, Population
from mage_async.config.learning import Learner as Learner
from mage_async.config.playing import Embedded as Embedded
from mage_async.config.playing import Environment, SamplingConfig, Transcript, TrialShape
from mage_async.config.playing import Sglang as Sglang
from mage_async.config.policy import AnyWarmStart
from mage_async.config.policy import Pretrained as Pretrained
from mage_async.config.policy import Tiny as Tiny
from mage_async.config.running import (
    Doctor,
    Evaluation,
    Hardware,
    Journal,
    Supervision,
    Tracking,
    Transport,
)
from mage_async.config.section import Natural, Section
from mage_async.config.tables import METHOD_TABLES


class Config(Section):
    """A whole run."""

    seed: Natural = 0
    """Seed of every random draw."""
    environment: Environment = Environment()
    trial: TrialShape = TrialShape()
    transcript: Transcript = Transcript()
    policy: Tiny | Pretrained = Pretrained()
    warm_start: AnyWarmStart | None = None
    sampling: SamplingConfig = SamplingConfig()
    engine: Embedded | Sglang = Embedded()
    admission: Admission = Admission()
    population: Population = Population()
    credit: AnyCredit = CREDITS.load("final_only")()
    advantage: AnyAdvantage = ESTIMATORS.load("group_mean")()
    learner: Learner = Learner()
    methods: METHOD_TABLES = field(default_factory=dict)
    """Tables of the methods that are turned on, by name: `[methods.NAME]`. Their keys are those of
    the method's own `Settings`, all of them present."""
    evaluation: Evaluation = Evaluation()
    transport: Transport = Transport()
    hardware: Hardware = Hardware()
    journal: Journal = Journal()
    supervision: Supervision = Supervision()
    doctor: Doctor = Doctor()
    tracking: Tracking = Tracking()


NOT_COMPARED = {"doctor", "tracking"}
"""Sections in which the peers of one run may differ."""


def digest(config: Config) -> str:
    """Return eight hex digits that peers compare before they work together."""
    names = (name for name in config.__struct_fields__ if name not in NOT_COMPARED)
    compared = msgspec.to_builtins({name: getattr(config, name) for name in names})
    return blake2s(msgspec.json.encode(compared, order="sorted"), digest_size=4).hexdigest()
