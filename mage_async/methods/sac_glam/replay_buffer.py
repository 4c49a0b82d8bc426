"""Keep trials as transitions in a replay buffer for soft actor-critic, relabelled with other goals.

The goal of a trial is named by its task's *member*, a task variant. The buffer keeps several
*copies* of a trial: the first has the trial's own goal, the others are *relabelled* with goals
that the trial reached by chance. This is hindsight experience replay (Andrychowicz et al. 2017,
arXiv 1707.01495), as in SAC-GLAM (arXiv 2410.12481).

The journal holds the same trials, and every draw is seeded by the run, the version and the update,
so a replay of the journal repeats the draws. A checkpoint holds the buffer, because the earlier
segments of the journal may have been deleted.

Shapes: `T` tokens of a segment, `n` sampled tokens in it, `A` tokens of the environment's actions.
"""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import product, zip_longest
from typing import Any

import numpy as np
import torch

from mage_async.assembly import trial_config_of
from mage_async.completion import Completion
from mage_async.config.schema import Config
from mage_async.credit.returns import CumulativeCode
from mage_async.environments.environment import Environment
from mage_async.errors import RunError
from mage_async.policy_version import VersionRun, append_run, moved, oldest
from mage_async.restriction import Restriction
from mage_async.trajectory import Group, Kind, Segment, Task, Trial, Turn
from mage_async.trials.action_parser import NAMES
from mage_async.trials.chat_format import ChatFormat
from mage_async.trials.duels import make_calls
from mage_async.trials.trial_config import TrialConfig
from mage_async.trials.trial_run import TrialRun, TrialStart

# Trials played again
#
# To relabel a trial, the environment answers its recorded actions again, now with another member as
# the goal. The relabelled copy reads exactly as if it had been played for that goal.


@dataclass(frozen=True, slots=True)
class ReplayedTrial:
    """Hold a trial that was played again, with the goals that its turns reached."""

    trial: Trial
    """Its `cut_at` is the episode in which no recorded action was left, or the next one was not
    legal.
    """
    reached: tuple[str | None, ...]
    """For each turn, the member whose goal the state after the turn satisfies; None: the state
    satisfies no member's goal.
    """


def play_again(
    environment: Environment,
    trial: Trial,
    trial_config: TrialConfig,
    chat: ChatFormat,
    member: str | None = None,
) -> ReplayedTrial:
    """Play the recorded actions of a trial again, for its own goal or for another one.

    If an episode reaches its goal earlier than recorded, its remaining actions are left out. The
    trial ends before an action that is not legal for the other goal.

    Args:
        trial: one whose turns are all actions: no reflections, strategies or notes.
        member: another goal; None: the trial's own.

    Raises:
        RunError: an action was not drawn from a list of legal ones.
    """
    task = replace(trial.task, member=trial.task.member if member is None else member)
    run = TrialRun(TrialStart(environment, task, trial.index, trial_config, chat, "again"))
    remaining: dict[int, list[Turn]] = {}  # by episode, the last turn first
    for turn in reversed(trial.turns):
        remaining.setdefault(turn.episode, []).append(turn)
    reached: list[str | None] = []
    make_calls(run)  # calls the environment: to begin here, and to answer each action below
    while (prompt := run.next_prompt()) is not None:
        turns, play = remaining.get(run.episode, []), run.play
        if prompt.restriction is None:
            raise RunError(
                "methods.sac_glam: an action was not drawn from a list of legal ones: play another "
                "environment, or leave the table out"
            )
        completion = _completion(trial, turns.pop(), prompt.restriction) if turns else None
        if completion is None:
            run.cut_short()
            break
        run.receive(completion)
        make_calls(run)
        reached.append(environment.reached(play))
    return ReplayedTrial(run.trial(), tuple(reached))


def _completion(trial: Trial, turn: Turn, legal: Restriction) -> Completion | None:
    """Return the recorded completion of a turn; None if it is not a legal action here."""
    segment, span = trial.segments[turn.segment], slice(turn.start, turn.stop)
    drawn_from: list[np.ndarray | None] = []
    node = 0
    for token in segment.tokens[span].tolist():
        allowed = legal.allowed(node)
        if token not in allowed:
            return None
        drawn_from.append(allowed if len(allowed) > 1 else None)
        node = legal.after(node, token)
    runs = _runs(segment, turn)
    logprobs = segment.logprobs[span]
    return Completion(segment.tokens[span], logprobs, runs, "stop", 0, drawn_from=tuple(drawn_from))


def _runs(segment: Segment, turn: Turn) -> tuple[VersionRun, ...]:
    """Return which policy versions sampled the tokens of a turn, as `VersionRun`s whose starts
    count from its first token.
    """
    runs: list[VersionRun] = []
    starts = [run.start for run in segment.versions[1:]]
    for run, stop in zip(segment.versions, [*starts, len(segment.tokens)], strict=True):
        if run.start < turn.stop and stop > turn.start:
            here = replace(run, start=max(run.start, turn.start))
            append_run(runs, moved(here, -turn.start))
    return tuple(runs)


# Trials as arrays
#
# Each sampled token is a transition of its own. A state is a context before such a token, where the
# legal actions allow more than one token. Only the last sampled token of an action earns the
# action's reward and is discounted. A soft value (expected return plus entropy) then is the same as
# if whole actions were transitions, because the entropy of an action is the sum of the expected
# entropies of its tokens. A context only grows, so all states of a segment are positions in one
# array of tokens, and the next state is the next such position.


@dataclass(frozen=True, slots=True, eq=False)
class SoftSequence:
    """Hold one segment of a copy, with its transitions for soft actor-critic."""

    tokens: np.ndarray
    """int32 [T]: up to the last sampled one"""
    places: np.ndarray
    """int64 [n]: positions of the sampled tokens; the state of a transition is the context before
    its token
    """
    actions: np.ndarray
    """int64 [n]: index of the sampled token among the A tokens (`action_tokens`); -1 where the next
    state is unknown, so that the critic has no target"""
    valid: np.ndarray
    """bool [n, A]: tokens of legal actions"""
    rewards: np.ndarray
    """float32 [n]: reward of each transition"""
    discounts: np.ndarray
    """float32 [n]: factor of the value of the next state; 0 if there is none"""
    version: int
    """The oldest policy version that sampled a token."""


MOST_MEMBERS = 64
"""Largest number of train members from whose first legal actions tokens are collected."""
TrialCopy = tuple[SoftSequence, ...]
"""The segments of one copy of a trial, with the trial's own goal or relabelled."""
Experience = tuple[TrialCopy, ...]
"""All copies of one trial: first the one with its own goal, then the relabelled ones."""


def action_tokens(environment: Environment, chat: ChatFormat) -> dict[int, int]:
    """Number the tokens of the environment's actions and of the tag that ends an action: return
    indices by token id.

    The actions are the environment's words, and the actions that are legal at the beginning of the
    train members.
    """
    closing = f"</{NAMES[Kind.ACT]}>"
    texts = {*environment.facts.words, ""}
    for member, seat in product(environment.members("train")[:MOST_MEMBERS], environment.seats()):
        play = environment.begin(Task(environment.facts.name, member, 0, seat), 0)
        texts.update(play.legal_actions())
    tokens = {token for text in texts for token in chat.encode(f" {text}{closing}")}
    return {token: place for place, token in enumerate(sorted(tokens))}


def experiences(
    groups: Sequence[Group],
    config: Config,
    environment: Environment,
    chat: ChatFormat,
    most_goals: int,
) -> list[Experience]:
    """Return a batch's trials for the replay buffer, in their order; those without a sampled token
    are left out.

    Goals are drawn by the run's seed, the grant and the trial, so a replay draws the same.

    Args:
        most_goals: Largest number of relabelled copies of a trial.

    Raises:
        RunError: an action has a token that no known action has, or was not drawn from a list.
    """
    trial_config = trial_config_of(
        config,
        environment,
        chat,
        config.trial.episodes,
        stops_on_success=config.trial.stop_on_success,
    )
    maker = _CopyMaker(config, environment, chat)
    found: list[Experience] = []
    for group in groups:
        for trial in group.trials:
            # The guidance with which the trial began; None if there was none.
            guidance = group.guidance and group.guidance.for_trial(trial.index)
            play = partial(
                play_again, environment, trial, trial_config.with_guidance(guidance), chat
            )
            own = play()
            source = random.Random(f"{config.seed}/hindsight/{group.grant}/{trial.index}")
            goals = goals_in_hindsight(environment, own, most_goals, source)
            copies = [maker.copy_of(own)]
            copies += [maker.copy_of(play(goal)) for goal in goals]
            # A copy whose first action is not legal for its goal is empty.
            if kept := tuple(copy for copy in copies if copy):
                found.append(kept)
    return found


def goals_in_hindsight(
    environment: Environment, played: ReplayedTrial, most: int, source: random.Random
) -> list[str]:
    """Draw at most `most` goals for relabelling: those that a trial reached, without its own and
    held-out ones.
    """
    excluded = {None, played.trial.task.member, *environment.members("heldout")}
    reached = dict.fromkeys(goal for goal in played.reached if goal not in excluded)
    goals = [goal for goal in reached if goal is not None]
    return source.sample(goals, min(most, len(goals)))


class _CopyMaker:
    """Make the copies of trials that the replay buffer keeps."""

    def __init__(self, config: Config, environment: Environment, chat: ChatFormat) -> None:
        self._turn_discount = config.credit.turn_discount
        credit = config.credit
        self._episode_discount = (
            credit.episode_discount if isinstance(credit, CumulativeCode) else 0.0
        )
        self._numbers = action_tokens(environment, chat)

    def copy_of(self, played: ReplayedTrial) -> TrialCopy:
        """Return a `SoftSequence` of each segment that has a sampled token."""
        by_segment: dict[int, list[Turn]] = {}
        for turn in played.trial.turns:
            by_segment.setdefault(turn.segment, []).append(turn)
        found = (self._sequence(played.trial, turns) for turns in by_segment.values())
        return tuple(sequence for sequence in found if sequence is not None)

    def _sequence(self, trial: Trial, turns: Sequence[Turn]) -> SoftSequence | None:
        """Return the segment in which the turns are, or None if none of its tokens was sampled."""
        segment = trial.segments[turns[0].segment]
        places: list[int] = []
        rewards: list[float] = []
        discounts: list[float] = []
        for turn, after in zip_longest(turns, turns[1:]):
            own = np.flatnonzero(segment.is_sampled[turn.start : turn.stop]) + turn.start
            places += own.tolist()
            rewards += [0.0] * len(own)
            discounts += [1.0] * len(own)
            # If all tokens of an action were forced, its reward is added to the last sampled token
            # before it. If there is no such token, the reward is left out, because no choice has
            # earned it.
            if places:
                rewards[-1] += discounts[-1] * turn.reward
                # The last turn of a segment is the last of its trial or, without memory, of an
                # episode: actions there do not change the rewards of later episodes.
                discounts[-1] *= 0.0 if after is None else self._discount(turn, after)
        if not places:
            return None
        assert segment.allowed is not None
        drawn = [self._number(int(token)) for token in segment.tokens[places]]
        if self._ends_unknown(trial, turns[-1]):
            drawn[-1] = -1
        valid = np.zeros((len(places), len(self._numbers)), bool)
        for row, allowed in zip(valid, segment.allowed, strict=True):
            assert allowed is not None
            row[[self._number(token) for token in allowed.tolist()]] = True
        return SoftSequence(
            segment.tokens[: places[-1] + 1],
            np.array(places, np.int64),
            np.array(drawn, np.int64),
            valid,
            np.array(rewards, np.float32),
            np.array(discounts, np.float32),
            oldest(segment.versions),
        )

    def _number(self, token: int) -> int:
        """Return the index of a token among those of `action_tokens`."""
        if token not in self._numbers:
            raise RunError(
                f"methods.sac_glam: token {token} of a legal action is in no word of the "
                "environment and in no action that begins an episode: declare its `words`, or "
                "leave the table out"
            )
        return self._numbers[token]

    def _discount(self, turn: Turn, after: Turn) -> float:
        """Return the discount between a turn and the next one."""
        return self._turn_discount if turn.episode == after.episode else self._episode_discount

    def _ends_unknown(self, trial: Trial, last: Turn) -> bool:
        """Return whether the state after the last turn of a cut trial is missing."""
        if trial.cut_at is None or last is not trial.turns[-1]:
            return False
        # A turn that ends its episode has no next state, unless later episodes count.
        return trial.cut_at == last.episode or self._episode_discount > 0.0


ARRAYS = tuple(each.name for each in fields(SoftSequence) if each.name != "version")
"""Names of the fields of a `SoftSequence` that are arrays."""


class ReplayBuffer:
    """Keep the copies of the last trials, first in, first out."""

    def __init__(self) -> None:
        self._trials: deque[Experience] = deque()

    def __len__(self) -> int:
        return len(self._trials)

    def add(self, trials: Sequence[Experience], capacity: int) -> None:
        """Add trials, and drop the oldest beyond the capacity."""
        self._trials = deque([*self._trials, *trials], maxlen=capacity)

    def draw(self, count: int, source: random.Random) -> list[TrialCopy]:
        """Draw trials with replacement, all equally likely, and of each one of its copies."""
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
    """Concatenate arrays into a tensor, which a checkpoint can hold."""
    return torch.from_numpy(np.concatenate(arrays)) if arrays else torch.empty(0)


def _cut(joined: torch.Tensor, lengths: Sequence[int]) -> list[np.ndarray]:
    """Cut a tensor into arrays of these lengths; the inverse of `_joined`."""
    return np.split(joined.numpy(), np.cumsum(lengths)[:-1]) if lengths else []
