"""One episode of Scout: a visit to each dial."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from mage_async.environments.environment import Chance, Outcome, Play
from mage_async.environments.scout.values import Code, Payoffs

KEYS = ("red", "green", "blue", "gold")
DIALS = ("alpha", "beta", "gamma")
SCOUT, PASS = "scout", "pass"
ACTIONS = (*KEYS, SCOUT, PASS)
NUM_DIALS = len(DIALS)


class ScoutPlay:
    """One visit to each dial. The anchor is the dial: no other turn bears on its reward."""

    __slots__ = ("_code", "_payoffs", "chance", "dial", "known", "missed")

    def __init__(self, code: Code, payoffs: Payoffs, chance: Chance) -> None:
        self._code, self._payoffs, self.chance = code, payoffs, chance
        self.dial = 0
        self.known: dict[int, str] = {}
        """Keys this episode has shown, by dial."""
        self.missed: dict[int, str] = {}
        """Keys this episode has shown to be wrong, by dial."""

    @property
    def observation(self) -> str:
        """The first dial."""
        return DIALS[0]

    @property
    def anchor(self) -> str:
        """The dial."""
        return DIALS[self.dial] if self.dial < NUM_DIALS else "done"

    def legal_actions(self) -> Sequence[str]:
        """Keys, scout and pass until every dial has been visited."""
        return ACTIONS if self.dial < NUM_DIALS else ()

    def act(self, action: str) -> Outcome:
        """Visit a dial; an invalid action costs as much as scouting and tells nothing."""
        assert self.dial < NUM_DIALS, "the episode is done"
        feedback, reward = self._visit(action)
        self.dial += 1
        is_done = self.dial == NUM_DIALS
        said = feedback if is_done else f"{feedback} {DIALS[self.dial]}"
        return Outcome(said, reward, feedback != "invalid", is_done)

    def _visit(self, action: str) -> tuple[str, float]:
        dial, key = self.dial, KEYS[self._code[self.dial]]
        if action == SCOUT:
            self.known[dial] = key
            return f"cost {DIALS[dial]} {key}", -self._payoffs.cost
        if action == PASS:
            return "ok", self._payoffs.safe
        if action == key:
            self.known[dial] = key
            return f"win {DIALS[dial]} {key}", 1.0
        if action in KEYS:
            self.missed[dial] = action
            return "lose", -self._payoffs.wrong
        return "invalid", -self._payoffs.cost


@dataclass(slots=True)
class ScoutScript:
    """Scouts and guesses with set probabilities; plays a key it has seen with probability 0.95."""

    source: random.Random
    scouts: float
    guesses: float
    _plays: list[ScoutPlay] = field(default_factory=list)
    """The episodes of the trial so far."""

    def choose(self, play: Play) -> str:
        """The next action, knowing what earlier episodes have shown."""
        assert isinstance(play, ScoutPlay)
        if not self._plays or self._plays[-1] is not play:
            self._plays.append(play)
        known = [seen.known[play.dial] for seen in self._plays if play.dial in seen.known]
        if known and self.source.random() < 0.95:
            return known[0]
        luck = self.source.random()
        if luck < self.scouts:
            return SCOUT
        return self._guess(play.dial) if luck < self.scouts + self.guesses else PASS

    def _guess(self, dial: int) -> str:
        missed = [seen.missed[dial] for seen in self._plays if dial in seen.missed]
        return self.source.choice([key for key in KEYS if key not in missed])
