"""Register every component that a configuration chooses by name.

A component is a class that holds its own configuration: its fields are the keys of its table, and
its `tag` is its name. To add one, write its class, with a `tag`, in the module of its kind.
A class of a user's own is named by its address: `learner.correction.kind = "my_losses:Squared"`.
"""

from functools import cache, reduce
from importlib import import_module
from operator import or_
from typing import TYPE_CHECKING, Any

import msgspec

from mage_async.config.section import Variant
from mage_async.user_modules import Registry, check_inherits


class Components(Registry):
    """Register the components of one sort, such as all corrections, by their tags.

    Components are found without a list: all classes in the module of `base` that inherit `base` and
    have a tag.

    Args:
        noun: Noun for a component in error messages, such as "correction".
        base: "module:Class" that every component inherits.
    """

    def __init__(self, noun: str, base: str) -> None:
        home, _, name = base.partition(":")
        module = import_module(home)
        self.base: type[Variant] = getattr(module, name)
        addresses = {
            tag: f"{home}:{each.__name__}"
            for each in vars(module).values()
            if isinstance(each, type) and issubclass(each, self.base) and (tag := _tag(each))
        }
        super().__init__(noun, addresses)


def _tag(kind: type[Variant]) -> str:
    """Return a component's own `tag`; "" for a class without one, which is no component."""
    # msgspec tags a class without a `tag` of its own, such as a base, by the name of the class.
    tag = str(kind.__struct_config__.tag)
    return tag if tag != kind.__name__ else ""


CORRECTIONS = Components("correction", "mage_async.learning.corrections:Correction")
CREDITS = Components("credit", "mage_async.credit.returns:Credit")
ESTIMATORS = Components("advantage estimator", "mage_async.learning.advantages:Advantage")
MATCHMAKERS = Components("matchmaker", "mage_async.tasks.matchmaking:Matchmaker")
WEIGHT_TRANSPORTS = Components(
    "weight transport", "mage_services.weights.weight_transport:WeightTransport"
)
TRACKERS = Components("tracker", "mage_services.tracking.tracker:Tracker")
# The unions of components below have this order.
REGISTRIES = (CORRECTIONS, CREDITS, ESTIMATORS, MATCHMAKERS, WEIGHT_TRANSPORTS, TRACKERS)


def _union(registry: Components) -> Any:
    """Return the union of a registry's components, the type of a key of the configuration."""
    return reduce(or_, map(registry.load, registry))


if TYPE_CHECKING:
    # A type checker sees the base class, whose attributes all components have, a user's own
    # included.
    from mage_async.credit.returns import Credit
    from mage_async.learning.advantages import Advantage
    from mage_async.learning.corrections import Correction
    from mage_async.tasks.matchmaking import Matchmaker
    from mage_services.tracking.tracker import Tracker
    from mage_services.weights.weight_transport import WeightTransport

    AnyCorrection = Correction
    AnyCredit = Credit
    AnyAdvantage = Advantage
    AnyMatchmaker = Matchmaker
    AnyWeightTransport = WeightTransport
    AnyTracker = Tracker
else:
    AnyCorrection, AnyCredit, AnyAdvantage, AnyMatchmaker, AnyWeightTransport, AnyTracker = map(
        _union, REGISTRIES
    )


def decode_component(registry: Components, table: dict[str, Any]) -> Any:
    """Decode the table of a component, registered or of a user's own, by its kind.

    Raises:
        ConfigError: no component has this name.
        msgspec.ValidationError: a key or value is wrong.
    """
    field = str(registry.base.__struct_config__.tag_field)
    return msgspec.convert(table, component_class(registry, table[field]))


@cache
def component_class(registry: Components, name: str) -> type[Variant]:
    """Return the class of a component.

    Args:
        name: a tag, or the address `module:Class` of a user's own class, which must inherit the
            base. For a user's class, a subclass of it is returned, whose tag is the address.

    Raises:
        ConfigError: there is no such class, or `check_inherits` refuses it.
    """
    found, base = registry.load(name), registry.base
    if name in registry:
        return found
    address = f"{base.__module__}:{base.__name__}"
    check_inherits(found, address, f"{registry.noun} {name!r}")
    # The tag is written into files as the kind. As it is the address, other processes find the same
    # class by it.
    own = msgspec.defstruct(found.__name__, [], bases=(found,), tag=name, frozen=True)
    assert issubclass(own, Variant)
    return own
