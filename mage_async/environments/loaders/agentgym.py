"""Load `agentgym:URL`: an environment on a server of AgentGym, over HTTP.

Every episode creates its own environment on the server, and closes it. A task is the number of a
data item, which `reset` sends.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mage_async.environments.environment import HELDOUT_EVERY, check_whole
from mage_async.environments.loaders.loader import (
    SERVER_RULES,
    TURNS,
    NumberedTasks,
    Observed,
    ServerEpisode,
    as_texts,
    library,
    server_episode_class,
)
from mage_async.environments.tools import StepValue
from mage_async.errors import CapacityReached, EnvironmentFault

# AgentGym's messages: JSON over HTTP, one POST each, about one environment of the server.
#
# POST     request                          answer
# create   {"id": 7}                        {"id": 0}, or the bare number
# reset    {"id": 0, "data_idx": 7}         {"observation": …, "score": 0, "done": false, …}
# step     {"id": 0, "action": "go east"}   {"observation": …, "reward": 1, "score": 1, "done": …}
# close    {"id": 0}                        true
#
# An error is `{"error": …}`. Servers differ in names: if `create` returns a bare number, its name
# is `env_idx`; `reset` may return the bare text, and an observation may be called `state`. From
# AgentGym at 3ef9235, `agentenv-*/agentenv_*/server.py`.

_FULL, _UNKNOWN = 503, (404, 405)
"""HTTP status of a server without room, and statuses of one that does not know a request."""

_TASK = {
    "id": ("data_idx", "game", "seed"),
    "env_idx": ("session_id", "item_id", "idx", "id"),
}
"""For each name of the environment's number, the names under which servers expect the task's number
in `reset`. All are sent, because servers ignore fields that they do not know.
"""
Handle = dict[str, int]
"""Number of an environment by its name in requests, `id` or `env_idx`: the body of a request about
the environment, such as `close`.
"""
_MOST_SHOWN = 80
"""Largest number of characters of a server's answer that an error message quotes."""


class Reader:
    """Read the server's answers in an episode.

    Attributes:
        score: Sum of all rewards so far, as the server counts it.
    """

    def __init__(self) -> None:
        self.score = 0.0

    def read_reset(self, answer: Any) -> Observed:
        """Read the answer to `reset`: a text, a list that begins with one, or fields.

        Raises:
            EnvironmentFault: the environment failed, or there is no observation.
        """
        if isinstance(answer, list) and answer:
            answer = answer[0]
        fields = {"observation": answer} if isinstance(answer, str) else answer
        seen = self.read_step(fields)
        self.score = float(fields.get("score") or 0.0)
        description = fields.get("task_description")
        has_description = isinstance(description, str) and description
        text = f"{description}\n{seen.text}" if has_description else seen.text
        return replace(seen, text=text, reward=0.0, is_valid=True)

    def read_step(self, answer: Any) -> Observed:
        """Read the answer to `step`. If there is a score, the reward is its increase.

        Raises:
            EnvironmentFault: the environment failed, or there is no observation.
        """
        if not isinstance(answer, Mapping):
            raise EnvironmentFault(f"the server's answer is no JSON object: {_short(answer)}")
        if "error" in answer:
            raise EnvironmentFault(f"the server's environment failed: {_short(answer['error'])}")
        text = answer.get("observation", answer.get("state"))
        if not isinstance(text, str):
            raise EnvironmentFault(f"the server answered without an observation: {_short(answer)}")
        info = answer.get("info")
        is_valid = not isinstance(info, Mapping) or bool(info.get("is_valid", True))
        legal = as_texts(answer.get("available_actions")) or ()
        return Observed(text, self._reward(answer), bool(answer.get("done")), is_valid, legal)

    def _reward(self, answer: Mapping[str, Any]) -> float:
        """Return the reward of an answer: the increase of the score or, without a score, the reward
        itself.
        """
        if (score := answer.get("score")) is None:
            reward = float(answer.get("reward") or 0.0)
            self.score += reward
            return reward
        before, self.score = self.score, float(score)
        return round(self.score - before, 12)  # 0.3 - 0.2 is 0.09999999999999998


class Episode(NumberedTasks, ServerEpisode):
    """Play one episode in an environment of its own on the server."""

    extra_fields: Mapping[str, Mapping[str, Any]]
    """Fields that are sent with every `create` and every `reset`, by the request."""

    def __init__(self) -> None:
        super().__init__()
        self._handle: Handle | None = None
        self._reader = Reader()

    async def reset(self, seed: int, task: int) -> str:
        """Create an environment and reset it to a data item."""
        aiohttp = library("aiohttp", "agentgym")
        no_limit = aiohttp.ClientTimeout(total=None)  # environment.step_deadline_s is the limit
        self._http = aiohttp.ClientSession(timeout=no_limit)
        body = {"id": task, **self.extra_fields["create"]}
        self._handle = handle_of(await self._post("create", body))
        body = {**reset_body(self._handle, task), **self.extra_fields["reset"]}
        observation, *_ = self._step_value(self._reader.read_reset(await self._post("reset", body)))
        return observation

    async def step(self, action: str) -> StepValue:
        """Send an action."""
        assert self._handle is not None, "reset comes first"
        answer = await self._post("step", {**self._handle, "action": action})
        return self._step_value(self._reader.read_step(answer))

    async def _end(self) -> None:
        """Close the environment; a server without `close` keeps it until the server ends."""
        if self._handle is not None:
            await self._post("close", self._handle, may_be_unknown=True)

    async def _post(self, path: str, body: Any, *, may_be_unknown: bool = False) -> Any:
        """Send a request and return the JSON of its answer.

        Raises:
            CapacityReached: the server has no room for another environment.
            EnvironmentFault: the server does not know the request, failed, or its answer is no
                JSON.
        """
        address = f"{self.url}{path}"
        async with self._http.post(address, json=body) as answer:
            text = await answer.text()
        if answer.status == _FULL:
            raise CapacityReached(f"{address} has no room: {text!r:.{_MOST_SHOWN}}")
        if may_be_unknown and answer.status in _UNKNOWN:
            return None
        if answer.status != 200:
            raise EnvironmentFault(
                f"{address} answered {answer.status} {answer.reason}: {text!r:.{_MOST_SHOWN}}"
            )
        try:
            return json.loads(text)
        except ValueError:
            raise EnvironmentFault(
                f"the answer of {address} is no JSON: {text!r:.{_MOST_SHOWN}}"
            ) from None


def load(
    url: str,
    /,
    *,
    turns: int = TURNS,
    tasks: int = 1280,
    rules: str = SERVER_RULES,
    create: Mapping[str, Any] | None = None,
    reset: Mapping[str, Any] | None = None,
) -> type:
    """Return a class of episodes.

    Args:
        url: Address of the server, such as `http://127.0.0.1:36001`.
        turns: Largest number of steps in an episode.
        tasks: Number of data items; the last quarter of them is held out.
        rules: Rules in words; AgentGym has those of its servers in `agentenv/envs`.
        create: Fields that are sent with every `create`, in addition to the task.
        reset: Fields that are sent with every `reset`, such as `world_type` to ALFWorld.

    Raises:
        ConfigError: `url` is no address, an option is out of its range, or aiohttp is missing.
    """
    check_whole(f"agentgym:{url}", "tasks", tasks, HELDOUT_EVERY, 10_000_000)
    extra = {"create": dict(create or {}), "reset": dict(reset or {})}
    parts = {"num_tasks": tasks, "extra_fields": extra, "rules": rules}
    return server_episode_class(Episode, "agentgym", url, turns, **parts)


def handle_of(answer: Any) -> Handle:
    """Read the number of the new environment from the answer to `create`.

    Raises:
        EnvironmentFault: the answer has no such number.
    """
    named = answer if isinstance(answer, Mapping) else {"env_idx": answer}
    for name in _TASK:
        if isinstance(number := named.get(name), int):
            return {name: number}
    raise EnvironmentFault(f"the answer to `create` names no environment: {_short(answer)}")


def reset_body(handle: Handle, task: int) -> dict[str, int]:
    """Return the body of a `reset` request, which sets an environment to a task."""
    (name,) = handle
    return dict.fromkeys(_TASK[name], task) | handle


def answer_of(seen: Observed, score: float, **more: Any) -> dict[str, Any]:
    """Return the answer by which this project's own server (`mage_services/serving/`) sends an
    observation.

    Args:
        score: Sum of all rewards of the episode.
        more: Further fields, such as `task_description`.
    """
    return {
        "observation": seen.text,
        "reward": seen.reward,
        "score": score,
        "done": seen.is_done,
        "available_actions": list(seen.legal_actions),
        "info": {"is_valid": seen.is_valid},
        **more,
    }


def _short(value: Any) -> str:
    """Return a value as text of at most `_MOST_SHOWN` characters."""
    return f"{value!r:.{_MOST_SHOWN}}"
