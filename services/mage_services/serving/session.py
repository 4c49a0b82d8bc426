"""One session of a served environment: its requests in OpenEnv's words, one after the other."""

import json
from collections.abc import Mapping
from typing import Any

from mage_async.environments.calls import SlowPlay
from mage_async.environments.environment import PENDING, Environment, Outcome, Play, Split
from mage_async.environments.loaders.openenv_messages import (
    Observed,
    error_answer,
    observation_answer,
)
from mage_async.environments.whole_play import begun
from mage_async.errors import EnvironmentFault
from mage_async.trajectory import Task
from mage_async.trials.trial_run import environment_speaking
from mage_services.environments.workers import Workers

ACTION = {"type": "object", "properties": {"action": {"type": "string"}}, "required": ["action"]}
OBSERVATION = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "legal_actions": {"type": "array", "items": {"type": "string"}},
    },
}
STATE = {
    "type": "object",
    "properties": {"episode_id": {"type": ["string", "null"]}, "step_count": {"type": "integer"}},
}
Json = dict[str, Any]


class BadRequest(Exception):
    """A request that cannot be read; its message is answered."""


class Session:
    """Plays one episode after another, each from a `reset`."""

    def __init__(self, environment: Environment, workers: Workers) -> None:
        self._environment, self._workers = environment, workers
        self._play: Play | None = None
        self._task: Task | None = None
        self._is_done, self._num_steps = False, 0
        self._episode_id: str | None = None

    async def answer(self, text: str) -> Json | None:
        """The answer to a request; None: the client has closed the session."""
        try:
            request = json.loads(text)
        except ValueError as error:
            return error_answer("INVALID_JSON", f"Invalid JSON: {error}")
        if not isinstance(request, dict):
            return error_answer("VALIDATION_ERROR", "a request must be an object")
        if (kind := request.get("type")) == "close":
            return None
        try:
            return await self._asked(kind, request)
        except BadRequest as error:
            return error_answer("VALIDATION_ERROR", str(error))
        except EnvironmentFault as fault:
            self._is_done = True  # nothing is asked of a play that failed
            return error_answer("EXECUTION_ERROR", str(fault))

    def end(self) -> None:
        """Close what the environment holds."""
        if isinstance(self._play, SlowPlay) and (call := self._play.closing()) is not None:
            self._workers.close_behind([call])
        self._play = None

    async def _asked(self, kind: Any, request: Json) -> Json:
        if kind == "state":
            state = {"episode_id": self._episode_id, "step_count": self._num_steps}
            return {"type": "state", "data": state}
        data = request.get("data", {})
        if not isinstance(data, dict):
            raise BadRequest(f"`data` must be an object, got {data!r:.60}")
        if kind == "reset":
            return observation_answer(await self._reset(data))
        if kind == "step":
            return observation_answer(await self._step(data))
        return error_answer("UNKNOWN_TYPE", f"Unknown message type: {kind!r:.60}")

    async def _reset(self, data: Json) -> Observed:
        task, episode = task_of(self._environment, data), _whole(data, "episode")
        self.end()
        self._task, self._num_steps, self._is_done = task, 0, False
        self._episode_id = data.get("episode_id")
        with environment_speaking(task):
            self._play = begun(self._environment, task, episode)
        await self._settled()
        return Observed(self._play.observation, 0.0, False, True, self._legal())

    async def _step(self, data: Json) -> Observed:
        action = data.get("action")
        if not isinstance(action, str):
            raise BadRequest(f"`action` must be text, got {action!r:.60}")
        if self._play is None or self._task is None or self._is_done:
            raise EnvironmentFault("there is no episode to step in: send a reset first")
        with environment_speaking(self._task):
            answered = self._play.act(action)
        outcome = await self._settled() if answered is PENDING else answered
        assert outcome is not None, "a call answers an action that waits"
        self._num_steps += 1
        self._is_done = outcome.is_done
        return Observed(
            outcome.observation, outcome.reward, outcome.is_done, outcome.is_valid, self._legal()
        )

    async def _settled(self) -> Outcome | None:
        """Make the calls that a slow environment waits for; the outcome of the last action."""
        outcome = None
        while isinstance(self._play, SlowPlay) and (call := self._play.next_call()) is not None:
            outcome = call.take(await self._workers.perform(call))
        return outcome

    def _legal(self) -> tuple[str, ...]:
        return () if self._play is None or self._is_done else tuple(self._play.legal_actions())


def task_of(environment: Environment, data: Mapping[str, Any]) -> Task:
    """The task that a `reset` asks for: `task` by name, or one of `split` by `seed`.

    Raises:
        BadRequest: there is none.
    """
    seed, split = _whole(data, "seed"), data.get("split", "train")
    splits: tuple[Split, Split] = ("train", "heldout")
    if split not in splits:
        raise BadRequest(f"`split` must be 'train' or 'heldout', got {split!r:.60}")
    members = environment.members(split)
    member = data.get("task", members[seed % len(members)])
    if not any(member in environment.members(each) for each in splits):
        raise BadRequest(f"`task`: there is no {member!r:.60}")
    seats = environment.seats()
    return Task(environment.facts.name, member, seed, seats[seed % len(seats)])


def _whole(data: Mapping[str, Any], name: str) -> int:
    """A whole number from 0, by default 0."""
    value = data.get(name)
    if value is None:
        return 0
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise BadRequest(f"`{name}` must be a whole number from 0, got {value!r:.60}")
    return value
