"""The OpenEnv package's own client; runs in the package's own environment.

    python openenv_client.py URL '{"reset": {"seed": 3}, "actions": [{"number": 7}, …]}'

Prints a list of [observation, reward, done], then the state, as JSON.
"""

import asyncio
import json
import sys

from openenv.core.generic_client import GenericEnvClient


async def play(url: str, reset: dict, actions: list[dict]) -> dict:
    async with GenericEnvClient(base_url=url) as client:
        seen = [await client.reset(**reset)]
        for action in actions:
            if seen[-1].done:
                break
            seen.append(await client.step(action))
        state = await client.state()
    return {"seen": [[each.observation, each.reward, each.done] for each in seen], "state": state}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(play(sys.argv[1], **json.loads(sys.argv[2])))))
