"""Define the building blocks of a configuration: bounded numbers, tables, and tables of kinds."""

from typing import Annotated, Any, dataclass_transform

import msgspec
from msgspec import Meta, field

# Types of numbers; msgspec refuses a value outside of the bounds.
Count = Annotated[int, Meta(ge=1)]
Natural = Annotated[int, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
NonNegative = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]


# A subclass of a frozen struct is frozen too; this decorator says so to type checkers.
@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Hold a table of the configuration, such as `[learner]`; its fields are the keys, and any
    other key is an error."""


class Variant(Section, frozen=True, tag_field="kind"):
    """Hold a table that comes in kinds: its key `kind` decides which other keys it has."""

    @property
    def kind(self) -> str:
        """Name of the kind, as a file writes it."""
        return str(self.__struct_config__.tag)

    def check(self, config: Any) -> None:
        """Refuse a configuration that this kind cannot work with.

        Args:
            config: the whole `Config` that this table is part of.

        Raises:
            ConfigError: the message has the key, its value and what to write instead.
        """
