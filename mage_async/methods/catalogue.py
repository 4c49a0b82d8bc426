"""Register the methods by name. The class of a method is imported when it is first used.

A run turns a method on by a table of its configuration, `[methods.graph_memory]`. A method from
outside this package is named `module:Class` in the same place, `[methods."my_file:MyMethod"]`.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

from mage_async.user_modules import Registry, check_inherits

METHODS = Registry(
    "method",
    {
        "both_seats": "mage_async.methods.both_seats:BothSeats",
        "graph_memory": "mage_async.methods.graph_memory:GraphMemory",
        "metacure": "mage_async.methods.metacure:MetaCure",
        "rema": "mage_async.methods.rema:Rema",
        "sac_glam": "mage_async.methods.sac_glam.method:SacGlam",
        "scaling_inter": "mage_async.methods.scaling_inter:ScalingInter",
        "sge": "mage_async.methods.sge:Sge",
        "stepagent": "mage_async.methods.stepagent:StepAgent",
    },
)


@cache
def method_class(name: str) -> Any:
    """Return the class of a method, a subclass of `mage_async.methods.method.Method`.

    Args:
        name: a name of `METHODS`, or `module:Class` of a user's own.

    Raises:
        ConfigError: there is no such method, its module cannot be imported, or `check_inherits`
            refuses it.
    """
    found: Any = METHODS.load(name)
    if name not in METHODS:
        check_inherits(found, "mage_async.methods.method:Method", f"method {name!r}")
        check_inherits(
            found.Settings, "mage_async.config.section:Section", f"`Settings` of method {name!r}"
        )
    return found


@cache
def metrics() -> dict[str, tuple[str, str]]:
    """Return the unit and the meaning of each metric that the methods of this package add."""
    return {name: each for method in METHODS for name, each in method_class(method).metrics.items()}


def presets() -> dict[str, Mapping[str, Any]]:
    """Return the keys that the presets of this package's methods set, by preset."""
    return {name: keys for each in METHODS for name, keys in method_class(each).presets.items()}
