"""The objects that a configuration describes, made in one place for every process."""

from mage_async.assembly.checks import check, check_keys, check_room
from mage_async.assembly.parts import (
    WORDS,
    environment_of,
    named_parts,
    own_sources,
    trial_config_of,
)

__all__ = [
    "WORDS",
    "check",
    "check_keys",
    "check_room",
    "environment_of",
    "named_parts",
    "own_sources",
    "trial_config_of",
]
