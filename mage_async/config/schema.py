"""The configuration of a run: one typed whole, whose sections stand in `sections/`.

Every key has a default, the value that suits a pretrained model; where a tiny policy wants another
one, `mage_async/config/defaults.py` says so.
"""

from hashlib import blake2s

import msgspec

from mage_async.config.sections.admission import Admission, Population
from mage_async.config.sections.credit import Advantage, Credit
from mage_async.config.sections.engines import Embedded, Sglang
from mage_async.config.sections.expert import Expert
from mage_async.config.sections.learner import Learner
from mage_async.config.sections.memory import MemoryRules
from mage_async.config.sections.policy import Pretrained, Tiny, WarmStart
from mage_async.config.sections.run import (
    Doctor,
    Evaluation,
    Hardware,
    Journal,
    Supervision,
    Tracking,
    Transport,
)
from mage_async.config.sections.sac import SoftActorCritic
from mage_async.config.sections.section import Natural, Section
from mage_async.config.sections.trials import (
    Curriculum,
    Environment,
    SamplingRules,
    Transcript,
    TrialShape,
)


class Config(Section):
    """A whole run."""

    seed: Natural = 0
    """Seed of everything that is drawn."""
    environment: Environment = Environment()
    trial: TrialShape = TrialShape()
    curriculum: Curriculum | None = None
    transcript: Transcript = Transcript()
    policy: Tiny | Pretrained = Pretrained()
    warm_start: WarmStart | None = None
    sampling: SamplingRules = SamplingRules()
    engine: Embedded | Sglang = Embedded()
    admission: Admission = Admission()
    population: Population = Population()
    graph_memory: MemoryRules = MemoryRules()
    credit: Credit = Credit()
    advantage: Advantage = Advantage()
    expert: Expert | None = None
    learner: Learner = Learner()
    sac: SoftActorCritic | None = None
    evaluation: Evaluation = Evaluation()
    transport: Transport = Transport()
    hardware: Hardware = Hardware()
    journal: Journal = Journal()
    supervision: Supervision = Supervision()
    doctor: Doctor = Doctor()
    tracking: Tracking = Tracking()


NOT_COMPARED = {"doctor", "tracking"}
"""Sections that change nothing of what peers do together."""
WHERE_PRESENT = {"sac"}
"""Sections that are compared where a configuration has them: without them digests are as before."""
WHERE_CHANGED = {
    "credit": ("exploration_share",),
    "policy": ("separate_exploration",),
    "population": ("both_seats", "rivals_remember"),
}
"""Keys, by section, that are compared where they are not the default: they came after the section.
"""


def digest(config: Config) -> str:
    """Eight hex digits that peers compare before they work together."""
    compared = {
        name: value
        for name in config.__struct_fields__
        if name not in NOT_COMPARED
        and ((value := getattr(config, name)) is not None or name not in WHERE_PRESENT)
    }
    said = msgspec.to_builtins(compared)
    for section, keys in WHERE_CHANGED.items():
        usual = msgspec.to_builtins(type(compared[section])())
        for key in keys:
            if said[section][key] == usual[key]:
                del said[section][key]
    return blake2s(msgspec.json.encode(said, order="sorted"), digest_size=4).hexdigest()
