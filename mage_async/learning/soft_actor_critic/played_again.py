"""A trial's actions played again: with what was valid at each turn, or with another goal.

What an action led to is asked of the environment anew, in the words of the given member, so a trial
with another goal reads exactly as if it had been played for that goal.
"""

from dataclasses import dataclass, replace

from mage_async.completion import Completion
from mage_async.environments.environment import Environment
from mage_async.policy_version import VersionRun, append_run, moved
from mage_async.trajectory import Segment, Trial, Turn
from mage_async.trials.chat_format import ChatFormat
from mage_async.trials.duels.begin import settle
from mage_async.trials.trial_rules import TrialRules
from mage_async.trials.trial_run import TrialRun


@dataclass(frozen=True, slots=True)
class PlayedAgain:
    """A trial, and what the environment says of each of its turns."""

    trial: Trial
    """`cut_at` is the episode in which the recorded actions ran out, where they did."""
    valid: tuple[tuple[str, ...], ...]
    """What could be done at each turn."""
    reached: tuple[str | None, ...]
    """The member whose goal each turn came to."""


def play_again(
    environment: Environment,
    trial: Trial,
    rules: TrialRules,
    chat: ChatFormat,
    member: str | None = None,
) -> PlayedAgain:
    """Give a trial's recorded actions to the environment once more.

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
    settle(run)
    while run.next_prompt() is not None:
        turns, play = left.get(run.episode, []), run.play
        if not turns:
            run.cut_short()
            break
        valid.append(tuple(play.legal_actions()))
        run.receive(_completion(trial, turns.pop()))
        settle(run)
        reached.append(environment.reached(play))
    return PlayedAgain(run.trial(), tuple(valid), tuple(reached))


def _completion(trial: Trial, turn: Turn) -> Completion:
    """What the engine drew for a turn."""
    segment, span = trial.segments[turn.segment], slice(turn.start, turn.stop)
    runs = _runs(segment, turn)
    return Completion(segment.tokens[span], segment.logprobs[span], runs, "length", 0)


def _runs(segment: Segment, turn: Turn) -> tuple[VersionRun, ...]:
    """The versions of a turn's tokens, counted from its first."""
    runs: list[VersionRun] = []
    starts = [run.start for run in segment.versions[1:]]
    for run, stop in zip(segment.versions, [*starts, len(segment.tokens)], strict=True):
        if run.start < turn.stop and stop > turn.start:
            here = replace(run, start=max(run.start, turn.start))
            append_run(runs, moved(here, -turn.start))
    return tuple(runs)
