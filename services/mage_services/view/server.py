"""The server of `mage view`: pages by address, events for open pages, our own files.

Every page is made in a thread, so that a slow disk delays none but its own page. What cannot be
shown is a page of one sentence.
"""

import asyncio
import errno
import signal
import socket
import sqlite3
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web
from markupsafe import Markup

from mage_async.errors import ConfigError, RunError
from mage_async.pages.frame import Frame
from mage_async.pages.run_lists import runs_page
from mage_async.pages.templating import fill
from mage_async.report.templating import STYLE
from mage_services.processes.line_process import LineProcess
from mage_services.view.asked import Asked
from mage_services.view.credit_process import Credits
from mage_services.view.found_runs import found_runs, listed_run
from mage_services.view.live import Live
from mage_services.view.play_pages import PlayPages
from mage_services.view.run_pages import PAGES
from mage_services.view.security import Handler, harden, new_token, refusal

HOST = "127.0.0.1"
NUM_THREADS = 4
KEEP_ALIVE_S = 15.0
STATIC = Path(__file__).with_name("static")


class Server:
    """Answers requests; one a process."""

    def __init__(self, live: Live, credits: Credits, token: str) -> None:
        self._live, self._credits, self._token = live, credits, token
        self._base = f"/{token}/"

    def application(self) -> web.Application:
        """The routes."""

        @web.middleware
        async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
            return await self._guard(request, handler)

        app = web.Application(middlewares=[guard])
        app.on_response_prepare.append(harden)
        base = self._base
        app.router.add_get(base, self._runs)
        app.router.add_get(f"{base}events", self._events)
        app.router.add_get(f"{base}static/{{name}}", self._static)
        for path, make in PAGES.items():
            numbers = path.replace("}", ":[0-9]{1,15}}")
            app.router.add_get(f"{base}runs/{{run}}/{numbers}", partial(self._page, make))
        play = PlayPages(base, self._live)
        play.add_routes(app)
        app.on_shutdown.append(play.close)
        return app

    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse strangers, and say in a sentence what cannot be shown."""
        if sentence := refusal(request, self._token):
            return web.Response(status=403, text=sentence)
        try:
            return await handler(request)
        except web.HTTPRedirection:
            raise
        except web.HTTPException as error:
            return self._sentence(f"Nothing is at this address ({error.reason}).", error.status)
        except (RunError, ConfigError) as error:
            return self._sentence(str(error), 404)
        except KeyError as error:
            return self._sentence(
                f"A file of this run lacks {error}: it is damaged, or another version wrote it.",
                404,
            )
        except sqlite3.Error as error:
            why = f"The index of this run cannot be read: {error}"
            return self._sentence(f"{why}; delete index.sqlite.", 410)
        except FileNotFoundError as error:
            return self._sentence(f"{error.filename} is gone: the run was deleted.", 410)

    def _sentence(self, text: str, status: int) -> web.Response:
        frame = Frame(self._base, "cannot be shown")
        return _html(fill("sentence.html", frame=frame, sentence=text), status)

    async def _in_thread(self, make: Callable[[], Markup]) -> web.Response:
        loop = asyncio.get_running_loop()
        return _html(await loop.run_in_executor(self._live.threads, make))

    async def _runs(self, _: web.Request) -> web.StreamResponse:
        runs = self._live.runs
        if len(runs) == 1 and (name := next(iter(runs))):
            raise web.HTTPFound(f"{self._base}{Frame('', '', name).home}")
        return await self._in_thread(self._list)

    def _list(self) -> Markup:
        listed = [listed_run(name, run) for name, run in self._live.runs.items()]
        listed.sort(key=lambda run: -run.changed)
        return runs_page(Frame(self._base, "all runs"), listed)

    async def _page(self, make: Callable[[Asked], Markup], request: web.Request) -> web.Response:
        name = request.match_info["run"]
        if name not in self._live.runs:
            raise RunError(f"there is no run {name!r} below {self._live.root} any more")
        self._live.open(name)
        numbers = {key: int(text) for key, text in request.match_info.items() if key != "run"}
        fault = self._live.faults.get(name, "")
        asked = Asked(
            self._base, self._live.runs, name, numbers, request.query, self._credits, fault
        )
        return await self._in_thread(partial(make, asked))

    async def _static(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        file = STYLE if name == "style.css" else STATIC / name
        if file.parent not in (STYLE.parent, STATIC) or not file.is_file():
            raise web.HTTPNotFound
        return web.FileResponse(file)

    async def _events(self, request: web.Request) -> web.StreamResponse:
        """Server-sent events: a line whenever the page of a run may have changed."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        queue: asyncio.Queue[str] = asyncio.Queue()
        self._live.listeners[queue] = request.query.get("run", "")
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
            del self._live.listeners[queue]


def _html(page: Markup, status: int = 200) -> web.Response:
    return web.Response(text=str(page), content_type="text/html", charset="utf-8", status=status)


def listening(port: int) -> socket.socket:
    """A socket of this machine alone.

    Raises:
        RunError: the port is in use, or not ours to use.
    """
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((HOST, port))
    except OSError as error:
        made.close()
        why = (
            "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used: {error.strerror}"
        )
        raise RunError(
            f"port {port} of {HOST} {why}; choose another with --port, or none"
        ) from error
    return made


async def serve(root: Path, port: int, told: Callable[[str], None]) -> None:
    """Serve the runs below `root` until SIGINT or SIGTERM; `told` hears the address.

    Raises:
        RunError: there is no such folder, the port is in use, or a process of ours ended badly.
    """
    runs, made = found_runs(root), listening(port)
    token, done = new_token(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, done.set)
    indexer = await LineProcess.start("mage_services.view.index.indexer")
    crediting = await LineProcess.start("mage_services.view.credit_process")
    with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="page") as threads:
        live = Live(root, threads, indexer, runs)
        credits = Credits(crediting, lambda run: live.tell(live.name_of(run)))
        runner = web.AppRunner(
            Server(live, credits, token).application(), access_log=None, shutdown_timeout=0.5
        )
        try:
            await runner.setup()
            await web.SockSite(runner, made).start()
            live.follow()
            told(f"http://{HOST}:{made.getsockname()[1]}/{token}/")
            await _until(done, _indexed(live, indexer, credits), credits.listen())
        finally:
            await runner.cleanup()
            for process in (indexer, crediting):
                process.kill()


async def _until(done: asyncio.Event, *listening: Coroutine[Any, Any, None]) -> None:
    """Listen to processes until all is done."""
    async with asyncio.TaskGroup() as tasks:
        listeners = [tasks.create_task(each) for each in listening]
        await done.wait()
        for listener in listeners:
            listener.cancel()


async def _indexed(live: Live, indexer: LineProcess, credits: Credits) -> None:
    """Tell open pages what has been read."""
    async for said in indexer.messages():
        if name := live.name_of(Path(said["run"])):
            if said["fault"]:
                live.faults[name] = said["fault"]
            credits.forget_faults(live.runs[name])
            live.tell(name)
