"""OpenEnv's messages: JSON over a WebSocket, one answer to each request but `close`.

request                                    answer
{"type": "reset", "data": {"seed": 7}}     {"type": "observation", "data": {"observation": {…},
{"type": "step", "data": {action}}          "reward": 1.0, "done": false, "metadata": {…}}}
{"type": "state"}                          {"type": "state", "data": {…}}
{"type": "close"}                          –
                                           {"type": "error", "data": {"message": …, "code": …}}

`GET /schema` describes the fields of an action. From `openenv` 0.10, `core/env_server/types.py`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mage_async.environments.loaders.remote import Observed, texts_of
from mage_async.errors import CapacityReached, EnvironmentFault, SessionClosed

ErrorCode = Literal[
    "INVALID_JSON",
    "UNKNOWN_TYPE",
    "VALIDATION_ERROR",
    "EXECUTION_ERROR",
    "CAPACITY_REACHED",
    "SESSION_ERROR",
]
METADATA = "metadata"
"""A field of every action and every observation, which no agent writes or reads."""
_READERS = {"string": str, "integer": int, "number": float, "boolean": json.loads}


@dataclass(frozen=True, slots=True)
class ActionForm:
    """How the text of an action becomes its fields."""

    fields: Mapping[str, Mapping[str, Any]]
    """JSON schemas by name."""

    def read(self, text: str) -> dict[str, Any] | None:
        """The fields; None where the text does not have the form."""
        try:
            if (field := self._only()) is not None:
                return {field: _READERS[self.fields[field]["type"]](text)}
            found = json.loads(text)
        except ValueError:
            return None
        return found if isinstance(found, dict) else None

    def asked(self) -> str:
        """What has to be answered, in words; empty where any text may be."""
        if (field := self._only()) is None:
            return f"Answer with a JSON object: {json.dumps(self.fields)}"
        kind = self.fields[field]["type"]
        return "" if kind == "string" else f"Answer with the {field}: {kind}."

    def _only(self) -> str | None:
        """The one field that a text fills."""
        if len(self.fields) != 1:
            return None
        (name,) = self.fields
        return name if self.fields[name].get("type") in _READERS else None


def form_of(schema: Mapping[str, Any]) -> ActionForm:
    """The form of a server's actions, of what `GET /schema` answers.

    Raises:
        EnvironmentFault: its actions have no fields, as where tools are called over MCP.
    """
    fields = dict(schema.get("action", {}).get("properties", {}))
    fields.pop(METADATA, None)
    if not fields:
        raise EnvironmentFault("the server's actions have no fields that a text could fill")
    return ActionForm(fields)


def observed(answer: Mapping[str, Any]) -> Observed:
    """Read an answer. An action that the server refuses is an observation.

    Raises:
        CapacityReached: the server has no room for another session.
        SessionClosed: the server has ended the session.
        EnvironmentFault: the environment failed.
    """
    data = answer.get("data", {})
    if answer.get("type") == "error":
        return _refused(data)
    fields = {key: value for key, value in data["observation"].items() if key != METADATA}
    if (legal := texts_of(fields.get("legal_actions"))) is not None:
        del fields["legal_actions"]
    metadata = data.get(METADATA) or {}
    return Observed(
        _said({key: value for key, value in fields.items() if value not in (None, "", [], {})}),
        float(data.get("reward") or 0.0),
        bool(data.get("done")),
        bool(metadata.get("is_valid", True)),
        legal or (),
    )


def _refused(data: Mapping[str, Any]) -> Observed:
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


def _said(fields: Mapping[str, Any]) -> str:
    """One text as it is; else a line a field."""
    texts = {
        key: each if isinstance(each, str) else json.dumps(each) for key, each in fields.items()
    }
    if len(texts) == 1:
        return next(iter(texts.values()))
    return "\n".join(f"{key}: {text}" for key, text in texts.items())


def observation_answer(seen: Observed) -> dict[str, Any]:
    """The answer that says what was observed."""
    fields = {"text": seen.said, "legal_actions": list(seen.legal_actions)}
    metadata = {"is_valid": seen.is_valid}
    data = {"observation": {**fields, METADATA: metadata}, "reward": seen.reward}
    return {"type": "observation", "data": {**data, "done": seen.is_done, METADATA: metadata}}


def error_answer(code: ErrorCode, message: str, **more: Any) -> dict[str, Any]:
    """The answer that says what was wrong."""
    return {"type": "error", "data": {"message": message, "code": code, **more}}
