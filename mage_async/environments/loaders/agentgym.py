"""`agentgym:URL`: an environment that a server of AgentGym offers over HTTP.

Every episode has an environment of its own on the server, and closes it. A task is the number
of a data item, which `reset` is sent.
"""

import json
from collections.abc import Mapping
from typing import Any

from mage_async.environments.environment import Split
from mage_async.environments.loaders.agentgym_messages import Handle, Reader, handle_of
from mage_async.environments.loaders.loaded import HELDOUT_SHARE, TURNS, declared, library
from mage_async.environments.loaders.remote import Observed, address_of
from mage_async.environments.options import check_whole
from mage_async.errors import CapacityReached, EnvironmentFault

_RULES = "You act in an environment step by step; what it says tells you what to do."
_FULL, _UNKNOWN = 503, (404, 405)
_MOST_SHOWN = 80


class Episode:
    """One episode, and the environment of the server that it is played in; see `load`."""

    url: str
    num_tasks: int
    more: Mapping[str, Mapping[str, Any]]
    """Sent with every `create` and every `reset`."""

    def __init__(self) -> None:
        self._http: Any = None
        self._handle: Handle | None = None
        self._reader = Reader()
        self.legal_actions: tuple[str, ...] = ()

    def members(self, split: Split) -> range:
        """Numbers of data items; the last fifth of them is held out."""
        first_heldout = self.num_tasks - self.num_tasks // HELDOUT_SHARE
        return range(first_heldout) if split == "train" else range(first_heldout, self.num_tasks)

    async def reset(self, seed: int, task: int) -> str:
        """Create an environment and reset it to a data item."""
        aiohttp = library("aiohttp", "agentgym")
        no_limit = aiohttp.ClientTimeout(total=None)  # environment.step_deadline_s is the limit
        self._http = aiohttp.ClientSession(timeout=no_limit)
        self._handle = handle_of(await self._posted("create", {"id": task, **self.more["create"]}))
        asked = {**self._handle.reset(task), **self.more["reset"]}
        return self._shown(self._reader.begun(await self._posted("reset", asked))).said

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Send an action."""
        assert self._handle is not None, "reset comes first"
        answer = await self._posted("step", self._handle.step(action))
        seen = self._shown(self._reader.stepped(answer))
        return seen.said, seen.reward, seen.is_done, False, {"is_valid": seen.is_valid}

    async def close(self) -> None:
        """Close the environment; servers that know no `close` keep it until they end."""
        try:
            if self._handle is not None:
                await self._posted("close", self._handle.close(), may_be_unknown=True)
        finally:
            if self._http is not None:
                await self._http.close()

    def _shown(self, seen: Observed) -> Observed:
        self.legal_actions = seen.legal_actions
        return seen

    async def _posted(self, path: str, asked: Any, *, may_be_unknown: bool = False) -> Any:
        """The answer to a request, as JSON.

        Raises:
            CapacityReached: the server has no room for another environment.
            EnvironmentFault: the server does not know the request, failed, or answered no JSON.
        """
        address = f"{self.url}{path}"
        async with self._http.post(address, json=asked) as answer:
            said = await answer.text()
        if answer.status == _FULL:
            raise CapacityReached(f"{address} has no room: {said!r:.{_MOST_SHOWN}}")
        if may_be_unknown and answer.status in _UNKNOWN:
            return None
        if answer.status != 200:
            raise EnvironmentFault(
                f"{address} answered {answer.status} {answer.reason}: {said!r:.{_MOST_SHOWN}}"
            )
        try:
            return json.loads(said)
        except ValueError:
            raise EnvironmentFault(f"{address} answered no JSON: {said!r:.{_MOST_SHOWN}}") from None


def load(
    url: str,
    /,
    *,
    turns: int = TURNS,
    tasks: int = 1280,
    rules: str = _RULES,
    create: Mapping[str, Any] | None = None,
    reset: Mapping[str, Any] | None = None,
) -> type:
    """A class of episodes.

    Args:
        url: of the server, such as `http://127.0.0.1:36001`.
        turns: most steps of an episode.
        tasks: data items, from 0; the last fifth of them is held out.
        rules: in words; AgentGym has those of its servers in `agentenv/envs`.
        create: sent with every `create`, beside the task.
        reset: sent with every `reset`, such as `world_type` to ALFWorld.

    Raises:
        ConfigError: it is no such address, or aiohttp is missing.
    """
    name = f"agentgym:{url}"
    check_whole(name, "turns", turns, 1, 100_000)
    check_whole(name, "tasks", tasks, HELDOUT_SHARE, 10_000_000)
    address = address_of("agentgym", url)
    library("aiohttp", "agentgym")
    return declared(
        Episode,
        name,
        url=address,
        num_tasks=tasks,
        more={"create": dict(create or {}), "reset": dict(reset or {})},
        max_turns=turns,
        rules=rules,
    )
