"""Heartbeats: a learner hears each second that a process lives, whatever the process does."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from mage_async.protocol.messages import Heartbeat
from mage_services.processes.process import ticks

T = TypeVar("T")
HEARTBEAT_S = 1.0


class Outlet(Protocol):
    """What heartbeats need of a channel to the learner."""

    async def send(self, message: Heartbeat) -> None:
        """Hand a message on. Cancellation while waiting leaves it unsent."""


async def beating(channel: Outlet, heartbeat: Callable[[], Heartbeat], work: Awaitable[T]) -> T:
    """Do some work and send a heartbeat each second meanwhile; returns what the work returned.

    Cancellation cancels the work; a thread that the work waits for ends unheard.
    """
    async with asyncio.TaskGroup() as tasks:
        beat = tasks.create_task(_beat(channel, heartbeat), name="heartbeat")
        done = await work
        beat.cancel()
    return done


async def _beat(channel: Outlet, heartbeat: Callable[[], Heartbeat]) -> None:
    """Send heartbeats. Cancellation ends them."""
    async for _ in ticks(HEARTBEAT_S):
        await channel.send(heartbeat())
