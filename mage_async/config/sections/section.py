"""What every table of the configuration is made of: bounded numbers, sections and variants."""

from typing import Annotated

import msgspec
from msgspec import Meta

Count = Annotated[int, Meta(ge=1)]
Natural = Annotated[int, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
NonNegative = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table of the file; a key that the table does not know is an error."""


class Variant(Section, frozen=True, tag_field="kind"):
    """A table that comes in kinds: its key `kind` says which other keys it has."""

    @property
    def kind(self) -> str:
        """The kind's name, as a file says it."""
        return str(self.__struct_config__.tag)
