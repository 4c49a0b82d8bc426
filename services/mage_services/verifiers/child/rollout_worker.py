"""Run rollouts of a taskset for another process, which answers their requests for completions.

    python rollout_worker.py '{"taskset": ID, "size": N, "environment": {…}}'

Its interpreter may lack mage_async and msgspec, so it implements the other side of
`mage_services/processes/child_process.py` itself: on a socket that it inherits, whose number is in
`MAGE_CHANNEL_FD`, frames of a length (4 bytes, little endian) and a body in JSON.

sent first  {"ready": true}, or {"refused": TEXT} if the taskset cannot be loaded
received    {"run": KEY, "task": INDEX, "base_url": URL} or {"cancel": KEY}
sent        {"key": KEY, "reward": X} or {"key": KEY, "failed": TEXT}, when a rollout has ended

The end of the socket ends the program.
"""

import asyncio
import itertools
import json
import math
import os
import socket
import struct
import sys
from functools import partial
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

LENGTH = struct.Struct("<I")
SEAT_DEFAULTS = {
    # The module `chat_harness.py`, which requests completions in this process.
    "harness": {"id": "chat_harness"},
    # Where verifiers starts the programs of a harness: on this machine. The default of verifiers is
    # a container of a cloud service. `chat_harness` starts no program; another harness may.
    "runtime": {"type": "subprocess"},
}
"""Configuration of a seat (an agent of the environment), for the keys that the job does not set."""


def environment_of(job: dict[str, Any]) -> vf.Env:
    """Return the environment of a taskset, with `SEAT_DEFAULTS` for each of its seats."""
    configured = dict(job["environment"])
    configured["taskset"] = {"id": job["taskset"], **configured.get("taskset", {})}
    # The names of the seats follow from the taskset, so the configuration is resolved twice: to
    # learn them, and then with the configuration of each seat.
    for seat in agent_config_fields(resolve_env_config(configured)):
        configured[seat] = {**SEAT_DEFAULTS, **configured.get(seat, {})}
    return load_environment(resolve_env_config(configured))


async def result_of(environment: vf.Env, task: vf.Task, base_url: str) -> dict[str, Any]:
    """Play a rollout; return `{"reward": X}`, or `{"failed": TEXT}` if it failed."""
    # `base_url` contains the key already; the environment variable named here is deliberately not
    # set.
    client = vf.EvalClientConfig(base_url=base_url, api_key_var="MAGE_ASYNC_NO_KEY")
    context = vf.ModelContext(model="policy", client=client, sampling=vf.SamplingConfig())
    episode = await environment.run_episode(task, context)
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok:
        messages = "; ".join(f"{error.type}: {error.message}" for error in errors)
        return {"failed": messages or "the episode failed"}
    if len(episode.traces) != 1:
        return {
            "failed": f"the episode has {len(episode.traces)} agents, but only one can be trained: "
            "choose a taskset with one agent"
        }
    reward = float(episode.traces[0].reward)
    # JSON cannot represent NaN or infinity: the parent process would refuse the message, and end
    # this process with all its rollouts.
    if not math.isfinite(reward):
        return {"failed": f"the reward of the taskset is {reward}"}
    return {"reward": reward}


async def serve(environment: vf.Env, tasks: list[vf.Task], channel: socket.socket) -> None:
    """Run the rollouts that the parent process requests, until it ends."""
    running: dict[str, asyncio.Task[None]] = {}
    reader, writer = await asyncio.open_connection(sock=channel)

    async def run(key: str, task: int, base_url: str) -> None:
        try:
            result = await result_of(environment, tasks[task], base_url)
        except Exception as error:  # the border to foreign code
            result = {"failed": f"{type(error).__name__}: {error}"}
        writer.write(frame({"key": key, **result}))

    def forget(key: str, _: object) -> None:
        del running[key]

    async with environment.serving():
        writer.write(frame({"ready": True}))
        while (request := await next_request(reader)) is not None:
            if "cancel" in request:
                if (task := running.get(request["cancel"])) is not None:
                    task.cancel()
                continue
            key = request["run"]
            running[key] = asyncio.create_task(run(key, request["task"], request["base_url"]))
            running[key].add_done_callback(partial(forget, key))
        for task in running.values():
            task.cancel()


async def next_request(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """Return the parent process's next message; `None` if the parent has ended."""
    try:
        (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
        request: dict[str, Any] = json.loads(await reader.readexactly(length))
        return request
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def frame(message: dict[str, Any]) -> bytes:
    """Encode a message as a frame: length, then JSON."""
    body = json.dumps(message, allow_nan=False).encode()
    return LENGTH.pack(len(body)) + body


def main() -> None:
    """Load the taskset, then serve."""
    channel = socket.socket(fileno=int(os.environ.pop("MAGE_CHANNEL_FD")))
    channel.set_inheritable(False)
    job = json.loads(sys.argv[1])
    # The folders of `chat_harness.py` and of a user's own tasksets.
    sys.path += [str(Path(__file__).parent), os.getcwd()]
    reason = ""
    try:
        environment = environment_of(job)
        tasks = list(itertools.islice(environment.taskset, job["size"]))
        if len(tasks) < job["size"]:
            reason = f"{job['taskset']} has {len(tasks)} tasks: lower `size`"
    except Exception as error:  # the border to foreign code
        reason = f"{job['taskset']}: {type(error).__name__}: {error}"
    if reason:
        channel.sendall(frame({"refused": reason}))
    else:
        asyncio.run(serve(environment, tasks, channel))


if __name__ == "__main__":
    main()
