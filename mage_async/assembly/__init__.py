"""From the configuration to the objects that it describes, in one place for every process."""

from mage_async.assembly.checks import check
from mage_async.assembly.parts import (
    WORDS,
    environment_of,
    expert_directory,
    experts_of,
    named_parts,
    rules_of,
)

__all__ = [
    "WORDS",
    "check",
    "environment_of",
    "expert_directory",
    "experts_of",
    "named_parts",
    "rules_of",
]
