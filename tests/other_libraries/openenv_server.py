"""A server made with the OpenEnv package; runs in the package's own environment.

Prints its port. A hidden number from 1 to 20 is guessed; it is drawn from the seed.
"""

import random
import socket
import uuid

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field


class Guess(Action):
    number: int = Field(ge=1, le=20)


class Hint(Observation):
    hint: str


class Guessing(Environment):
    """Guess a number from 1 to 20."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._hidden, self._state = 0, State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_) -> Hint:
        self._hidden = random.Random(seed).randint(1, 20)
        self._state = State(episode_id=episode_id or str(uuid.uuid4()))
        return Hint(hint="guess")

    def step(self, action: Guess, timeout_s: float | None = None, **_) -> Hint:
        self._state.step_count += 1
        if action.number == self._hidden:
            return Hint(hint="found", reward=1.0 / self._state.step_count, done=True)
        return Hint(hint="higher" if action.number < self._hidden else "lower", reward=-0.01)

    @property
    def state(self) -> State:
        return self._state


if __name__ == "__main__":
    listening = socket.create_server(("127.0.0.1", 0))
    print(listening.getsockname()[1], flush=True)
    application = create_fastapi_app(Guessing, Guess, Hint, max_concurrent_envs=2)
    uvicorn.Server(uvicorn.Config(application, log_level="warning")).run([listening])
