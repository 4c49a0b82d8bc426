"""The parts of a mix, and which of them a member belongs to; an environment alone is its own part.

A member of a mix is written `label/member`, such as `hangman/cold`.
"""

from dataclasses import dataclass

from mage_async.environments.environment import Environment, Split
from mage_async.errors import EnvironmentFault

References = dict[str, tuple[float, ...]]
"""Known values by name, a value an episode."""


@dataclass(frozen=True, slots=True)
class Part:
    """One environment of a mix."""

    name: str
    """In the catalogue, or `module:Class`."""
    label: str
    """The part's name in members and reports."""
    environment: Environment
    share: int
    """Groups of training that play this part, of as many as all shares add up to; 0: none, the part
    is evaluated alone.
    """

    def member(self, own: str) -> str:
        """A member of the part's environment, as the mix calls that member."""
        return f"{self.label}/{own}"


class Mixed(Environment):
    """What the rest of the program has to know of a mix."""

    parts: tuple[Part, ...]

    def own_references(self, split: Split, num_episodes: int) -> dict[str, References]:
        """The values that each part knows, by label."""
        ...

    def part(self, member: str) -> tuple[Part, str]:
        """The part that a member belongs to, and what the part itself calls the member.

        Raises:
            EnvironmentFault: no part has that label.
        """
        label, _, own = member.partition("/")
        for part in self.parts:
            if part.label == label:
                return part, own
        labels = ", ".join(part.label for part in self.parts)
        raise EnvironmentFault(f"mix: {member!r} must begin with one of {labels}, and a slash")


def part_of(environment: Environment, member: str) -> Environment:
    """The environment that a member belongs to: the given one, or a part of that mix."""
    return (
        environment.part(member)[0].environment if isinstance(environment, Mixed) else environment
    )


def label_of(environment: Environment, member: str) -> str | None:
    """The label of the part that a member belongs to; None where nothing is mixed."""
    return environment.part(member)[0].label if isinstance(environment, Mixed) else None
