"""The hidden opponents of Kuhn poker: with which cards each one bets and calls.

Cards are numbers: 0 jack, 1 queen, 2 king. In a hand a player decides at most once before any bet,
and at most once after a bet of the other player. So a style is three probabilities for each.
"""

import itertools
from dataclasses import dataclass

CARDS = ("jack", "queen", "king")
Three = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class Style:
    """Probabilities by card: of betting where there is no bet yet, and of calling a bet."""

    bets: Three
    calls: Three


@dataclass(frozen=True, slots=True)
class Player:
    """A way to play either seat."""

    name: str
    family: str
    first: Style
    """Where it speaks first."""
    second: Style

    def style(self, seat: int) -> Style:
        """The style in a seat."""
        return self.second if seat else self.first


def _player(name: str, family: str, bets: Three, calls: Three) -> Player:
    style = Style(bets, calls)
    return Player(name, family, style, style)


def _cards(chosen: Three) -> str:
    """Such as `queen-king`."""
    return "-".join(itertools.compress(CARDS, chosen)) or "none"


def _pattern(bets: Three, calls: Three) -> Player:
    family = f"call-{_cards(calls)}"
    return _player(f"bet-{_cards(bets)}-{family}", family, bets, calls)


_CALLS: tuple[Three, ...] = ((0, 0, 0), (0, 0, 1), (0, 1, 1), (1, 1, 1))
"""A style that calls with a card calls with every higher one."""
_PATTERNS = tuple(
    _pattern((jack, queen, king), calls)
    for jack, queen, king in itertools.product((0, 1), repeat=3)
    for calls in _CALLS
)
_HELDOUT_PATTERNS = (
    "bet-queen-call-king",
    "bet-jack-queen-call-none",
    "bet-queen-king-call-queen-king",
    "bet-queen-call-queen-king",
    "bet-jack-queen-king-call-none",
    "bet-none-call-king",
    "bet-king-call-king",
    "bet-none-call-jack-queen-king",
)

FAMILY_TRAIN = tuple(each for each in _PATTERNS if each.name not in _HELDOUT_PATTERNS)
"""24 of the 32 patterns that always do the same with a card."""
FAMILY_HELDOUT = tuple(each for each in _PATTERNS if each.name in _HELDOUT_PATTERNS)
"""8: the ones written out above, drawn once."""


_CONTRASTING_BETS: tuple[Three, ...] = ((1, 0, 0), (0, 0, 1), (1, 1, 0), (0, 1, 1))
_CONTRASTING_CALLS: tuple[Three, ...] = ((0, 0, 0), (1, 1, 0), (0, 1, 1), (1, 1, 1))
_CONTRASTS = {
    (bets, calls): _pattern(_CONTRASTING_BETS[bets], _CONTRASTING_CALLS[calls])
    for bets, calls in itertools.product(range(4), repeat=2)
}
CONTRASTS_TRAIN = tuple(each for (bets, calls), each in _CONTRASTS.items() if (bets + calls) % 4)
"""12 of 16 patterns whose best answers differ most: weak cards bet or strong ones, none call, or
the weak, the strong, or all.
"""
CONTRASTS_HELDOUT = tuple(
    each for (bets, calls), each in _CONTRASTS.items() if not (bets + calls) % 4
)
"""4, a Latin square: each way to bet and each way to call is equally frequent in both."""


def _archetype(name: str, bets: Three, calls: Three) -> Player:
    return _player(name, name, bets, calls)


NASH = Player(
    "nash", "nash", Style((1 / 3, 0, 1), (0, 2 / 3, 1)), Style((1 / 3, 0, 1), (0, 1 / 3, 1))
)
"""An equilibrium: the queen calls more often where it spoke first."""
UNIFORM = _archetype("uniform", (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))

ARCHETYPES_TRAIN = (
    _archetype("folder", (0, 0, 0), (0, 0, 0)),
    _archetype("tight", (0, 0, 1), (0, 0, 1)),
    _archetype("station", (0, 0, 0), (1, 1, 1)),
    _archetype("maniac", (1, 1, 1), (1, 1, 1)),
    _archetype("bluffer", (1, 1, 1), (0, 0, 0)),
    _archetype("slowplay", (0, 0, 0), (0, 0, 1)),
    _archetype("valuestation", (0, 0, 1), (1, 1, 1)),
    NASH,
)
ARCHETYPES_HELDOUT = (
    _archetype("tightman", (1, 1, 1), (0, 0, 1)),
    _archetype("intermediate", (0.5, 0, 1), (0, 0.5, 1)),
    _archetype("loose", (0, 0.5, 1), (0, 1, 1)),
    _archetype("wild", (1, 0, 1), (0, 0, 0)),
    _archetype("passive", (0, 0, 0), (0, 1, 1)),
    _archetype("semi", (0.5, 0.5, 0.5), (0.2, 0.2, 0.2)),
)

MAGE_TRAIN = (
    _archetype("conservative", (0, 0, 1), (0, 0, 1)),
    _archetype("aggressive", (1, 1, 1), (0, 1, 1)),
    _archetype("intermediate", (0, 1, 1), (0, 0, 1)),
)
"""The population of MAGE's code (arXiv 2603.03680)."""
CFR_GREEDY = Player(
    "cfr-greedy", "cfr-greedy", Style((0, 0, 1), (0, 1, 1)), Style((0, 0, 1), (0, 0, 1))
)
"""What MAGE's code validates against: the likeliest move of a solved equilibrium, always."""
MAGE_HELDOUT = (CFR_GREEDY, NASH)
