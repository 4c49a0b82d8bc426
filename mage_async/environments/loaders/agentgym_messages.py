"""AgentGym's messages: JSON over HTTP, a POST each, about one environment of the server.

`POST`   asks                              is answered
create   {"id": 7}                         {"id": 0}, or the bare number
reset    {"id": 0, "data_idx": 7}          {"observation": …, "score": 0, "done": false, …}
step     {"id": 0, "action": "go east"}    {"observation": …, "reward": 1, "score": 1, "done": true}
close    {"id": 0}                         true

An error is `{"error": …}`. The servers agree in this and differ in names: where `create` is
answered with a bare number, its name is `env_idx`; `reset` may be answered with the bare text, and
an observation may be called `state`. From AgentGym at 3ef9235, `agentenv-*/agentenv_*/server.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mage_async.environments.loaders.remote import Observed, texts_of
from mage_async.errors import EnvironmentFault

_TASK = {
    "id": ("data_idx", "game", "seed"),
    "env_idx": ("session_id", "item_id", "idx", "id"),
}
"""What the number of a task is called in `reset`, by the name of the environment's number. All are
sent, as servers leave out what they do not ask for.
"""
_MOST_SHOWN = 80


@dataclass(frozen=True, slots=True)
class Handle:
    """One environment of a server."""

    name: str
    """Of its number: `id` or `env_idx`."""
    number: int

    def reset(self, task: int) -> dict[str, Any]:
        """What `reset` is sent."""
        return {**dict.fromkeys(_TASK[self.name], task), self.name: self.number}

    def step(self, action: str) -> dict[str, Any]:
        """What `step` is sent."""
        return {self.name: self.number, "action": action}

    def close(self) -> dict[str, Any]:
        """What `close` is sent."""
        return {self.name: self.number}


def handle_of(answer: Any) -> Handle:
    """The environment that `create` was answered with.

    Raises:
        EnvironmentFault: there is none.
    """
    named = answer if isinstance(answer, Mapping) else {"env_idx": answer}
    for name in _TASK:
        if isinstance(number := named.get(name), int):
            return Handle(name, number)
    raise EnvironmentFault(f"create was answered without an environment: {_short(answer)}")


class Reader:
    """Reads the answers of an episode.

    Attributes:
        score: the sum of all rewards so far, as the server counts it.
    """

    def __init__(self) -> None:
        self.score = 0.0

    def begun(self, answer: Any) -> Observed:
        """Read what `reset` was answered: a text, a list that begins with one, or fields.

        Raises:
            EnvironmentFault: the environment failed, or nothing was observed.
        """
        if isinstance(answer, list) and answer:
            answer = answer[0]
        fields = {"observation": answer} if isinstance(answer, str) else answer
        seen = self.stepped(fields)
        self.score = float(fields.get("score") or 0.0)
        told = fields.get("task_description")
        said = f"{told}\n{seen.said}" if isinstance(told, str) and told else seen.said
        return Observed(said, 0.0, seen.is_done, True, seen.legal_actions)

    def stepped(self, answer: Any) -> Observed:
        """Read what `step` was answered. Where there is a score, a reward is its increase.

        Raises:
            EnvironmentFault: the environment failed, or nothing was observed.
        """
        if not isinstance(answer, Mapping):
            raise EnvironmentFault(f"the server answered no object: {_short(answer)}")
        if "error" in answer:
            raise EnvironmentFault(f"the server's environment failed: {_short(answer['error'])}")
        said = answer.get("observation", answer.get("state"))
        if not isinstance(said, str):
            raise EnvironmentFault(f"the server answered without an observation: {_short(answer)}")
        info = answer.get("info")
        is_valid = not isinstance(info, Mapping) or bool(info.get("is_valid", True))
        legal = texts_of(answer.get("available_actions")) or ()
        return Observed(said, self._reward(answer), bool(answer.get("done")), is_valid, legal)

    def _reward(self, answer: Mapping[str, Any]) -> float:
        if (score := answer.get("score")) is None:
            reward = float(answer.get("reward") or 0.0)
            self.score += reward
            return reward
        before, self.score = self.score, float(score)
        return round(self.score - before, 12)  # what is left of 0.3 - 0.2 is no reward


def answer_of(seen: Observed, score: float, **more: Any) -> dict[str, Any]:
    """The answer that says what was observed.

    Args:
        score: the sum of all rewards of the episode.
        more: fields beside it, such as `task_description`.
    """
    return {
        "observation": seen.said,
        "reward": seen.reward,
        "score": score,
        "done": seen.is_done,
        "available_actions": list(seen.legal_actions),
        "info": {"is_valid": seen.is_valid},
        **more,
    }


def _short(value: Any) -> str:
    return f"{value!r:.{_MOST_SHOWN}}"
