"""The exact posterior over opponents, given the moves of a trial.

`P` opponents thought possible.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from mage_async.environments.rps.opponents import Opponent


class Seen(NamedTuple):
    """One round from the agent's seat."""

    turn: int
    last: int | None
    """The agent's last valid move before it: all that a rule can answer."""
    theirs: int


class Shown(Protocol):
    """A play that keeps what it has shown."""

    seen: list[Seen]


def posterior(
    members: Sequence[Opponent], plays: Sequence[Shown], *, noise: float
) -> dict[str, float]:
    """How probable each is, all equally at first: a move is its rule's, or noise of three."""
    likelihoods = np.ones(len(members))
    for turn, last, theirs in (seen for play in plays for seen in play.seen):
        follows = np.array([each.move(turn, last) == theirs for each in members])
        likelihoods *= noise / 3 + (1 - noise) * follows
    shares = likelihoods / likelihoods.sum()
    return {each.name: float(share) for each, share in zip(members, shares, strict=True)}
