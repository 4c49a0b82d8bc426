"""Play trials by win-stay, lose-shift, a script for environments that bring none of their own.

The player repeats an action that paid in an earlier episode, and tries another action if none did
(Robbins 1952; Nowak & Sigmund 1993). It knows nothing of the task. In the last episode an action
has paid if it earned more than random play does in the mean. Before that it must also have earned
what the best tenth of random play earn, so that the player goes on trying where some actions pay
more than others that pay. A `Rule` says which situations count as the same place, and what counts
as an action's pay; actions are compared within a place.
All rules are played and compared, because none of them is the best for all tasks. For a bandit,
whose best arm is the same at every turn, all turns are one place; for boxes that each open with a
button of their own, each box is a place. Where answers name other actions ("no, it was the red
one"), rules that take the named action are compared too.

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
from functools import partial
from typing import Literal, NamedTuple, get_args

from mage_async.environments.environment import Play
from mage_async.environments.interchangeable_words import whole_word
from mage_async.errors import ConfigError
from mage_async.trajectory import Decode, Kind, Trial, Turn, num_decimals, turn_texts
from mage_async.trials.prompts import episode_mark
from mage_async.trials.scripted_play import Player, random_play

Place = Literal["anywhere", "turn", "state", "last_word", "first_word", "asked_words"]
"""Which situations count as the same place: all, those at the same turn of an episode, those with
the same state (`Play.anchor`), those whose state has the same last or first word, or the same words
among those with which episodes begin. An observation such as "wrong, you find a red box" tells in
some words what happened, and in the others what is asked now. The observation that begins an
episode has only the second kind."""
Pay = Literal["reward", "return"]
"""What an action earned: its turn's reward, or the rewards from its turn to the episode's end."""

NUM_COMPARED = 64
"""Number of trials by which a rule is compared with the others."""
LEAST_COMPARED = NUM_COMPARED // 2
"""Smallest number of trials of each player from which a rule is chosen: in fewer trials, the best
of so many rules would beat random play by luck alone."""
LEAST_RECURRENCE = 2.0
"""Number of times that a trial of random play must meet a word, in the mean, for words to be
compared as places. The tiny model did not learn in 800 steps to look up which of 20 numbers it had
met, each 1.5 times in a trial, though a rule by numbers earned most. It learned to look up words
that it met three times."""
LEAST_NAMED = 0.1
"""Share of the actions of random play whose answer has to name one other action, for rules that
follow answers to be compared. In a class of guests who say what they want instead it is 0.8."""
NUM_MORE = 4 * NUM_COMPARED
"""Number of trials by which the best rule is compared again, on other tasks, if 64 are too few. Of
a carpet whose seller has a hidden price, the returns of an episode differ by 100: the player
earned 6.7 ±5.9 more than random play in 64 trials, and 8.4 ±2.3 more in 400."""
NUM_PLAYED = NUM_COMPARED * (1 + len(get_args(Place)) * len(get_args(Pay)))
"""Number of trials that are played to find the best rule, those of random play included and those
of a second comparison not. Where answers name other actions, the rules are twice as many."""


_WHERE: dict[Place, str] = {
    "anywhere": "anywhere",
    "turn": "at the same turn",
    "state": "in the same state",
    "last_word": "after the same last word",
    "first_word": "after the same first word",
    "asked_words": "where the same is asked",
}


@dataclass(frozen=True, slots=True)
class Rule:
    """Define the place of an action, its pay, and the pay at which it has won."""

    place: Place
    pay: Pay
    usual: float
    """Mean pay of an action of random play; an action has won only if it earned more."""
    good: float = 0.0
    """In episodes before `last`, an action has won only if it earned at least this, too: the pay
    that the best tenth of the actions of random play reach."""
    last: int = 0
    """Number of the last episode; 0 if `good` does not count."""
    asked: tuple[str, ...] = ()
    """With the place "asked_words": words of the states in which episodes begin."""
    follows_answers: bool = False
    """Whether an action is taken that the last answer in its place named, if no action has won
    there."""

    def has_won(self, pay: float, episode: int) -> bool:
        """Return whether an action with this mean pay is worth repeating in an episode."""
        return pay > self.usual and (episode >= self.last or pay >= self.good)

    def __str__(self) -> str:
        otherwise = ", or take what the answer named" if self.follows_answers else ""
        return f"repeat what earned a good {self.pay} {_WHERE[self.place]}{otherwise}"

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
            "asked_words": tuple(word for word in words if word in self.asked),
        }
        return places[self.place]


class WinStay:
    """Repeat the best-paid action of a place if its mean pay there has won (`Rule.has_won`);
    otherwise take an action that is untried in this place, or the best-paid one if all were tried.
    Of equally well paid ones it takes the one that it tried first. With `Rule.follows_answers`, an
    untried action is taken that the last answer in this place named, if it named no other one.

    Args:
        source: random source of the choice among untried actions.
        rule: defines places, pay and wins.
        words: declared words of the environment, for turns that list no actions; may be empty.
        slips: probability of any legal action instead of the rule's.
    """

    def __init__(
        self, source: random.Random, rule: Rule, words: Sequence[str], slips: float = 0.0
    ) -> None:
        self._source, self._rule, self._words, self._slips = source, rule, words, slips
        self._pays: defaultdict[Hashable, dict[str, list[float]]] = defaultdict(dict)
        """What each action earned each time, by place and action."""
        self._answers: dict[Hashable, str] = {}
        """Text that followed the last action in each place."""
        self._actions: list[Turn] = []
        """Actions of the current episode."""
        self._num_read = 0
        """Number of the trial's turns that were read."""
        self._episode = 0
        """Number of the current episode."""

    def read(self, turns: Sequence[Turn], episode: int, answer: Callable[[], str]) -> None:
        """Learn from the turns of the trial so far; see `TurnReader`."""
        for turn in itertools.islice(turns, self._num_read, None):
            if turn.kind is not Kind.ACT:
                continue
            self._actions.append(turn)
            if self._rule.follows_answers:
                place = self._rule.place_of(turn.anchor, turn.index)
                self._answers[place] = _before_episode(answer(), turn, episode)
            if self._rule.pay == "reward":  # known at once; a return is known at the end
                self._add(turn, turn.reward)
        self._num_read, self._episode = len(turns), episode
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
        if self._slips and self._source.random() < self._slips:
            return self._source.choice(legal)
        known = self._mean_pays(play.anchor, len(self._actions))
        known = {action: pay for action, pay in known.items() if action in legal}
        untried = [action for action in legal if action not in known]
        # Of equally good actions the one that was tried first: no context predicts a random one, so
        # that the loss on repeated actions could stay above `warm_start.repeat_gate` for ever.
        best = max(known, key=known.__getitem__, default="")
        if not untried or (known and self._rule.has_won(known[best], self._episode)):
            return best
        named = self._named(play.anchor, len(self._actions), untried)
        return named[0] if len(named) == 1 else self._source.choice(untried)

    def is_known(self, turn: Turn) -> bool:
        """Return whether a turn that has not been read repeats an action that won, or takes one
        that an answer named.
        """
        known = self._mean_pays(turn.anchor, turn.index)
        if turn.action in known:
            return self._rule.has_won(known[turn.action], turn.episode)
        return bool(self._named(turn.anchor, turn.index, [turn.action]))

    def _named(self, state: str, index: int, actions: Sequence[str]) -> list[str]:
        """Return those actions that the last answer in a place names, if the rule follows it."""
        return names(self._answers.get(self._rule.place_of(state, index), ""), actions)

    def _mean_pays(self, state: str, index: int) -> dict[str, float]:
        """Return the mean pay of each action that was taken in a place."""
        pays = self._pays.get(self._rule.place_of(state, index), {})
        return {action: statistics.fmean(each) for action, each in pays.items()}

    def _add(self, turn: Turn, pay: float) -> None:
        place = self._rule.place_of(turn.anchor, turn.index)
        self._pays[place].setdefault(turn.action, []).append(pay)


def player_of(rule: Rule, slips: float = 0.0) -> Player:
    """Return the player of a rule, as `scripted_trial` takes it."""
    return lambda environment, source: WinStay(source, rule, environment.facts.words, slips)


def names(text: str, actions: Iterable[str]) -> list[str]:
    """Return those actions that a text has as whole words."""
    # `in` is fast, for an environment may have thousands of actions.
    found = (each for each in actions if each in text)
    return [each for each in found if whole_word([each]).search(text)]


def answers_of(trial: Trial, decode: Decode) -> list[str]:
    """Return the text after each turn's completion, up to the next completion or the beginning of
    the next episode; "" after the last turn of a context, such as one that ends with notes.
    """
    texts, ending = turn_texts(trial, decode)
    following = zip(trial.turns, trial.turns[1:], texts[1:], strict=False)
    answers = [
        _before_episode(text.observation, turn, after.episode)
        if turn.segment == after.segment
        else ""
        for turn, after, text in following
    ]
    return [*answers, ending]


def _before_episode(text: str, turn: Turn, episode: int) -> str:
    """Return a text after a turn without the beginning of the episode that follows, whose number
    may be an action too.
    """
    return text if episode == turn.episode else text.partition(episode_mark(episode))[0]


def known_actions(trial: Trial, rule: Rule, decode: Decode) -> frozenset[int]:
    """Return the indices of the turns of a trial that repeat an action that won or, by a rule that
    follows answers, take one that an answer named.
    """
    player, found = WinStay(random.Random(), rule, ()), set[int]()
    answers = answers_of(trial, decode) if rule.follows_answers else [""] * len(trial.turns)
    for number, (turn, answer) in enumerate(zip(trial.turns, ["", *answers], strict=False)):
        player.read(trial.turns[:number], turn.episode, partial(str, answer))
        if turn.kind is Kind.ACT and player.is_known(turn):
            found.add(number)
    return frozenset(found)


def returns_to_go(turns: Sequence[Turn]) -> list[float]:
    """Return, for each turn of an episode, the sum of rewards from it to the end."""
    sums = list(itertools.accumulate(turn.reward for turn in reversed(turns)))
    return sums[::-1]


GOOD_SHARE = 0.1
"""Share of the actions of random play that earn at least `Rule.good`. Of ten songs of which one
pays 2 and five pay 0, with noise, a player that repeats any song above the mean of -0.1 earned 5.6
of 13.3 in its last episode, and one that goes on for the best tenth earned 11.6."""


def _standard_errors(num_rules: int, num_trials: int) -> float:
    """Return the number of standard errors by which the best rule has to earn more.

    The number keeps the probability of an error at 5 %, although the best of several rules is
    judged (Bonferroni's correction): it is the quantile of Student's t, by its expansion around
    that of the normal distribution (Abramowitz and Stegun 26.7.5).
    """
    normal = statistics.NormalDist().inv_cdf(1 - 0.025 / num_rules)
    return normal + (normal**3 + normal) / (4 * (num_trials - 1))


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
    num_rules: int = 1
    """Number of rules that were compared."""
    is_complete: bool = True
    """Whether each trial of each player ended in time and without a fault. If so, another start
    finds the same."""

    @property
    def beats_chance(self) -> bool:
        """Whether the rule clearly earns more than random play."""
        return self._is_clear(self.lead)

    @property
    def is_better(self) -> bool:
        """Whether the rule is worth cloning: it beats chance, and clearly earns more in its last
        episode than in its first.

        A rule that gains nothing over its episodes does not teach a policy to look at earlier
        episodes, and may leave it nothing to explore: with two actions, a policy that was cloned
        from such a rule began with an entropy of 0.02 nats.
        """
        return self.beats_chance and (self.gain is None or self._is_clear(self.gain))

    def _is_clear(self, difference: tuple[float, float]) -> bool:
        """Return whether a mean is above 0, and not by luck."""
        mean, half_width = difference
        return mean > _standard_errors(self.num_rules, self.num_tasks) * half_width / 1.96

    @property
    def is_promising(self) -> bool:
        """Whether the rule would be clearly better if four times as many trials had these means,
        which halves the intervals.
        """
        halves = [(mean, width / 2) for mean, width in (self.lead, self.gain or self.lead)]
        return all(map(self._is_clear, halves))

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


def best_rule(
    play: Callable[[Player], Iterable[Trial]],
    play_more: Callable[[Player], Iterable[Trial]],
    decode: Decode,
) -> Comparison | None:
    """Return the rule that earns most in its last episodes; rules worth cloning (`is_better`) come
    before all others. Returns None if one of the players plays fewer than `LEAST_COMPARED` trials.

    If no rule is clearly better and the best one may be, it is compared again in more trials.

    Args:
        play: plays up to `NUM_COMPARED` trials of a player, fewer if trials fail or take too long.
            Each call plays the same tasks, and trials of one call have different `index`.
        play_more: does the same with up to `NUM_MORE` trials of other tasks.
        decode: decodes tokens of the trials.
    """
    by_random = list(play(random_play))
    if len(by_random) < LEAST_COMPARED:
        return None
    episodes = [
        [turn for turn in trial.turns if turn.is_act_of(episode)]
        for trial in by_random
        for episode in range(len(trial.episode_rewards()))
    ]
    pays: dict[Pay, list[float]] = {
        "reward": [turn.reward for turns in episodes for turn in turns],
        "return": [pay for turns in episodes for pay in returns_to_go(turns)],
    }
    last = max(len(trial.episode_rewards()) for trial in by_random) - 1
    found, is_complete = list[Comparison](), len(by_random) == NUM_COMPARED
    # Of rules that earn the same, the first one is kept.
    actions = [[turn for turn in trial.turns if turn.kind is Kind.ACT] for trial in by_random]
    first = (turn for turns in actions for turn in turns if turn.index == 0)
    asked = tuple(sorted({word for turn in first for word in turn.anchor.split()}))
    follows = [False, True] if _share_named(by_random, decode) >= LEAST_NAMED else [False]
    usual = {pay: statistics.fmean(earned) for pay, earned in pays.items()}
    good = {
        pay: sorted(earned)[int((1 - GOOD_SHARE) * len(earned))] for pay, earned in pays.items()
    }
    rules = list[Rule]()
    for follow, place, pay in itertools.product(follows, _places(actions, asked), pays):
        words = asked if place == "asked_words" else ()
        rules.append(Rule(place, pay, usual[pay], good[pay], last, words, follow))
    for rule in rules:
        by_rule = list(play(player_of(rule)))
        if (compared := _compared(rule, len(rules), by_rule, by_random)) is None:
            return None
        found.append(compared)
        is_complete &= len(by_rule) == NUM_COMPARED
    best = max(found, key=lambda each: (each.is_better, each.by_rule[0]))
    if not best.is_better and best.is_promising:
        by_rule, by_random = list(play_more(player_of(best.rule))), list(play_more(random_play))
        # Other tasks than those by which the rule was chosen: a single rule is judged by them.
        best = _compared(best.rule, 1, by_rule, by_random) or best
        is_complete &= len(by_rule) == len(by_random) == NUM_MORE
    return best._replace(is_complete=is_complete)


def _compared(
    rule: Rule, num_rules: int, by_rule: Sequence[Trial], by_random: Sequence[Trial]
) -> Comparison | None:
    """Compare trials of one of `num_rules` rules with those of random play on the same tasks;
    return None if fewer than `LEAST_COMPARED` tasks have both.
    """
    last = {trial.index: trial.episode_rewards()[-1] for trial in by_random}
    earned = {trial.index: trial.episode_rewards() for trial in by_rule}
    leads = [earned[index][-1] - last[index] for index in earned if index in last]
    if len(leads) < LEAST_COMPARED:
        return None
    gains = [returns[-1] - returns[0] for returns in earned.values() if len(returns) > 1]
    return Comparison(
        rule,
        by_rule=_mean([returns[-1] for returns in earned.values()]),
        by_random=_mean(list(last.values())),
        lead=_mean(leads),
        gain=_mean(gains) if len(gains) > 1 else None,
        num_tasks=len(earned),
        num_rules=num_rules,
    )


def _share_named(trials: Sequence[Trial], decode: Decode) -> float:
    """Return the share of actions whose answer names exactly one other action of these trials."""
    actions = {turn.action for trial in trials for turn in trial.turns if turn.kind is Kind.ACT}
    named = [
        len(names(answer, actions - {turn.action})) == 1
        for trial in trials
        for turn, answer in zip(trial.turns, answers_of(trial, decode), strict=True)
        if turn.kind is Kind.ACT
    ]
    return statistics.fmean(named)


def _places(trials: Sequence[Sequence[Turn]], asked: tuple[str, ...]) -> list[Place]:
    """Return the kinds of place to compare: all of them but

    - those that tell the turns of these trials apart in the same way as an earlier kind;
    - words of which a trial meets most only once (see `LEAST_RECURRENCE`);
    - asked words where some states have none.

    Args:
        trials: Actions of each trial of random play.
        asked: See `Rule.asked`.
    """
    found = dict[tuple[int, ...], Place]()
    for place in get_args(Place):
        rule, numbers = Rule(place, "reward", 0.0, asked=asked), dict[Hashable, int]()
        places = [[rule.place_of(turn.anchor, turn.index) for turn in turns] for turns in trials]
        num_met = sum(len(set(each)) for each in places)
        is_word = place in ("last_word", "first_word", "asked_words")
        if () in itertools.chain(*places):  # a state without asked words
            continue
        if is_word and sum(map(len, places)) < LEAST_RECURRENCE * num_met:
            continue
        key = [numbers.setdefault(each, len(numbers)) for of_trial in places for each in of_trial]
        found.setdefault(tuple(key), place)
    return list(found.values())


def _mean(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean of values and the half-width of its 95 % interval."""
    half_width = 1.96 * math.sqrt(statistics.variance(values) / len(values))
    return statistics.fmean(values), half_width
