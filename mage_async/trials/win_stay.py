"""Play trials by win-stay, lose-shift, a script for environments that bring none of their own.

The player repeats an action that paid in an earlier episode, and tries another action if none did
(Robbins 1952; Nowak & Sigmund 1993). It knows nothing of the task. A `Rule` says which situations
count as the same place, and what counts as an action's pay; actions are compared within a place.
All rules are played and compared, because none of them is the best for all tasks. For a bandit,
whose best arm is the same at every turn, all turns are one place; for boxes that each open with a
button of their own, each box is a place.

Trials of the best rule teach a model with random weights to look up its earlier episodes, which RL
alone discovers late and suddenly.
"""

import itertools
import math
import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from mage_async.environments.environment import Play
from mage_async.errors import ConfigError
from mage_async.trajectory import Kind, Trial, Turn, num_decimals
from mage_async.trials.scripted_play import Player, random_play

Place = Literal["anywhere", "turn", "state", "last_word", "first_word"]
"""Which situations count as the same place: all, those at the same turn of an episode, those with
the same state (`Play.anchor`), or those whose state has the same last or first word. An observation
such as "wrong red" often tells in one word what is asked now, and in the others what happened."""
Pay = Literal["reward", "return"]
"""What an action earned: its turn's reward, or the rewards from its turn to the episode's end."""

NUM_COMPARED = 64
"""Number of trials by which a rule is compared with the others."""
LEAST_COMPARED = NUM_COMPARED // 2
"""Smallest number of trials of each player from which a rule is chosen: in fewer trials, the best
of ten rules would beat random play by luck alone."""
LEAST_RECURRENCE = 2.0
"""Number of times that a trial of random play must meet a word, in the mean, for words to be
compared as places. The tiny model did not learn in 800 steps to look up which of 20 numbers it had
met, each 1.5 times in a trial, though a rule by numbers earned most. It learned to look up words
that it met three times."""
NUM_PLAYED = NUM_COMPARED * (1 + len(get_args(Place)) * len(get_args(Pay)))
"""Number of trials that are played to find the best rule, those of random play included."""


_WHERE: dict[Place, str] = {
    "anywhere": "anywhere",
    "turn": "at the same turn",
    "state": "in the same state",
    "last_word": "after the same last word",
    "first_word": "after the same first word",
}


@dataclass(frozen=True, slots=True)
class Rule:
    """Define the place of an action, its pay, and the pay above which it has won."""

    place: Place
    pay: Pay
    usual: float
    """Mean pay of an action of random play; an action that earned more has won."""

    def __str__(self) -> str:
        return f"repeat what earned a good {self.pay} {_WHERE[self.place]}"

    def place_of(self, state: str, index: int) -> Hashable:
        """Return the place of an action.

        Args:
            state: The state (`Play.anchor`) in which it is taken.
            index: Number of the turn in its episode.
        """
        words = state.split() or [""]
        places: dict[Place, Hashable] = {
            "anywhere": None,
            "turn": index,
            "state": state,
            "last_word": words[-1],
            "first_word": words[0],
        }
        return places[self.place]


class WinStay:
    """Repeat the best-paid action of a place if its mean pay there is above `Rule.usual`; otherwise
    take an action that is untried in this place, or the best-paid one if all were tried. Of equally
    well paid ones it takes the one that it tried first.

    Args:
        source: random source of the choice among untried actions.
        rule: defines places, pay and wins.
        words: declared words of the environment, for turns that list no actions; may be empty.
    """

    def __init__(self, source: random.Random, rule: Rule, words: Sequence[str]) -> None:
        self._source, self._rule, self._words = source, rule, words
        self._pays: defaultdict[Hashable, dict[str, list[float]]] = defaultdict(dict)
        """What each action earned each time, by place and action."""
        self._actions: list[Turn] = []
        """Actions of the current episode."""
        self._num_read = 0
        """Number of the trial's turns that were read."""

    def read(self, turns: Sequence[Turn], episode: int) -> None:
        """Learn from the turns of the trial so far; `episode` is the number of the current
        episode.
        """
        for turn in itertools.islice(turns, self._num_read, None):
            if turn.kind is not Kind.ACT:
                continue
            self._actions.append(turn)
            if self._rule.pay == "reward":  # known at once; a return is known at the end
                self._add(turn, turn.reward)
        self._num_read = len(turns)
        if self._actions and self._actions[-1].episode < episode:
            if self._rule.pay == "return":
                for turn, pay in zip(self._actions, returns_to_go(self._actions), strict=True):
                    self._add(turn, pay)
            self._actions = []

    def choose(self, play: Play) -> str:
        """Return the next action.

        Raises:
            ConfigError: the environment declares neither legal actions nor words.
        """
        legal = play.legal_actions() or self._words
        if not legal:
            raise ConfigError(
                "win-stay play needs to know what an action may be: declare `legal_actions`, "
                "`legal_pattern` or `words`"
            )
        known = self._mean_pays(play.anchor, len(self._actions))
        known = {action: pay for action, pay in known.items() if action in legal}
        untried = [action for action in legal if action not in known]
        # Of equally good actions the one that was tried first: no context predicts a random one, so
        # that the loss on repeated actions could stay above `warm_start.repeat_gate` for ever.
        best = max(known, key=known.__getitem__, default="")
        if not untried or (known and known[best] > self._rule.usual):
            return best
        return self._source.choice(untried)

    def is_win(self, turn: Turn) -> bool:
        """Return whether a turn that has not been read repeats an action that won."""
        known = self._mean_pays(turn.anchor, turn.index)
        return known.get(turn.action, -math.inf) > self._rule.usual

    def _mean_pays(self, state: str, index: int) -> dict[str, float]:
        """Return the mean pay of each action that was taken in a place."""
        pays = self._pays.get(self._rule.place_of(state, index), {})
        return {action: statistics.fmean(each) for action, each in pays.items()}

    def _add(self, turn: Turn, pay: float) -> None:
        place = self._rule.place_of(turn.anchor, turn.index)
        self._pays[place].setdefault(turn.action, []).append(pay)


def player_of(rule: Rule) -> Player:
    """Return the player of a rule, as `scripted_trial` takes it."""
    return lambda environment, source: WinStay(source, rule, environment.facts.words)


def repeated_wins(trial: Trial, rule: Rule) -> frozenset[int]:
    """Return the indices of the turns of a trial that repeat an action that won."""
    player, found = WinStay(random.Random(), rule, ()), set[int]()
    for number, turn in enumerate(trial.turns):
        player.read(trial.turns[:number], turn.episode)
        if turn.kind is Kind.ACT and player.is_win(turn):
            found.add(number)
    return frozenset(found)


def returns_to_go(turns: Sequence[Turn]) -> list[float]:
    """Return, for each turn of an episode, the sum of rewards from it to the end."""
    sums = list(itertools.accumulate(turn.reward for turn in reversed(turns)))
    return sums[::-1]


SURE = 2.92
"""Number of standard errors by which a rule has to earn more. It keeps the probability of an error
at 5 % by Student's t of `NUM_COMPARED` trials, although the best of ten rules is judged."""


class Comparison(NamedTuple):
    """Hold a rule, and what it earns. A pair is a mean and the half-width of its 95 % interval."""

    rule: Rule
    by_rule: tuple[float, float]
    """Return of the last episode."""
    by_random: tuple[float, float]
    """The same of random play."""
    lead: tuple[float, float]
    """Return of the last episode minus that of random play on the same task."""
    gain: tuple[float, float] | None
    """Return of the last episode minus that of the first; None if there is one episode."""
    num_tasks: int
    """Number of tasks that the rule played."""
    is_complete: bool = True
    """Whether each trial of each player ended in time and without a fault. If so, another start
    finds the same."""

    @property
    def beats_chance(self) -> bool:
        """Whether the rule clearly earns more than random play."""
        return _is_clear(self.lead)

    @property
    def is_better(self) -> bool:
        """Whether the rule is worth cloning: it beats chance, and clearly earns more in its last
        episode than in its first.

        A rule that gains nothing over its episodes does not teach a policy to look at earlier
        episodes, and may leave it nothing to explore: with two actions, a policy that was cloned
        from such a rule began with an entropy of 0.02 nats.
        """
        return self.beats_chance and (self.gain is None or _is_clear(self.gain))

    def sentence(self, units: float) -> str:
        """Return the comparison in words, with returns per unit."""
        digits = num_decimals(mean / units for mean, _ in (self.by_rule, self.by_random))

        def per_unit(interval: tuple[float, float]) -> str:
            mean, half_width = interval
            # If all returns are equal, perhaps by chance, their spread cannot be estimated.
            spread = f"±{half_width / units:.{digits}f}" if half_width else "every time"
            return f"{mean / units:+.{digits}f} {spread}"

        verdict = "more" if self.beats_chance else "not clearly more"
        text = (
            f"a player that repeats what paid earns {per_unit(self.by_rule)} in the last episode "
            f"of {self.num_tasks} training tasks, {verdict} than random play with "
            f"{per_unit(self.by_random)}"
        )
        if self.beats_chance and not self.is_better and self.gain is not None:
            text += f", but not clearly more than in its first: {per_unit(self.gain)}"
        return text


def _is_clear(difference: tuple[float, float]) -> bool:
    """Return whether a mean is above 0 by more than `SURE` standard errors."""
    mean, half_width = difference
    return mean > SURE * half_width / 1.96


def best_rule(play: Callable[[Player], Iterable[Trial]]) -> Comparison | None:
    """Return the rule that earns most in its last episodes; rules worth cloning (`is_better`) come
    before all others. Returns None if one of the players plays fewer than `LEAST_COMPARED` trials.

    Args:
        play: plays up to `NUM_COMPARED` trials of a player, fewer if trials fail or take too long.
            Each call plays the same tasks, and trials of one call have different `index`.
    """
    by_random = list(play(random_play))
    if len(by_random) < LEAST_COMPARED:
        return None
    episodes = [
        [turn for turn in trial.turns if turn.is_act_of(episode)]
        for trial in by_random
        for episode in range(len(trial.episode_rewards()))
    ]
    usual: dict[Pay, float] = {
        "reward": statistics.fmean(turn.reward for turns in episodes for turn in turns),
        "return": statistics.fmean(pay for turns in episodes for pay in returns_to_go(turns)),
    }
    last = {trial.index: trial.episode_rewards()[-1] for trial in by_random}
    found, is_complete = list[Comparison](), len(by_random) == NUM_COMPARED
    # Of rules that earn the same, the first one is kept.
    actions = [[turn for turn in trial.turns if turn.kind is Kind.ACT] for trial in by_random]
    for place, (pay, mean) in itertools.product(_places(actions), usual.items()):
        rule = Rule(place, pay, mean)
        earned = {trial.index: trial.episode_rewards() for trial in play(player_of(rule))}
        leads = [earned[index][-1] - last[index] for index in earned if index in last]
        if len(leads) < LEAST_COMPARED:
            return None
        gains = [returns[-1] - returns[0] for returns in earned.values() if len(returns) > 1]
        by_rule = _mean([returns[-1] for returns in earned.values()])
        by_chance = _mean(list(last.values()))
        gain = _mean(gains) if len(gains) > 1 else None
        found.append(Comparison(rule, by_rule, by_chance, _mean(leads), gain, len(earned)))
        is_complete &= len(earned) == NUM_COMPARED
    best = max(found, key=lambda each: (each.is_better, each.by_rule[0]))
    return best._replace(is_complete=is_complete)


def _places(trials: Sequence[Sequence[Turn]]) -> list[Place]:
    """Return the kinds of place to compare: all of them but

    - those that tell the turns of these trials apart in the same way as an earlier kind;
    - words of which a trial meets most only once (see `LEAST_RECURRENCE`).

    Args:
        trials: Actions of each trial of random play.
    """
    found = dict[tuple[int, ...], Place]()
    for place in get_args(Place):
        rule, numbers = Rule(place, "reward", 0.0), dict[Hashable, int]()
        places = [[rule.place_of(turn.anchor, turn.index) for turn in turns] for turns in trials]
        num_met = sum(len(set(each)) for each in places)
        is_word = place in ("last_word", "first_word")
        if is_word and sum(map(len, places)) < LEAST_RECURRENCE * num_met:
            continue
        key = [numbers.setdefault(each, len(numbers)) for of_trial in places for each in of_trial]
        found.setdefault(tuple(key), place)
    return list(found.values())


def _mean(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean of values and the half-width of its 95 % interval."""
    half_width = 1.96 * math.sqrt(statistics.variance(values) / len(values))
    return statistics.fmean(values), half_width
