"""One episode of the bandit, and a script that pulls what has paid."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from mage_async.environments.bandit.values import Belief, chances
from mage_async.environments.environment import Chance, Outcome, Play

CONTEXTS = ("cat", "dog", "bird", "fish", "horse", "mouse")
ARMS = ("red", "green", "blue", "gold")
WIN, LOSE, OVER, INVALID = "win", "lose", "over", "invalid"
Code = tuple[int, ...]
"""The arm that pays, by context."""


class BanditPlay:
    """Rounds, each with a context that is drawn. The anchor is the context."""

    __slots__ = ("_code", "_noise", "_num_arms", "_round", "_rounds", "chance", "context", "pulls")

    def __init__(
        self, code: Code, num_arms: int, rounds: int, noise: float, chance: Chance
    ) -> None:
        self._code, self._num_arms, self._rounds = code, num_arms, rounds
        self._noise, self.chance, self._round = noise, chance, 0
        self.context = self._drawn()
        self.pulls: list[tuple[int, int, bool]] = []
        """Context, arm, and whether it paid."""

    @property
    def observation(self) -> str:
        """The first context."""
        return CONTEXTS[self.context]

    @property
    def anchor(self) -> str:
        """The context."""
        return CONTEXTS[self.context]

    def legal_actions(self) -> Sequence[str]:
        """The arms, until all rounds are played."""
        return ARMS[: self._num_arms] if self._round < self._rounds else ()

    def act(self, action: str) -> Outcome:
        """Pull an arm; an invalid action earns and tells nothing."""
        assert self._round < self._rounds, "the episode is done"
        is_valid = action in ARMS[: self._num_arms]
        told, pays = self._pull(action) if is_valid else (INVALID, False)
        self._round += 1
        is_done = self._round == self._rounds
        if not is_done:
            self.context = self._drawn()
        said = f"{told} {OVER if is_done else CONTEXTS[self.context]}"
        return Outcome(said, float(pays), is_valid, is_done)

    def _pull(self, action: str) -> tuple[str, bool]:
        arm = ARMS.index(action)
        is_noisy = bool(self.chance.choose("noise", (1 - self._noise, self._noise)))
        pays = (arm == self._code[self.context]) != is_noisy
        self.pulls.append((self.context, arm, pays))
        return f"{CONTEXTS[self.context]} {action} {WIN if pays else LOSE}", pays

    def _drawn(self) -> int:
        return self.chance.choose("context", (1,) * len(self._code))


@dataclass(slots=True)
class BanditScript:
    """Pulls the likeliest arm of the context, or any."""

    source: random.Random
    num_arms: int
    noise: float
    care: float
    """Probability of the likeliest arm."""
    remembers: bool
    """Earlier episodes count."""
    _plays: list[BanditPlay] = field(default_factory=list)

    def choose(self, play: Play) -> str:
        """The next arm."""
        assert isinstance(play, BanditPlay)
        if not self._plays or self._plays[-1] is not play:
            self._plays.append(play)
        if self.source.random() >= self.care:
            return self.source.choice(play.legal_actions())
        likely = chances(self._belief(play), self.noise)
        best = [arm for arm, chance in enumerate(likely) if chance == max(likely)]
        return ARMS[self.source.choice(best)]

    def _belief(self, play: BanditPlay) -> Belief:
        plays = self._plays if self.remembers else [play]
        pulls = [pull for each in plays for pull in each.pulls if pull[0] == play.context]
        return tuple(
            sum(1 if pays else -1 for _, arm, pays in pulls if arm == number)
            for number in range(self.num_arms)
        )
