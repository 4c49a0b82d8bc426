"""Serve `mage view` over HTTP: pages by address, events for open pages, and static files.

A page is made in a thread, so that a slow disk delays only that page. An error of a run, of its
index, or of a file that is gone is shown as a page of one sentence.
"""

import asyncio
import errno
import hmac
import os
import secrets
import signal
import socket
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

from aiohttp import web
from markupsafe import Markup

from mage_async.errors import ConfigError, RunError
from mage_async.pages.templating import STYLE, Frame, fill, run_address
from mage_async.results.run_directory import find_runs
from mage_services.processes.child_process import ChildProcess, module_command
from mage_services.view import credit_process, index_process, run_pages, trial_pages
from mage_services.view.credit_process import CreditCache
from mage_services.view.page_request import PageRequest, base_of
from mage_services.view.play_pages import PlayPages, html_response
from mage_services.view.run_watcher import RunWatcher

# The server answers a request only if it is addressed to one of `OWN_NAMES`, does not come from
# another site, and has the token in its path. A page of another site cannot read the token.
# Even if it knew the token and rebound its host name to 127.0.0.1 or posted a form, the headers
# `Host` and `Origin`, which no script can change, would show where the request comes from.

OWN_NAMES = {"127.0.0.1", "localhost"}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src-elem 'self'; "
    "style-src-attr 'unsafe-inline'; img-src 'self'; connect-src 'self'; form-action 'self'; "
    "base-uri 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",  # with `no-referrer` our own forms would send `Origin: null`
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Headers of every response. They allow scripts and style sheets from static files only. Style
attributes are allowed: templates write widths and colours there, and every text of a run is
escaped.
"""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
T = TypeVar("T")


def refusal(request: web.Request, token: str) -> str:
    """Return why a request is refused; "" if it is accepted."""
    host = request.headers.get("Host", "")
    if host.rsplit(":", 1)[0] not in OWN_NAMES:
        return "This server answers on its own machine alone, as 127.0.0.1 or localhost."
    if request.headers.get("Origin", f"http://{host}") != f"http://{host}":
        return "This server answers its own pages alone, and this request comes from another site."
    if request.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
        return "Open the printed address by itself: links on other sites are refused."
    token_in_path = request.path.split("/", 2)[1]
    # Compared in constant time, so that response times reveal nothing about the token.
    if not hmac.compare_digest(token_in_path.encode(), token.encode()):
        return "Open the address that `mage view` printed, with its token."
    return ""


async def harden(_: web.Request, response: web.StreamResponse) -> None:
    """Add the security headers to a response, including those of errors."""
    response.headers.update(HEADERS)
    response.headers["Server"] = "mage"


HOST = "127.0.0.1"
NUM_THREADS = 4
"""Number of threads in which pages are made."""
KEEP_ALIVE_S = 15.0
"""Seconds after which an open page without changes receives a sign of life."""
PAGES: dict[str, Callable[[PageRequest], Markup]] = {
    "": run_pages.overview,
    "step/{step}": trial_pages.step,
    "group/{group}": trial_pages.group,
    "group/{group}/trial/{trial}/turn/{turn}": trial_pages.turn,
    "trials": trial_pages.trials,
    "evaluation": run_pages.evaluation,
    "memory": run_pages.memory,
    "processes": run_pages.processes,
    "config": run_pages.config,
}
"""Pages by address; the parts in braces are numbers."""
STATIC = Path(__file__).with_name("static")
"""Folder of the scripts and styles of the pages."""


class Server:
    """Handle the requests of `mage view`."""

    def __init__(self, watcher: RunWatcher, credits: CreditCache, token: str) -> None:
        self._watcher, self._credits, self._token = watcher, credits, token

    def application(self) -> web.Application:
        """Return the application with all its routes."""

        app = web.Application(middlewares=[self._guard])
        app.on_response_prepare.append(harden)
        base = f"/{self._token}/"
        app.router.add_get(base, self._runs)
        app.router.add_get(f"{base}events", self._events)
        app.router.add_get(f"{base}static/{{name}}", self._static)
        for path, make in PAGES.items():
            numbers = path.replace("}", ":[0-9]{1,15}}")
            app.router.add_get(f"{base}runs/{{run}}/{numbers}", partial(self._page, make))
        play = PlayPages(base, self._watcher)
        play.add_routes(app)
        app.on_shutdown.append(play.close)
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse requests of strangers, and turn errors into pages of one sentence."""
        if sentence := refusal(request, self._token):
            return web.Response(status=403, text=sentence)
        try:
            return await handler(request)
        except web.HTTPRedirection:
            raise
        except web.HTTPException as error:
            text = f"Nothing is at this address ({error.reason})."
            return _sentence(request, text, error.status)
        except (RunError, ConfigError) as error:
            return _sentence(request, str(error), 404)
        except sqlite3.Error as error:
            text = f"The index of this run cannot be read: {error}; delete index.sqlite."
            return _sentence(request, text, 410)
        except FileNotFoundError as error:
            return _sentence(request, f"{error.filename} is gone: the run was deleted.", 410)

    async def _in_thread(self, make: Callable[[], Markup]) -> web.Response:
        """Make a page in a thread."""
        loop = asyncio.get_running_loop()
        return html_response(await loop.run_in_executor(self._watcher.threads, make))

    async def _runs(self, request: web.Request) -> web.StreamResponse:
        """Answer with the list of all runs, or redirect to the only one."""
        runs = self._watcher.runs
        # A run in the folder "/" has the name "", which is no address, so it is listed.
        if len(runs) == 1 and (name := next(iter(runs))):
            raise web.HTTPFound(run_address(name))
        frame = Frame(base_of(request), "all runs", change=self._watcher.changes[""])
        return await self._in_thread(partial(run_pages.all_runs, runs, frame))

    async def _page(
        self, make: Callable[[PageRequest], Markup], request: web.Request
    ) -> web.Response:
        """Answer with a page of a run, which `make` makes."""
        name = request.match_info["run"]
        self._watcher.open(name)
        numbers = {key: int(text) for key, text in request.match_info.items() if key != "run"}
        fault = self._watcher.faults.get(name, "")
        # The number of the last change is taken before the page reads anything. A change that comes
        # meanwhile has a larger number, and the page loads again.
        change, runs = self._watcher.changes[name], self._watcher.runs
        page_request = PageRequest(
            base_of(request), runs, name, numbers, request.query, self._credits, fault, change
        )
        return await self._in_thread(partial(make, page_request))

    async def _static(self, request: web.Request) -> web.StreamResponse:
        """Answer with a static file, or the style sheet."""
        name = request.match_info["name"]
        file = STYLE if name == "style.css" else STATIC / name
        if file.parent not in (STYLE.parent, STATIC) or not file.is_file():
            raise web.HTTPNotFound
        return web.FileResponse(file)

    async def _events(self, request: web.Request) -> web.StreamResponse:
        """Send an event whenever the open page may have changed (server-sent events).

        The query `after` is the number of the last change that the page shows. If it is not the
        newest one, a change came between the making of the page and this request, and an event is
        sent at once.
        """
        run = request.query.get("run", "")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        queue: asyncio.Queue[str] = asyncio.Queue()
        self._watcher.listeners[queue] = run
        if request.query.get("after", latest := str(self._watcher.changes[run])) != latest:
            queue.put_nowait(run)
        try:
            await response.write(b": here\n\n")
            while True:
                try:
                    async with asyncio.timeout(KEEP_ALIVE_S):
                        await queue.get()
                    await response.write(b"data: changed\n\n")
                except TimeoutError:
                    await response.write(b": alive\n\n")
        except ConnectionResetError:
            return response
        finally:
            del self._watcher.listeners[queue]


def _sentence(request: web.Request, text: str, status: int) -> web.Response:
    """Return a page of one sentence."""
    frame = Frame(base_of(request), "cannot be shown")
    return html_response(fill("sentence.html", frame=frame, sentence=text), status)


def bound_socket(port: int) -> socket.socket:
    """Return a socket that listens on a port of this machine only.

    Raises:
        RunError: the port is in use, or this user may not use it.
    """
    try:
        return socket.create_server((HOST, port))
    except OSError as error:
        number = error.errno or 0
        is_taken = number == errno.EADDRINUSE
        # `str(error)` would repeat the address, so only the text of its number is used.
        why = "is in use" if is_taken else f"cannot be used: {os.strerror(number)}"
        text = f"port {port} of {HOST} {why}; choose another with --port, or leave --port out"
        raise RunError(text) from error


async def serve(root: Path, port: int, announce: Callable[[str], None]) -> None:
    """Serve the runs below `root` until SIGINT or SIGTERM.

    Args:
        announce: Called with the address once the server accepts requests.

    Raises:
        RunError: there is no such folder, the port is in use, or a child process failed, which is
            raised in an `ExceptionGroup`.
    """
    runs = find_runs(root)
    token, done = secrets.token_urlsafe(16), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, done.set)
    async with AsyncExitStack() as running:
        bound = running.enter_context(bound_socket(port))
        threads = running.enter_context(ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="page"))
        # Two child processes, so that no page waits for their work: one reads the runs' files into
        # indexes, the other computes the returns and advantages ("credit") of a step's turns.
        indexing = await running.enter_async_context(
            _child(index_process.MODULE, index_process.Indexed)
        )
        crediting = await running.enter_async_context(
            _child(credit_process.MODULE, credit_process.StepCredit)
        )
        watcher = RunWatcher(root, threads, indexing, runs)
        credits = CreditCache(crediting, lambda run: watcher.notify(watcher.name_of(run)))
        runner = web.AppRunner(
            Server(watcher, credits, token).application(), access_log=None, shutdown_timeout=0.5
        )
        try:
            await runner.setup()
            await web.SockSite(runner, bound).start()
            watcher.watch()
            announce(f"http://{HOST}:{bound.getsockname()[1]}/{token}/")
            async with asyncio.TaskGroup() as tasks:
                listening = [
                    tasks.create_task(_indexed(watcher, credits)),
                    tasks.create_task(credits.listen()),
                ]
                await done.wait()
                for task in listening:
                    task.cancel()
        finally:
            await runner.cleanup()


@asynccontextmanager
async def _child(module: str, kind: type[T]) -> AsyncIterator[ChildProcess[T]]:
    """Start a child process that sends messages of a type; end it with the block."""
    process = await ChildProcess[T].start(module_command(module), kind)
    try:
        yield process
    finally:
        process.kill()
        await process.wait()


async def _indexed(watcher: RunWatcher, credits: CreditCache) -> None:
    """Notify the pages of each run whose index has grown."""
    async for message in watcher.indexer.messages(index_process.MODULE):
        if name := watcher.name_of(Path(message.run)):
            if message.fault:
                watcher.faults[name] = message.fault
            # Credit that could not be computed may have lacked trials that the index has now.
            credits.forget_faults(watcher.runs[name])
            watcher.notify(name)
