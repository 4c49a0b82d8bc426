"""Programs that go wrong in different ways, and the reason that each of their trials must have."""

import asyncio
from collections.abc import Awaitable, Callable

from tests.helpers.agent_site import asked, post, said

DEADLINE_S = 4.0
"""Of an episode."""
KEYS: dict[int, tuple[str, str]] = {}
"""Address and key of each task's program; the tests fill it."""


async def crash(task: int, url: str, key: str) -> float:
    await asked(url, said("a"))
    raise ValueError("no more")


async def hang(task: int, url: str, key: str) -> float:
    await asked(url, said("a"))
    await asyncio.Event().wait()
    return 1.0


async def exit_(task: int, url: str, key: str) -> float:
    raise SystemExit(3)


async def flood(task: int, url: str, key: str) -> float:
    await asyncio.gather(*(asked(url, said(str(n))) for n in range(100)), return_exceptions=True)
    return 1.0


async def endless(task: int, url: str, key: str) -> float:
    while True:
        await asked(url, said("a"))


async def silent(task: int, url: str, key: str) -> float:
    return 1.0


async def wordless(task: int, url: str, key: str) -> float:
    await asked(url, said("a"))
    return "much"  # type: ignore[return-value]


async def another(task: int, url: str, key: str) -> float:
    await asyncio.sleep(0.3)  # until the other program has begun
    _, their_key = KEYS[task + 1]
    status, answer = await post(url, "chat/completions", {"messages": said("a")}, their_key)
    raise ValueError(f"{status} {answer['error']['message']}")


Program = Callable[[int, str, str], Awaitable[float]]
"""Task, address and key to the reward."""
FAULTS: dict[str, tuple[Program, str]] = {
    "crash": (crash, "run() raised ValueError: no more"),
    "hang": (hang, "run() took longer than environment.step_deadline_s = 4"),
    "exit": (exit_, "run() raised SystemExit: 3"),
    "flood": (flood, "calls"),
    "endless": (endless, "made more than 64 calls in an episode: raise environment.options.turns"),
    "silent": (silent, "returned without a call of the policy"),
    "no reward": (wordless, "must return a finite reward, got 'much'"),
    "another's key": (another, "403 `base_url` and `api_key` are those of different episodes"),
}
