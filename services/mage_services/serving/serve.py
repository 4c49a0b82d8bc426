"""Serving over HTTP until told to end, whatever the protocol."""

import asyncio
import signal
from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import web

from mage_async.errors import RunError
from mage_services.environments.workers import Workers


@dataclass(frozen=True, slots=True)
class Limits:
    """What a server holds at most."""

    sessions: int
    idle_s: float
    """A session without a request for so long is closed."""


def refuse_other_sites(request: web.Request) -> None:
    """A page of another site, open in a browser of this machine, may not play.

    Raises:
        web.HTTPForbidden: the request is of one.
    """
    if request.headers.get("Origin", "").rpartition("//")[2] not in ("", request.host):
        raise web.HTTPForbidden(text="pages of other sites may not open a session here")


async def serve(
    application: web.Application,
    host: str,
    port: int,
    workers: Workers,
    say: Callable[[str], None],
) -> None:
    """Serve until SIGINT or SIGTERM.

    Args:
        port: 0 takes one that is free.
        workers: make the calls of a slow environment; closed at the end.
        say: is given the address, once it is served.

    Raises:
        RunError: the address cannot be listened on.
    """
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    async with workers:
        runner = web.AppRunner(application)
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            raise RunError(f"{host}:{port} cannot be listened on: {error.strerror}") from error
        try:
            say(f"http://{host}:{runner.addresses[0][1]}")
            await ended.wait()
        finally:
            await runner.cleanup()
