"""`openenv:URL`: an environment that a server offers over OpenEnv's WebSocket.

Every episode has a session of its own, which ends with it; a session that breaks costs its group
alone. A task is the seed that `reset` is sent.
"""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from mage_async.environments.loaders.loaded import TURNS, declared, library
from mage_async.environments.loaders.openenv_messages import ActionForm, form_of, observed
from mage_async.environments.loaders.remote import Observed, address_of
from mage_async.environments.options import check_whole
from mage_async.errors import SessionClosed

HEARTBEAT_S = 20.0
"""After so long without a word the server is pinged; one that does not answer has gone."""
_RULES = "You act in an environment step by step; what it says tells you what to do."


class Episode:
    """One episode, and the session it is played in; see `load`."""

    url: str
    more: Mapping[str, Any]
    """Sent with every `reset`."""
    form: ActionForm | None = None
    """Of the server's actions; asked once."""

    def __init__(self) -> None:
        self._http: Any = None
        self._socket: Any = None
        self.legal_actions: tuple[str, ...] = ()

    async def reset(self, seed: int, task: int) -> str:
        """Open a session and reset it, with the task as the server's seed."""
        aiohttp = library("aiohttp", "openenv")
        self._http = aiohttp.ClientSession(self.url)
        kind = type(self)
        if kind.form is None:
            async with self._http.get("schema", raise_for_status=True) as answer:
                kind.form = form_of(await answer.json())
        self._socket = await self._http.ws_connect("ws", heartbeat=HEARTBEAT_S)
        seen = await self._asked({"type": "reset", "data": {"seed": task, **self.more}})
        return f"{seen.said}\n{kind.form.asked()}".strip()

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Send an action; one that does not have the form of the server's is answered here."""
        assert self.form is not None, "reset comes first"
        fields = self.form.read(action)
        if fields is None:
            return self.form.asked(), 0.0, False, False, {"is_valid": False}
        seen = await self._asked({"type": "step", "data": fields})
        return seen.said, seen.reward, seen.is_done, False, {"is_valid": seen.is_valid}

    async def close(self) -> None:
        """End the session, and wait until the server has ended it too: its place is free then."""
        try:
            if self._socket is not None:
                await self._sent({"type": "close"})
                await self._socket.receive()
                await self._socket.close()
        finally:
            if self._http is not None:
                await self._http.close()

    async def _asked(self, request: dict[str, Any]) -> Observed:
        """The answer to a request.

        Raises:
            SessionClosed: the connection is closed.
        """
        await self._sent(request)
        message = await self._socket.receive()
        if not isinstance(message.data, str):
            raise SessionClosed(f"{self.url} has closed the session ({message.type.name})")
        seen = observed(message.json())
        self.legal_actions = seen.legal_actions
        return seen

    async def _sent(self, request: dict[str, Any]) -> None:
        """Send; where the server has just closed, what it said before that is still to be read."""
        with suppress(ConnectionResetError):
            await self._socket.send_json(request)


def load(
    url: str,
    /,
    *,
    turns: int = TURNS,
    rules: str = _RULES,
    reset: Mapping[str, Any] | None = None,
) -> type:
    """A class of episodes.

    Args:
        url: of the server, such as `http://127.0.0.1:8000`.
        turns: most steps of an episode.
        rules: in words; the server's `GET /metadata` may have some.
        reset: sent with every `reset`, beside the seed.

    Raises:
        ConfigError: it is no such address, or aiohttp is missing.
    """
    name = f"openenv:{url}"
    check_whole(name, "turns", turns, 1, 100_000)
    address = address_of("openenv", url)
    library("aiohttp", "openenv")
    return declared(
        Episode,
        name,
        url=address,
        more=dict(reset or {}),
        max_turns=turns,
        rules=rules,
    )
