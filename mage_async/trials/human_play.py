"""Let a person play a trial in the agent's place, and write a played trial as text.

`human_play` is a generator that never waits: `prompt = next(play)`, then
`prompt = play.send(answer)` until it stops. Against a past policy it also yields that policy's
prompts, each answered with a completion; with a slow environment it also yields calls, each
answered with the call's result.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

from mage_async.completion import Completion, Prompt
from mage_async.environments.environment import AGENT, Environment, Play
from mage_async.environments.legal_pattern import DrawnTexts
from mage_async.environments.user_calls import Call, SlowPlay, calls_of
from mage_async.trajectory import Kind, Task, Trial
from mage_async.trials.chat_format import ChatFormat
from mage_async.trials.duels import PastPolicySide, SidePlay

MAX_SHOWN = 24
"""Largest number of legal actions that are listed; of the others, only the number is given."""


@dataclass(frozen=True, slots=True)
class HumanPrompt:
    """Hold what a person sees before an action: a text, and the legal actions."""

    text: str
    choices: tuple[str, ...]
    """Legal actions by name; other text that the environment understands may be typed as well."""
    is_question: bool = True
    """Whether the person is to answer with an action; if not, the text is only shown, and any
    answer is ignored.
    """


HumanPlay = Generator[HumanPrompt | Prompt | Call, Any, list[float]]
"""Yields prompts and calls, receives their answers, returns the reward of every episode."""
BeginOpponent = Callable[[int], PastPolicySide]
"""Creates the past policy of an episode."""


def human_play(
    environment: Environment,
    task: Task,
    num_episodes: int,
    begin_opponent: BeginOpponent | None = None,
) -> HumanPlay:
    """Play one trial: the same task `num_episodes` times, with the agent's observations.

    Args:
        begin_opponent: given if the opponent is a past policy.
    """
    earned: list[float] = []
    for episode in range(num_episodes):
        opponent = None if begin_opponent is None else begin_opponent(episode)
        play: Play
        if opponent is None:
            play = environment.begin(task, episode)
            yield from calls_of(play)
        else:
            play = SidePlay(opponent.duel, AGENT)
            yield from _opponent_turns(opponent)
        lines, reward = [f"— episode {episode + 1} —", play.observation], 0.0
        while (choices := play.legal_actions()) or takes_any_text(play):
            # `DrawnTexts` holds only examples of the texts that match a pattern, so it is not
            # shown as a list to choose from.
            listed = () if isinstance(choices, DrawnTexts) else tuple(choices)
            text = _lines(lines)
            if (pattern := getattr(play, "legal_pattern", None)) is not None:
                text = f"{text}\nan action matches {pattern}"
            action = yield HumanPrompt(text, listed)
            # A class with `reset` and `step` never receives an illegal action, but such an action
            # uses up a turn. So the question is repeated after a typing error. A play that is no
            # `SlowPlay` receives every text, and decides itself whether it is legal.
            while isinstance(play, SlowPlay) and choices and action not in choices:
                action = yield HumanPrompt(f"{action!r:.60} is no legal action here", listed)
            assert isinstance(action, str)
            outcome = play.act(action)
            if opponent is not None:
                yield from _opponent_turns(opponent)
                outcome = opponent.duel.observe(AGENT)
            # `act` of a slow environment only requests a call, whose result is the outcome.
            outcome = (yield from calls_of(play)) or outcome
            reward += outcome.reward
            lines = []
            if not outcome.is_valid:
                lines.append("that was no legal action; the environment answers:")
            lines.append(outcome.observation)
            if outcome.is_done:
                break
        if isinstance(play, SlowPlay) and (call := play.closing()) is not None:
            yield call
        earned.append(reward)
        summary = f"{_lines(lines)}\nepisode {episode + 1} earned {reward:+g}"
        if episode + 1 == num_episodes:
            summary += f"\nhidden from you was {task.member}"
        yield HumanPrompt(summary, (), is_question=False)
    return earned


def _opponent_turns(opponent: PastPolicySide) -> Generator[Prompt, str | Completion, None]:
    """Pass the last outcome to the past policy, and let it act until its turn ends."""
    opponent.observe()
    while (prompt := opponent.next_prompt()) is not None:
        completion = yield prompt
        assert isinstance(completion, Completion)
        opponent.receive(completion)
        opponent.observe()


def takes_any_text(play: Play) -> bool:
    """Return whether any text is an action, for a play whose `legal_actions()` is empty."""
    return isinstance(play, SlowPlay) and not play.is_done


def shown(choices: Sequence[str]) -> str:
    """Return the legal actions in one line, or "any text" if there is no list of them."""
    if not choices:
        return "any text"
    if len(choices) <= MAX_SHOWN:
        return " | ".join(choices)
    return f"{' | '.join(choices[:MAX_SHOWN])} | … {len(choices) - MAX_SHOWN} more"


def _lines(lines: Sequence[str]) -> str:
    return "\n".join(line for line in lines if line)


def episode_lines(trial: Trial) -> str:
    """Return a line for each episode, with the agent's actions, and one for each of its remarks."""
    rewards = trial.episode_rewards()
    lines = []
    for episode in range(trial.num_played()):
        turns = [turn for turn in trial.turns if turn.episode == episode]
        actions = [turn.action or "?" for turn in turns if turn.kind is Kind.ACT]
        acts = (" | " if " " in "".join(actions) else " ").join(actions)
        remarks = [f"   “{turn.action}”" for turn in turns if turn.kind is not Kind.ACT]
        lines += [f"episode {episode + 1}: {acts}   ({rewards[episode]:+g})", *remarks]
    return "\n".join(lines)


def whole_text(trial: Trial, chat: ChatFormat) -> str:
    """Return the text of all contexts, and the rewards."""
    contexts = [chat.decode(segment.tokens.tolist()) for segment in trial.segments]
    rewards = " ".join(f"{reward:+g}" for reward in trial.episode_rewards())
    return "\n".join((*contexts, f"rewards: {rewards}"))


def reward_table(person: list[float], agent: list[float]) -> str:
    """Return the rewards of a person and of the agent, one column per episode."""
    rows = (("you", person), ("agent", agent))
    return "\n".join(
        f"{name:<6}" + "".join(f"{reward:>8.2f}" for reward in rewards) for name, rewards in rows
    )
