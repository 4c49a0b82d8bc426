"""Load `openenv:URL`: an environment on a server that speaks OpenEnv's WebSocket protocol.

Every episode has its own session, which ends with it, so a session that breaks affects only one
trial. A task is the seed that `reset` sends.
"""

import json
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from mage_async.environments.loaders.loader import (
    SERVER_RULES,
    TURNS,
    Observed,
    ServerEpisode,
    as_texts,
    library,
    server_episode_class,
)
from mage_async.environments.tools import StepValue
from mage_async.errors import CapacityReached, EnvironmentFault, SessionClosed

HEARTBEAT_S = 20.0
"""Seconds of silence after which the server is pinged; a server that does not answer the ping
counts as gone.
"""
METADATA = "metadata"
"""Name of a field of every action and every observation that agents neither write nor read."""


def _finite(text: str) -> float:
    """Return the number that a text names.

    Raises:
        ValueError: the text names no number, or one that JSON cannot hold, such as `nan` or
            `1e999`.
    """
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not finite")
    return number


_json = partial(json.loads, parse_float=_finite, parse_constant=_finite)
_READERS: Mapping[str, Callable[[str], Any]] = {
    "string": str,
    "integer": int,
    "number": _finite,
    "boolean": _json,
}
"""Converters from text, by JSON type."""


@dataclass(frozen=True, slots=True)
class ActionForm:
    """Convert an action's text into the action's fields."""

    fields: Mapping[str, Mapping[str, Any]]
    """JSON schemas of the fields, by name."""

    def read(self, text: str) -> dict[str, Any] | None:
        """Return the fields; None if the text does not have the form."""
        try:
            if (field := self._single_field()) is not None:
                return {field: _READERS[self.fields[field]["type"]](text)}
            found = _json(text)
        except (ValueError, RecursionError):  # RecursionError: brackets are nested too deeply
            return None
        return found if isinstance(found, dict) else None

    def instruction(self) -> str:
        """Return the required form in words; "" if any text is valid."""
        if (field := self._single_field()) is None:
            return f"Answer with a JSON object: {json.dumps(self.fields)}"
        kind = self.fields[field]["type"]
        return "" if kind == "string" else f"Answer with the {field}: {kind}."

    def _single_field(self) -> str | None:
        """Return the name of the only field, if plain text can fill it (its type is in `_READERS`);
        None if text has to be a JSON object of several fields.
        """
        if len(self.fields) != 1:
            return None
        (name,) = self.fields
        return name if self.fields[name].get("type") in _READERS else None


class Episode(ServerEpisode):
    """Play one episode in a session of its own."""

    extra_fields: Mapping[str, Any]
    """Fields that are sent with every `reset`."""
    form: ActionForm | None = None
    """Form of the server's actions, which the first episode requests for the whole class."""
    _socket: Any = None

    async def reset(self, seed: int, task: int) -> str:
        """Open a session and reset it, with the task as the server's seed."""
        aiohttp = library("aiohttp", "openenv")
        self._http = aiohttp.ClientSession(self.url)
        kind = type(self)
        try:
            if kind.form is None:
                async with self._http.get("schema", raise_for_status=True) as answer:
                    kind.form = form_of(await answer.json())
            self._socket = await self._http.ws_connect("ws", heartbeat=HEARTBEAT_S)
        except aiohttp.ClientConnectorError as error:
            raise SessionClosed(
                f"{error}; start the server, or correct the address in environment.name"
            ) from error
        data = {"seed": task, **self.extra_fields}
        observation, *_ = await self._request({"type": "reset", "data": data})
        return f"{observation}\n{kind.form.instruction()}".strip()

    async def step(self, action: str) -> StepValue:
        """Send an action; an action without the server's form is refused here."""
        assert self.form is not None, "reset comes first"
        fields = self.form.read(action)
        if fields is None:
            return self.form.instruction(), 0.0, False, False, {"is_valid": False}
        return await self._request({"type": "step", "data": fields})

    async def _end(self) -> None:
        """End the session, and wait until the server has ended it too, because only then it accepts
        another session in its place.
        """
        if self._socket is not None:
            await self._send({"type": "close"})
            await self._socket.receive()
            await self._socket.close()

    async def _request(self, request: dict[str, Any]) -> StepValue:
        """Send a request, and return its answer as the value of `step`.

        Raises:
            SessionClosed: the connection is closed.
        """
        await self._send(request)
        message = await self._socket.receive()
        if not isinstance(message.data, str):
            raise SessionClosed(f"{self.url} has closed the session ({message.type.name})")
        return self._step_value(observed(message.json()))

    async def _send(self, request: dict[str, Any]) -> None:
        """Send a request, unless the server has closed the connection."""
        # The caller then reads the server's last message, which says why it was closed.
        with suppress(ConnectionResetError):
            await self._socket.send_json(request)


def load(
    url: str,
    /,
    *,
    turns: int = TURNS,
    rules: str = SERVER_RULES,
    reset: Mapping[str, Any] | None = None,
) -> type:
    """Return a class of episodes.

    Args:
        url: Address of the server, such as `http://127.0.0.1:8000`.
        turns: Largest number of steps in an episode.
        rules: Rules in words; the server's `GET /metadata` may have some.
        reset: Fields that are sent with every `reset`, in addition to the seed.

    Raises:
        ConfigError: `url` is no such address, or aiohttp is missing.
    """
    extra = dict(reset or {})
    return server_episode_class(Episode, "openenv", url, turns, extra_fields=extra, rules=rules)


# OpenEnv's messages: JSON over a WebSocket, one answer to each request but `close`.
#
# request                                    answer
# {"type": "reset", "data": {"seed": 7}}     {"type": "observation", "data": {"observation": {…},
# {"type": "step", "data": {action}}          "reward": 1.0, "done": false, "metadata": {…}}}
# {"type": "state"}                          {"type": "state", "data": {…}}
# {"type": "close"}                          –
#                                            {"type": "error", "data": {"message": …, "code": …}}
#
# `GET /schema` describes the fields of an action. From `openenv` 0.10, `core/env_server/types.py`.


def form_of(schema: Mapping[str, Any]) -> ActionForm:
    """Return the form of a server's actions, from its answer to `GET /schema`.

    Raises:
        EnvironmentFault: the actions have no fields, for example because tools are called over MCP.
    """
    fields = dict(schema.get("action", {}).get("properties", {}))
    fields.pop(METADATA, None)
    if not fields:
        raise EnvironmentFault("the server's actions have no fields that a text could fill")
    return ActionForm(fields)


def observed(answer: Mapping[str, Any]) -> Observed:
    """Read an answer. An action that the server refuses becomes an observation.

    Raises:
        CapacityReached: the server has no room for another session.
        SessionClosed: the server has ended the session.
        EnvironmentFault: the environment failed.
    """
    data = answer.get("data", {})
    if answer.get("type") == "error":
        return _refused(data)
    fields = {key: value for key, value in data["observation"].items() if key != METADATA}
    if (legal := as_texts(fields.get("legal_actions"))) is not None:
        del fields["legal_actions"]
    metadata = data.get(METADATA) or {}
    return Observed(
        _text({key: value for key, value in fields.items() if value not in (None, "", [], {})}),
        float(data.get("reward") or 0.0),
        bool(data.get("done")),
        bool(metadata.get("is_valid", True)),
        legal or (),
    )


def _refused(data: Mapping[str, Any]) -> Observed:
    """Return the observation for a refused action; raise for any other error."""
    code, message = data.get("code"), str(data.get("message", ""))
    if code == "CAPACITY_REACHED":
        raise CapacityReached(
            f"{message}: let the server hold as many sessions as trials are played at once"
        )
    if code == "SESSION_ERROR":
        raise SessionClosed(message)
    if code != "VALIDATION_ERROR":
        raise EnvironmentFault(f"{code}: {message}")
    return Observed("This is no valid action.", 0.0, is_done=False, is_valid=False)


def _text(fields: Mapping[str, Any]) -> str:
    """Return a single field's text as it is, several fields as one line each."""
    texts = [each if isinstance(each, str) else json.dumps(each) for each in fields.values()]
    if len(texts) == 1:
        return texts[0]
    return "\n".join(f"{key}: {text}" for key, text in zip(fields, texts, strict=True))


def observation_answer(seen: Observed) -> dict[str, Any]:
    """Return the message by which this project's own server (`mage_services/serving/`) sends an
    observation.
    """
    fields = {"text": seen.text, "legal_actions": list(seen.legal_actions)}
    metadata = {"is_valid": seen.is_valid}
    data = {"observation": {**fields, METADATA: metadata}, "reward": seen.reward}
    return {"type": "observation", "data": {**data, "done": seen.is_done, METADATA: metadata}}


def error_answer(code: str, message: str, **more: Any) -> dict[str, Any]:
    """Return the message by which this project's own server reports an error.

    Args:
        code: Error code of OpenEnv: `INVALID_JSON`, `UNKNOWN_TYPE`, `VALIDATION_ERROR`,
            `EXECUTION_ERROR`, `CAPACITY_REACHED` or `SESSION_ERROR`.
    """
    return {"type": "error", "data": {"message": message, "code": code, **more}}
