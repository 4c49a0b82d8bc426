"""Runs rollouts of a taskset for another process, which answers their requests.

    python worker.py '{"taskset": ID, "size": N, "environment": {…}}'

stdin, a line each     {"run": KEY, "task": INDEX, "base_url": URL}, {"cancel": KEY}
stdout, a line each    {"ready": true} or {"refused": TEXT}, then {"key": KEY, "reward": X} or
                       {"key": KEY, "failed": TEXT}

What tasksets print goes to stderr. The end of stdin ends the program.
"""

import asyncio
import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

HARNESS = "chat_harness"
SEAT = {"harness": {"id": HARNESS}, "runtime": {"type": "subprocess"}}


def environment_of(given: dict[str, Any]) -> vf.Env:
    """The environment of a taskset; seats that are not configured chat in this process."""
    wanted = dict(given["environment"])
    wanted["taskset"] = {"id": given["taskset"], **wanted.get("taskset", {})}
    seats = agent_config_fields(resolve_env_config(wanted))
    for seat in seats:
        wanted[seat] = {**SEAT, **wanted.get(seat, {})}
    return load_environment(resolve_env_config(wanted))


async def result_of(environment: vf.Env, task: vf.Task, base_url: str) -> dict[str, Any]:
    """How a rollout ended."""
    client = vf.EvalClientConfig(base_url=base_url, api_key_var="MAGE_ASYNC_NO_KEY")
    context = vf.ModelContext(model="policy", client=client, sampling=vf.SamplingConfig())
    episode = await environment.run_episode(task, context)
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok:
        said = "; ".join(f"{error.type}: {error.message}" for error in errors)
        return {"failed": said or "the episode failed"}
    if len(episode.traces) != 1:
        return {"failed": f"an episode of {len(episode.traces)} agents: one can be trained"}
    return {"reward": float(episode.traces[0].reward)}


async def serve(environment: vf.Env, tasks: list[vf.Task], out: Any) -> None:
    """Run what stdin asks for, until it ends."""
    running: dict[str, asyncio.Task[None]] = {}

    async def run(key: str, task: int, base_url: str) -> None:
        try:
            result = await result_of(environment, tasks[task], base_url)
        except Exception as error:  # the border to foreign code
            result = {"failed": f"{type(error).__name__}: {error}"}
        say(out, {"key": key, **result})

    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    async with environment.serving():
        say(out, {"ready": True})
        while line := await reader.readline():
            request = json.loads(line)
            if "cancel" in request:
                if (task := running.get(request["cancel"])) is not None:
                    task.cancel()
                continue
            key = request["run"]
            running[key] = asyncio.create_task(run(key, request["task"], request["base_url"]))
            running[key].add_done_callback(lambda _, key=key: running.pop(key))
        for task in running.values():
            task.cancel()


def say(out: Any, line: dict[str, Any]) -> None:
    """Write a line at once."""
    out.write(json.dumps(line) + "\n")
    out.flush()


def main() -> None:
    """Load the taskset, then serve."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    given = json.loads(sys.argv[1])
    sys.path += [str(Path(__file__).parent), os.getcwd()]  # the harness; tasksets of one's own
    try:
        environment = environment_of(given)
        tasks = list(itertools.islice(environment.taskset, given["size"]))
    except Exception as error:  # the border to foreign code
        say(out, {"refused": f"{given['taskset']}: {type(error).__name__}: {error}"})
        return
    if len(tasks) < given["size"]:
        say(out, {"refused": f"{given['taskset']} has {len(tasks)} tasks: lower `size`"})
        return
    asyncio.run(serve(environment, tasks, out))


if __name__ == "__main__":
    main()
