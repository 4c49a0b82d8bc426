"""A trial played by a person in the agent's place: says what to show and what may be answered.

`said = next(hand)`, then `said = hand.send(answer)` until it stops; it never waits itself.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass

from mage_async.environments.environment import Environment
from mage_async.trajectory import Task


@dataclass(frozen=True, slots=True)
class Asked:
    """What a person is told before an action, and what may be done."""

    text: str
    choices: tuple[str, ...]
    """Legal actions by name; what the environment would also read may be typed as well."""


MAX_SHOWN = 24
"""More choices than these are counted, not listed."""

Hand = Generator[Asked, str, list[float]]
"""Gives what to ask, takes the action; in the end returns the reward of every episode."""


def played_by_hand(environment: Environment, task: Task, num_episodes: int) -> Hand:
    """One trial: the same task `num_episodes` times, in the words the agent is given."""
    earned: list[float] = []
    for episode in range(num_episodes):
        play, said, reward = environment.begin(task, episode), [f"— episode {episode + 1} —"], 0.0
        said.append(play.observation)
        while choices := play.legal_actions():
            action = yield Asked(_lines(said), tuple(choices))
            outcome = play.act(action)
            reward += outcome.reward
            said = [] if outcome.is_valid else ["that is no legal action, and it counted as one:"]
            said.append(outcome.observation)
            if outcome.is_done:
                break
        earned.append(reward)
        told = f"{_lines(said)}\nepisode {episode + 1} earned {reward:+g}"
        if episode + 1 < num_episodes:
            yield Asked(told, ())
        else:
            yield Asked(f"{told}\nyou played against {task.member}", ())
    return earned


def shown(choices: Sequence[str]) -> str:
    """Legal actions in one line."""
    if len(choices) <= MAX_SHOWN:
        return " | ".join(choices)
    return f"{' | '.join(choices[:MAX_SHOWN])} | … {len(choices) - MAX_SHOWN} more"


def _lines(said: Sequence[str]) -> str:
    return "\n".join(line for line in said if line)
