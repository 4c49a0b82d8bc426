"""Playing in a page: the trials that are being played, and the pages that show them."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count

from aiohttp import web
from markupsafe import Markup

from mage_async.errors import RunError
from mage_async.pages.frame import Frame, Link
from mage_async.pages.play_page import Line, Played, begin_page, played_page
from mage_services.processes.line_process import LineProcess, Message
from mage_services.view.live import Live

MOST_PLAYED = 3
"""Trials at once; each has an engine. A further one ends the oldest."""
MOST_CHARS = 2000


@dataclass(slots=True)
class Game:
    """A trial that a person plays or watches, and the process it is played in."""

    run: str
    process: LineProcess
    played: Played
    task: asyncio.Task[None] | None = None


@dataclass(slots=True)
class PlayPages:
    """Of one server."""

    base: str
    live: Live
    _games: dict[int, Game] = field(default_factory=dict)
    _numbers: "count[int]" = field(default_factory=lambda: count(1))

    def add_routes(self, app: web.Application) -> None:
        """Where trials are begun and played."""
        home = f"{self.base}runs/{{run}}/play"
        app.router.add_get(home, self._offer)
        app.router.add_post(home, self._begin)
        app.router.add_get(f"{home}/{{number:[0-9]{{1,9}}}}", self._show)
        app.router.add_post(f"{home}/{{number:[0-9]{{1,9}}}}", self._answer)

    async def close(self, _: web.Application) -> None:
        """End all that is played. Cancellation leaves what then ends with this process."""
        for game in self._games.values():
            game.process.kill()

    async def _offer(self, request: web.Request) -> web.Response:
        name = self._run(request)
        games = [(number, game.played) for number, game in self._games.items() if game.run == name]
        return _html(begin_page(self._frame(name, "play"), games))

    async def _begin(self, request: web.Request) -> web.Response:
        """Start the process, and lead to the page of the trial."""
        name, given = self._run(request), await request.post()
        asked = {"member": _text(given, "member"), "seed": _seed(given), "sits": "sit" in given}
        while len(self._games) >= MOST_PLAYED:
            self._games.pop(next(iter(self._games))).process.kill()
        process = await LineProcess.start(
            "mage_services.view.player", str(self.live.runs[name].root), json.dumps(asked)
        )
        number, game = next(self._numbers), Game(name, process, Played(bool(asked["sits"])))
        self._games[number] = game
        game.task = asyncio.create_task(self._listen(game), name=f"play {number}")
        raise web.HTTPSeeOther(f"{self._frame(name, '').home_path}play/{number}")

    async def _listen(self, game: Game) -> None:
        """Take what the process says until it ends. Cancellation leaves the process as it is."""
        try:
            async for message in game.process.messages():
                _take(game.played, message)
                self.live.tell(game.run)
        except RunError as error:
            game.played.fault = f"the trial was ended: {error}"
        game.played.is_over = True
        self.live.tell(game.run)

    async def _show(self, request: web.Request) -> web.Response:
        name, number, game = self._game(request)
        home = self._frame(name, "").home
        frame = self._frame(name, f"trial {number}", [Link("play", f"{home}play")])
        return _html(played_page(frame, game.played, f"{home}play/{number}"))

    async def _answer(self, request: web.Request) -> web.Response:
        name, number, game = self._game(request)
        given = await request.post()
        answer = _text(given, "typed") or _text(given, "answer")
        if game.played.choices is not None and answer:
            game.played.lines.append(Line(answer, is_answer=True))
            game.played.choices = None
            game.process.say({"answer": answer})
        raise web.HTTPSeeOther(f"{self._frame(name, '').home_path}play/{number}")

    def _run(self, request: web.Request) -> str:
        name = request.match_info["run"]
        if name not in self.live.runs:
            raise RunError(f"there is no run {name!r} below {self.live.root} any more")
        return name

    def _game(self, request: web.Request) -> tuple[str, int, Game]:
        name, number = self._run(request), int(request.match_info["number"])
        if number not in self._games or self._games[number].run != name:
            raise RunError(f"trial {number} is over and forgotten: begin another one")
        return name, number, self._games[number]

    def _frame(self, name: str, title: str, above: list[Link] | None = None) -> Frame:
        crumbs = [Link(name, Frame("", "", name).home), *(above or [])]
        return Frame(self.base, title, name, "play", crumbs)


def _take(played: Played, message: Message) -> None:
    """Book what a process says."""
    if "told" in message:
        played.lines.append(Line(message["told"]))
    elif "choices" in message:
        played.choices, played.may = message["choices"], message["may"]
    elif "trial" in message:
        played.trial, played.member = message["trial"], message["member"]
        played.version, played.rewards = message["version"], message["rewards"]
    else:
        played.fault = message["fault"]


def _text(given: Mapping[str, object], name: str) -> str:
    value = given.get(name, "")
    return value.strip()[:MOST_CHARS] if isinstance(value, str) else ""


def _seed(given: Mapping[str, object]) -> int | None:
    text = _text(given, "seed")
    if text and not (text.isascii() and text.isdecimal() and len(text) < 16):
        raise RunError(f"a seed is a whole number of at most 15 digits, got {text[:40]!r}")
    return int(text) if text else None


def _html(page: Markup) -> web.Response:
    return web.Response(text=str(page), content_type="text/html", charset="utf-8")
