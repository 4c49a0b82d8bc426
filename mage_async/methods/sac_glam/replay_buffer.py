"""The replay buffer: trials as transitions, with copies that have a goal they reached.

The journal holds the same trials, and every draw is seeded by the run, the version and the update,
so a replay of the journal repeats the draws. A checkpoint holds the buffer, because the earlier
segments of the journal may have been deleted.

Shapes: `T` tokens of a segment, `n` actions in it, `A` actions of the environment.
"""

import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch

from mage_async.assembly import trial_config_of
from mage_async.completion import Completion
from mage_async.config.schema import Config
from mage_async.environments.environment import Environment
from mage_async.errors import RunError
from mage_async.policy_version import VersionRun, append_run, moved, oldest
from mage_async.trajectory import Group, Segment, Trial, Turn
from mage_async.trials.chat_format import ChatFormat
from mage_async.trials.duels import make_calls
from mage_async.trials.trial_config import TrialConfig
from mage_async.trials.trial_run import TrialRun

# Trials played again
#
# The environment answers the recorded actions again, with the words of the given member, so a trial
# with another goal reads exactly as if it had been played for that goal.


@dataclass(frozen=True, slots=True)
class PlayedAgain:
    """A trial, with the valid actions and the reached goal at each of its turns."""

    trial: Trial
    """`cut_at` is the episode in which the recorded actions ran out, where they did."""
    valid: tuple[tuple[str, ...], ...]
    """Valid actions at each turn."""
    reached: tuple[str | None, ...]
    """The member whose goal each turn reached; None: no goal."""


def play_again(
    environment: Environment,
    trial: Trial,
    rules: TrialConfig,
    chat: ChatFormat,
    member: str | None = None,
) -> PlayedAgain:
    """Play the recorded actions of a trial again.

    An episode that reaches its goal earlier than recorded leaves its other actions out.

    Args:
        trial: of actions alone, without remarks.
        member: another goal; None: the trial's own.
    """
    task = replace(trial.task, member=trial.task.member if member is None else member)
    run = TrialRun(environment, task, trial.index, rules, chat, name="again")
    left: dict[int, list[Turn]] = {}
    for turn in reversed(trial.turns):
        left.setdefault(turn.episode, []).append(turn)
    valid: list[tuple[str, ...]] = []
    reached: list[str | None] = []
    make_calls(run)
    while run.next_prompt() is not None:
        turns, play = left.get(run.episode, []), run.play
        if not turns:
            run.cut_short()
            break
        valid.append(tuple(play.legal_actions()))
        run.receive(_completion(trial, turns.pop()))
        make_calls(run)
        reached.append(environment.reached(play))
    return PlayedAgain(run.trial(), tuple(valid), tuple(reached))


def _completion(trial: Trial, turn: Turn) -> Completion:
    """Return the completion of a turn."""
    segment, span = trial.segments[turn.segment], slice(turn.start, turn.stop)
    runs = _runs(segment, turn)
    return Completion(segment.tokens[span], segment.logprobs[span], runs, "length", 0)


def _runs(segment: Segment, turn: Turn) -> tuple[VersionRun, ...]:
    """Return the version runs of a turn, with starts from its first token."""
    runs: list[VersionRun] = []
    starts = [run.start for run in segment.versions[1:]]
    for run, stop in zip(segment.versions, [*starts, len(segment.tokens)], strict=True):
        if run.start < turn.stop and stop > turn.start:
            here = replace(run, start=max(run.start, turn.start))
            append_run(runs, moved(here, -turn.start))
    return tuple(runs)


# Trials as arrays
#
# A state is a context, and a context only grows: all states of a segment are positions in one row
# of tokens, and the state that follows an action is the next position. An action is one token.


@dataclass(frozen=True, slots=True, eq=False)
class SoftSequence:
    """One segment with its transitions."""

    tokens: np.ndarray
    """int32 [T], up to the last action"""
    places: np.ndarray
    """int64 [n]: positions of the actions"""
    actions: np.ndarray
    """int64 [n]: number of the sampled action; -1 where the critic has nothing to learn, because no
    action of the environment was sampled, or the next state is unknown"""
    valid: np.ndarray
    """bool [n, A]: valid actions"""
    rewards: np.ndarray
    """float32 [n]"""
    discounts: np.ndarray
    """float32 [n]: factor of the value of the next state; 0 where there is none"""
    version: int
    """The oldest policy version that sampled an action."""


Copy = tuple[SoftSequence, ...]
"""The segments of a trial, with its own goal or another one."""
Experience = tuple[Copy, ...]
"""A trial with its own goal, and then with goals that it reached."""


def action_tokens(environment: Environment, chat: ChatFormat) -> dict[int, int]:
    """Return the number of each action by its token; words of several tokens are left out."""
    encoded = (chat.encode(f" {word}") for word in environment.facts.words)
    tokens = sorted({ids[0] for ids in encoded if len(ids) == 1})
    return {token: place for place, token in enumerate(tokens)}


def experiences(
    groups: Sequence[Group],
    config: Config,
    environment: Environment,
    chat: ChatFormat,
    most_goals: int,
) -> list[Experience]:
    """Return a batch's trials for the replay buffer, in their order.

    Each trial comes with at most `most_goals` copies that have another goal. Goals are drawn by the
    run's seed, the grant and the trial, so a replay draws the same.

    Raises:
        RunError: an action of the environment is not one token.
    """
    rules = trial_config_of(
        config,
        environment,
        chat,
        config.trial.episodes,
        stops_on_success=config.trial.stop_on_success,
    )
    reader = _Reader(config, environment, chat)
    found: list[Experience] = []
    for group in groups:
        for trial in group.trials:
            own = play_again(environment, trial, rules, chat)
            source = random.Random(f"{config.seed}/hindsight/{group.grant}/{trial.index}")
            goals = goals_in_hindsight(environment, own, most_goals, source)
            others = [play_again(environment, trial, rules, chat, goal) for goal in goals]
            found.append(tuple(reader.copy_of(each) for each in (own, *others)))
    return found


def goals_in_hindsight(
    environment: Environment, played: PlayedAgain, most: int, source: random.Random
) -> list[str]:
    """Draw at most `most` goals that a trial reached and did not have, none of them held out."""
    not_wanted = {None, played.trial.task.member, *environment.members("heldout")}
    reached = dict.fromkeys(goal for goal in played.reached if goal not in not_wanted)
    goals = [goal for goal in reached if goal is not None]
    return source.sample(goals, min(most, len(goals)))


class _Reader:
    """Turns played trials into arrays."""

    def __init__(self, config: Config, environment: Environment, chat: ChatFormat) -> None:
        self._inside = config.credit.turn_discount
        is_chained = config.credit.kind == "cumulative_code"
        self._across = config.credit.episode_discount if is_chained else 0.0
        self._places = action_tokens(environment, chat)
        self._valid = _Valid(self._places, chat)

    def copy_of(self, played: PlayedAgain) -> Copy:
        """Return the segments that have an action."""
        by_segment: dict[int, list[int]] = {}
        for number, turn in enumerate(played.trial.turns):
            by_segment.setdefault(turn.segment, []).append(number)
        return tuple(self._sequence(played, numbers) for numbers in by_segment.values())

    def _sequence(self, played: PlayedAgain, numbers: Sequence[int]) -> SoftSequence:
        trial = played.trial
        turns = [trial.turns[number] for number in numbers]
        segment = trial.segments[turns[0].segment]
        places = np.array([turn.start for turn in turns], np.int64)
        drawn = [self._places.get(int(token), -1) for token in segment.tokens[places]]
        if self._ends_unknown(trial, turns[-1]):
            drawn[-1] = -1
        return SoftSequence(
            segment.tokens[: int(places[-1]) + 1],
            places,
            np.array(drawn, np.int64),
            np.stack([self._valid[played.valid[number]] for number in numbers]),
            np.array([turn.reward for turn in turns], np.float32),
            np.array([*map(self._discount, turns, turns[1:]), 0.0], np.float32),
            oldest(segment.versions),
        )

    def _discount(self, turn: Turn, after: Turn) -> float:
        return self._inside if turn.episode == after.episode else self._across

    def _ends_unknown(self, trial: Trial, last: Turn) -> bool:
        """Return whether the state after the last turn of a cut trial is missing."""
        if trial.cut_at is None or last is not trial.turns[-1]:
            return False
        return trial.cut_at == last.episode or self._across > 0.0


class _Valid(dict[tuple[str, ...], np.ndarray]):
    """Rows of valid actions, bool [A], by words; made when they are first needed."""

    def __init__(self, places: Mapping[int, int], chat: ChatFormat) -> None:
        super().__init__()
        self._places, self._chat = places, chat

    def __missing__(self, words: tuple[str, ...]) -> np.ndarray:
        row = np.zeros(len(self._places), bool)
        for word in words:
            ids = self._chat.encode(f" {word}")
            if len(ids) != 1 or ids[0] not in self._places:
                raise RunError(
                    f"methods.sac_glam scores actions of one token, and {word!r} is none of the "
                    "environment's words that the tokenizer writes as one: play another "
                    "environment, or leave the table out"
                )
            row[self._places[ids[0]]] = True
        return self.setdefault(words, row)


ARRAYS = tuple(each.name for each in fields(SoftSequence) if each.name != "version")


class ReplayBuffer:
    """A first-in, first-out buffer of trials with their relabelled copies."""

    def __init__(self) -> None:
        self._trials: deque[Experience] = deque()

    def __len__(self) -> int:
        return len(self._trials)

    def add(self, trials: Sequence[Experience], capacity: int) -> None:
        """Add trials, and drop the oldest beyond the capacity."""
        self._trials.extend(trials)
        while len(self._trials) > capacity:
            self._trials.popleft()

    def draw(self, count: int, source: random.Random) -> list[Copy]:
        """Draw trials with replacement, all equally likely, each as one of its copies."""
        return [source.choice(source.choice(self._trials)) for _ in range(count)]

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint: all arrays joined, and the sizes to cut them by."""
        copies = [copy for trial in self._trials for copy in trial]
        segments = [segment for copy in copies for segment in copy]
        return {
            "copies": [len(trial) for trial in self._trials],
            "segments": [len(copy) for copy in copies],
            "tokens_each": [len(segment.tokens) for segment in segments],
            "actions_each": [len(segment.actions) for segment in segments],
            "versions": [segment.version for segment in segments],
            **{name: _joined([getattr(each, name) for each in segments]) for name in ARRAYS},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a state that `state` returned."""
        cuts = {name: state["actions_each"] for name in ARRAYS} | {"tokens": state["tokens_each"]}
        columns = [_cut(state[name], cuts[name]) for name in ARRAYS]
        rows = zip(*columns, state["versions"], strict=True)
        segments = iter([SoftSequence(*row) for row in rows])
        copies = iter([tuple(next(segments) for _ in range(n)) for n in state["segments"]])
        trials = (tuple(next(copies) for _ in range(n)) for n in state["copies"])
        self._trials = deque(trials)


def _joined(arrays: Sequence[np.ndarray]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(arrays)) if arrays else torch.empty(0)


def _cut(joined: torch.Tensor, lengths: Sequence[int]) -> list[np.ndarray]:
    return np.split(joined.numpy(), np.cumsum(lengths)[:-1]) if lengths else []
