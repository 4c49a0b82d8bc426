"""HTTP serving until a signal, independent of the protocol."""

import asyncio
import signal
from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import web

from mage_async.errors import RunError
from mage_services.environments.call_runner import CallRunner


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a server."""

    sessions: int
    """Largest number of open sessions."""
    idle_s: float
    """Seconds without a request after which a session is closed."""


def refuse_other_sites(request: web.Request) -> None:
    """Refuse requests of web pages of other sites, which a browser of this machine may have open.

    Raises:
        web.HTTPForbidden: the request comes from another site.
    """
    if request.headers.get("Origin", "").rpartition("//")[2] not in ("", request.host):
        raise web.HTTPForbidden(text="pages of other sites may not open a session here")


async def serve(
    application: web.Application,
    host: str,
    port: int,
    calls: CallRunner,
    say: Callable[[str], None],
) -> None:
    """Serve until SIGINT or SIGTERM.

    Args:
        port: 0 takes a free port.
        calls: make the calls of a slow environment; closed at the end.
        say: receives the address once it is served.

    Raises:
        RunError: the address cannot be bound.
    """
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    async with calls:
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
