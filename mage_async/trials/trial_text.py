"""A played trial as text for a terminal."""

from mage_async.trajectory import Kind, Trial
from mage_async.trials.chat_format import ChatFormat


def episode_lines(trial: Trial) -> str:
    """The agent's actions and remarks, an episode a line."""
    rewards = trial.episode_rewards()
    lines = []
    for episode in range(trial.num_played()):
        turns = [turn for turn in trial.turns if turn.episode == episode]
        acts = " ".join(turn.action or "?" for turn in turns if turn.kind is Kind.ACT)
        remarks = [f"   “{turn.action}”" for turn in turns if turn.kind is not Kind.ACT]
        lines += [f"episode {episode + 1}: {acts}   ({rewards[episode]:+g})", *remarks]
    return "\n".join(lines)


def whole_text(trial: Trial, chat: ChatFormat) -> str:
    """Every word that the agent was told or said, the opponent's moves among them."""
    contexts = [chat.decode(segment.tokens.tolist()) for segment in trial.segments]
    rewards = " ".join(f"{reward:+g}" for reward in trial.episode_rewards())
    return "\n".join((*contexts, f"rewards: {rewards}"))


def reward_table(person: list[float], agent: list[float]) -> str:
    """The rewards of a person and of the agent, an episode a column."""
    rows = (("you", person), ("agent", agent))
    return "\n".join(
        f"{name:<6}" + "".join(f"{reward:>8.2f}" for reward in rewards) for name, rewards in rows
    )
