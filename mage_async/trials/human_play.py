"""A trial played by a person in the agent's place: says what to show and what may be answered.

`said = next(play)`, then `said = play.send(answer)` until the generator stops; it never waits.
Against a version of the policy the generator also yields prompts for that version, each of which is
answered by a completion; of a slow environment it yields the calls, answered by what they return.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

from mage_async.completion import Completion, Prompt
from mage_async.environments.calls import Call, SlowPlay, calls_of
from mage_async.environments.environment import AGENT, Environment, Play
from mage_async.trajectory import Task
from mage_async.trials.duels.rival import RivalSide
from mage_async.trials.duels.sides import SidePlay


@dataclass(frozen=True, slots=True)
class HumanPrompt:
    """What a person is told before an action, and what may be done."""

    text: str
    choices: tuple[str, ...]
    """Legal actions by name; what the environment would also read may be typed as well."""
    is_question: bool = True


MAX_SHOWN = 24
"""More choices than these are counted, not listed."""

HumanPlay = Generator[HumanPrompt | Prompt | Call, Any, list[float]]
"""Gives what to ask or to sample, takes the answer; in the end returns the reward of every episode.
"""
Meet = Callable[[int], RivalSide]
"""The rival of an episode."""


def human_play(
    environment: Environment, task: Task, num_episodes: int, meet: Meet | None = None
) -> HumanPlay:
    """One trial: the same task `num_episodes` times, in the words the agent is given.

    Args:
        meet: where the opponent is a version of the policy.
    """
    earned: list[float] = []
    for episode in range(num_episodes):
        rival = None if meet is None else meet(episode)
        play: Play
        if rival is None:
            play = environment.begin(task, episode)
            yield from calls_of(play)
        else:
            play = SidePlay(rival.duel, AGENT)
            yield from _rivals_turns(rival)
        said, reward = [f"— episode {episode + 1} —", play.observation], 0.0
        while (choices := play.legal_actions()) or is_open(play):
            action = yield HumanPrompt(_lines(said), tuple(choices))
            assert isinstance(action, str)
            outcome = play.act(action)
            if rival is not None:
                yield from _rivals_turns(rival)
                outcome = rival.duel.hear(AGENT)
            outcome = (yield from calls_of(play)) or outcome
            reward += outcome.reward
            said = [] if outcome.is_valid else ["that is no legal action, and it counted as one:"]
            said.append(outcome.observation)
            if outcome.is_done:
                break
        if isinstance(play, SlowPlay) and (call := play.closing()) is not None:
            yield call
        earned.append(reward)
        told = f"{_lines(said)}\nepisode {episode + 1} earned {reward:+g}"
        if episode + 1 < num_episodes:
            yield HumanPrompt(told, (), is_question=False)
        else:
            ended = f"{told}\nyou played against {task.member}"
            yield HumanPrompt(ended, (), is_question=False)
    return earned


def is_open(play: Play) -> bool:
    """Whether any text may be an action now, because legal ones are not listed."""
    return isinstance(play, SlowPlay) and not play.is_done


def _rivals_turns(rival: RivalSide) -> Generator[Prompt, str | Completion, None]:
    """Tell a rival of the last action, and let it act until its turn ends."""
    rival.listen()
    while (prompt := rival.next_prompt()) is not None:
        completion = yield prompt
        assert isinstance(completion, Completion)
        rival.receive(completion)
        rival.listen()


def shown(choices: Sequence[str]) -> str:
    """Legal actions in one line; where none are listed, that any text is one."""
    if not choices:
        return "any text"
    if len(choices) <= MAX_SHOWN:
        return " | ".join(choices)
    return f"{' | '.join(choices[:MAX_SHOWN])} | … {len(choices) - MAX_SHOWN} more"


def _lines(said: Sequence[str]) -> str:
    return "\n".join(line for line in said if line)
