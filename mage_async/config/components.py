"""Every component that a configuration chooses by name: one line each.

A component is a class that holds its own configuration: its fields are the keys of its table, its
tag is its name here. To add one, write its class beside the others of its kind and add its line.
A class of a user's own needs no line: `learner.correction.kind = "my_losses:Squared"`.
"""

from functools import cache, reduce
from operator import or_
from typing import Any

import msgspec

from mage_async.config.section import Variant
from mage_async.errors import ConfigError
from mage_async.registry import Registry

_CORRECTIONS = "mage_async.learning.corrections"
_RETURNS = "mage_async.credit.returns"
_ADVANTAGES = "mage_async.learning.advantages"
_MATCHMAKING = "mage_async.tasks.matchmaking"
_WEIGHTS = "mage_services.weights.weight_transport"
_TRACKING = "mage_services.tracking"

CORRECTIONS = Registry(
    "correction",
    {
        "none": f"{_CORRECTIONS}:NoCorrection",
        "ppo": f"{_CORRECTIONS}:Ppo",
        "decoupled": f"{_CORRECTIONS}:Decoupled",
        "tis": f"{_CORRECTIONS}:Tis",
        "icepop": f"{_CORRECTIONS}:Icepop",
        "mis_token": f"{_CORRECTIONS}:MisToken",
        "mis_sequence": f"{_CORRECTIONS}:MisSequence",
        "mis_geometric": f"{_CORRECTIONS}:MisGeometric",
        "cispo": f"{_CORRECTIONS}:Cispo",
        "gspo": f"{_CORRECTIONS}:Gspo",
        "dppo": f"{_CORRECTIONS}:Dppo",
        "m2po": f"{_CORRECTIONS}:M2po",
        "decoupled_aged": f"{_CORRECTIONS}:DecoupledAged",
        "age_mask": f"{_CORRECTIONS}:AgeMask",
    },
)
CREDITS = Registry(
    "credit",
    {
        "differential": f"{_RETURNS}:Differential",
        "differential_dense": f"{_RETURNS}:DifferentialDense",
        "cumulative_paper": f"{_RETURNS}:CumulativePaper",
        "cumulative_code": f"{_RETURNS}:CumulativeCode",
        "single_episode": f"{_RETURNS}:SingleEpisode",
        "final_only": f"{_RETURNS}:FinalOnly",
    },
)
ESTIMATORS = Registry(
    "advantage estimator",
    {
        "group_mean": f"{_ADVANTAGES}:GroupMean",
        "leave_one_out": f"{_ADVANTAGES}:LeaveOneOut",
        "gigpo": f"{_ADVANTAGES}:Gigpo",
    },
)
MATCHMAKERS = Registry(
    "matchmaker",
    {
        "decks": f"{_MATCHMAKING}:Decks",
        "fixed": f"{_MATCHMAKING}:Fixed",
        "resampled": f"{_MATCHMAKING}:Resampled",
        "prioritised": f"{_MATCHMAKING}:Prioritised",
        "progress": f"{_MATCHMAKING}:Progress",
    },
)
WEIGHT_TRANSPORTS = Registry(
    "weight transport",
    {
        "disk": f"{_WEIGHTS}:Disk",
        "tensor": f"{_WEIGHTS}:SharedMemory",
        "nccl": f"{_WEIGHTS}:Nccl",
    },
)
TRACKERS = Registry(
    "tracker",
    {
        "wandb": f"{_TRACKING}.to_wandb:Wandb",
        "tensorboard": f"{_TRACKING}.to_tensorboard:TensorBoard",
        "mlflow": f"{_TRACKING}.to_mlflow:Mlflow",
        "trackio": f"{_TRACKING}.to_trackio:Trackio",
    },
)


REGISTRIES = (CORRECTIONS, CREDITS, ESTIMATORS, MATCHMAKERS, WEIGHT_TRANSPORTS, TRACKERS)


def union(registry: Registry) -> Any:
    """Return the union of a registry's components, as the type of a configuration's key."""
    return reduce(or_, registry.classes())


def registry_of(kind: type[Variant]) -> Registry | None:
    """Return the registry of a component's class; None if the class is no component."""
    return next((each for each in REGISTRIES if issubclass(kind, _base(each))), None)


def component(registry: Registry, table: dict[str, Any]) -> Any:
    """Decode the table of a component, registered or of a user's own, by its kind.

    Raises:
        ConfigError: there is no such component.
        msgspec.ValidationError: a key or value is wrong.
    """
    field = str(_base(registry).__struct_config__.tag_field)
    return msgspec.convert(table, component_class(registry, table[field]))


@cache
def component_class(registry: Registry, name: str) -> type[Variant]:
    """Return the class of a registered name, or of `module:Class`, which must inherit the base.

    Raises:
        ConfigError: there is no such class, or it inherits something else.
    """
    found, base = registry.load(name), _base(registry)
    if name in registry:
        return found
    if not issubclass(found, base):
        raise ConfigError(
            f"{registry.noun} {name!r}: inherit {base.__module__}.{base.__name__}, whose methods "
            "say what it has to do"
        )
    # The tag is what is written back into a file, so that the next process finds the class again.
    return msgspec.defstruct(found.__name__, [], bases=(found,), tag=name, frozen=True)


@cache
def _base(registry: Registry) -> type[Variant]:
    """Return the nearest common parent of a registry's components."""
    first, *others = registry.classes()
    return next(each for each in first.__mro__ if all(issubclass(kind, each) for kind in others))
