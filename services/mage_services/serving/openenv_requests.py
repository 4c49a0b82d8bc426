"""Requests of a session in OpenEnv's words, one after the other."""

import json
from typing import Any

from mage_async.environments.loaders.openenv_messages import error_answer, observation_answer
from mage_async.errors import EnvironmentFault
from mage_services.serving.session import BadRequest, Json, Session

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


async def answer(session: Session, text: str) -> Json | None:
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
        return await _asked(session, kind, request)
    except BadRequest as error:
        return error_answer("VALIDATION_ERROR", str(error))
    except EnvironmentFault as fault:
        return error_answer("EXECUTION_ERROR", str(fault))


async def _asked(session: Session, kind: Any, request: Json) -> Json:
    if kind == "state":
        state = {"episode_id": session.episode_id, "step_count": session.num_steps}
        return {"type": "state", "data": state}
    data = request.get("data", {})
    if not isinstance(data, dict):
        raise BadRequest(f"`data` must be an object, got {data!r:.60}")
    if kind == "reset":
        return observation_answer(await session.reset(data))
    if kind == "step":
        return observation_answer(await session.step(data))
    return error_answer("UNKNOWN_TYPE", f"Unknown message type: {kind!r:.60}")
