"""Provide what the servers of this package share: a client's session in an environment (`Session`),
and the serving of an HTTP application until a signal (`serve`).
"""

import asyncio
import errno
import signal
from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import web

from mage_async.environments.environment import PENDING, Environment, Outcome, Play, Split
from mage_async.environments.loaders.loader import Observed
from mage_async.environments.user_calls import SlowPlay, new_play
from mage_async.errors import EnvironmentFault, RunError
from mage_async.trajectory import Task
from mage_async.trials.trial_run import environment_code
from mage_services.environments.call_runner import CallRunner
from mage_services.gateway.chat_completions import BadRequest, Json


class Session:
    """Play the requests of one client: one episode after another, each started by a `reset`.

    The client waits for each answer before the next request.

    Attributes:
        episode_id: The client's name for the episode.
        num_steps: Number of steps of the episode so far.
        score: Sum of the episode's rewards so far.
    """

    def __init__(self, environment: Environment, calls: CallRunner) -> None:
        self._environment, self._calls = environment, calls
        self._play: Play | None = None
        self._task: Task | None = None
        # While this is true, `step` refuses every action. It is true during a call too, so that an
        # episode whose call failed gets no further steps.
        self._is_done = True
        self.num_steps, self.score = 0, 0.0
        self.episode_id: str | None = None

    async def reset(self, data: Json) -> Observed:
        """Start an episode.

        Args:
            data: `task`, `split`, `seed`, `episode` and `episode_id`, all optional.

        Raises:
            BadRequest: there is no such task.
            EnvironmentFault: the environment failed, or the session was closed meanwhile.
        """
        task, episode = task_of(self._environment, data), whole_number(data, "episode")
        self.end()
        self._task, self.num_steps, self.score, self._is_done = task, 0, 0.0, True
        self.episode_id = data.get("episode_id")
        with environment_code(task):
            self._play = new_play(self._environment, task, episode)
        await self._make_waiting_calls()
        if self._play is None:
            raise EnvironmentFault("the session was closed during its reset")
        self._is_done = False
        # No reward yet; not over; valid.
        return Observed(self._play.observation, 0.0, False, True, self._legal())

    async def step(self, data: Json) -> Observed:
        """Take the action in `data`.

        Raises:
            BadRequest: the action is no text.
            EnvironmentFault: the environment failed, or there is no episode to step in.
        """
        action = data.get("action")
        if not isinstance(action, str):
            raise BadRequest(f"`action` must be text, got {action!r:.60}")
        if self._play is None or self._task is None or self._is_done:
            raise EnvironmentFault("there is no episode to step in: send a reset first")
        self._is_done = True
        with environment_code(self._task):
            answered = self._play.act(action)
        outcome = await self._make_waiting_calls() if answered is PENDING else answered
        assert outcome is not None, "an action is pending, and no call has returned its outcome"
        self.num_steps += 1
        self.score += outcome.reward
        self._is_done = outcome.is_done
        return Observed(
            outcome.observation, outcome.reward, outcome.is_done, outcome.is_valid, self._legal()
        )

    def end(self) -> None:
        """Close the environment's objects."""
        if isinstance(self._play, SlowPlay) and (call := self._play.closing()) is not None:
            self._calls.close_in_background([call])
        self._play = None

    async def _make_waiting_calls(self) -> Outcome | None:
        """Make the calls that a slow environment waits for; return the outcome of the last
        action.
        """
        outcome = None
        while isinstance(self._play, SlowPlay) and (call := self._play.next_call()) is not None:
            outcome = call.take(await self._calls.perform(call))
        return outcome

    def _legal(self) -> tuple[str, ...]:
        """Return the legal actions, if all of them can be listed."""
        if self._play is None or self._is_done:
            return ()
        legal = self._play.legal_actions()
        # A sequence with `is_whole = False` has more actions than it lists.
        return tuple(legal) if getattr(legal, "is_whole", True) else ()


def task_of(environment: Environment, data: Json) -> Task:
    """Return the task of a `reset` request: the variant that `task` names or, without `task`, the
    one of `split` that the number `seed` chooses.

    Raises:
        BadRequest: there is no such task.
    """
    seed, split = whole_number(data, "seed"), data.get("split", "train")
    splits: tuple[Split, Split] = ("train", "heldout")
    if split not in splits:
        raise BadRequest(f"`split` must be 'train' or 'heldout', got {split!r:.60}")
    members = environment.members(split)
    member = data.get("task", members[seed % len(members)])
    if not any(member in environment.members(each) for each in splits):
        raise BadRequest(f"`task`: there is no {member!r:.60}")
    seats = environment.seats()
    return Task(environment.facts.name, member, seed, seats[seed % len(seats)])


def whole_number(data: Json, name: str) -> int:
    """Return the value of a field, a whole number of at least 0; 0 if the field is missing.

    Raises:
        BadRequest: the value is no such number.
    """
    if (value := data.get(name)) is None:
        return 0
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise BadRequest(f"`{name}` must be a whole number from 0, got {value!r:.60}")
    return value


# The code below serves any HTTP application: `mage serve` uses it for a policy, without an
# environment.


@dataclass(frozen=True, slots=True)
class Limits:
    """Limit the sessions of a server."""

    sessions: int
    """Largest number of open sessions."""
    idle_s: float
    """Seconds without a request after which a session is closed."""


def refuse_other_sites(request: web.Request) -> None:
    """Refuse requests of web pages of other sites, which a browser of this machine may have open.

    Raises:
        web.HTTPForbidden: the request comes from another site.
    """
    # An Origin such as "http://127.0.0.1:8000", without "http://", is equal to `request.host` if
    # the page is of this server.
    if request.headers.get("Origin", "").rpartition("//")[2] not in ("", request.host):
        raise web.HTTPForbidden(text="pages of other sites may not open a session here")


async def serve(
    application: web.Application,
    host: str,
    port: int,
    calls: CallRunner,
    say: Callable[[str], None],
) -> None:
    """Serve until SIGINT or SIGTERM.

    Args:
        port: Port to listen on; 0 takes a free one.
        calls: Makes the calls of a slow environment; closed at the end.
        say: Called with the address once it is served.

    Raises:
        RunError: the address cannot be bound.
    """
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    async with calls:
        runner = web.AppRunner(application)
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            why = f"cannot be listened on: {error.strerror}"
            if error.errno == errno.EADDRINUSE:  # its `strerror` would repeat the address
                why = "is in use; choose another with --port, or 0 for a free one"
            raise RunError(f"{host}:{port} {why}") from error
        try:
            say(f"http://{host}:{runner.addresses[0][1]}")
            await ended.wait()
        finally:
            await runner.cleanup()
