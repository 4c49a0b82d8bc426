"""Pages on which a person plays a trial in the agent's place, or watches the agent play one.

Each trial is played by a process of its own (`player.py`).
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from aiohttp import web
from markupsafe import Markup

from mage_async.errors import RunError
from mage_async.pages.templating import Frame, fill, run_address
from mage_services.processes.child_process import ChildProcess, module_command
from mage_services.view.player import (
    MODULE,
    Answer,
    Choices,
    Fault,
    FromPlayer,
    PlayRequest,
    Text,
    TrialEnd,
)
from mage_services.view.run_watcher import RunWatcher

MAX_BUTTONS = 24
"""Legal actions that have buttons; with more of them, the person types."""


@dataclass(frozen=True, slots=True)
class Line:
    """A text from the environment, or an answer of the person."""

    text: str
    is_answer: bool = False


@dataclass(slots=True)
class Played:
    """A trial as far as it has come."""

    sits: bool
    """Whether the person plays first; otherwise only the agent plays."""
    lines: list[Line] = field(default_factory=list)
    choices: Sequence[str] | None = None
    """Legal actions in the person's turn, empty if any text is legal; `None` otherwise."""
    may: str = ""
    """The choices in one line."""
    trial: Mapping[str, Any] | None = None
    """The agent's trial, a `ShownTrial` as plain data."""
    member: str = ""
    """The hidden member; known at the end."""
    version: int = 0
    rewards: Sequence[float] = ()
    """The person's reward of each episode."""
    fault: str = ""
    is_over: bool = False

    @property
    def buttons(self) -> Sequence[str]:
        """Actions to click."""
        choices = self.choices or ()
        return choices if len(choices) <= MAX_BUTTONS else ()


MAX_GAMES = 3
"""Trials at a time, since each has an engine; a further one ends the oldest."""
MAX_CHARACTERS = 2000
"""Characters of an answer."""


@dataclass(slots=True)
class Game:
    """A trial, and the process that plays it."""

    run: str
    process: ChildProcess[FromPlayer]
    played: Played
    task: asyncio.Task[None] | None = None


@dataclass(slots=True)
class PlayPages:
    """The games of one server, and the handlers of their pages."""

    base: str
    watcher: RunWatcher
    _games: dict[int, Game] = field(default_factory=dict)
    _numbers: "count[int]" = field(default_factory=lambda: count(1))

    def add_routes(self, app: web.Application) -> None:
        """Add the addresses at which trials are begun and played."""
        home = f"{self.base}runs/{{run}}/play"
        app.router.add_get(home, self._offer)
        app.router.add_post(home, self._begin)
        app.router.add_get(f"{home}/{{number:[0-9]{{1,9}}}}", self._show)
        app.router.add_post(f"{home}/{{number:[0-9]{{1,9}}}}", self._answer)

    async def close(self, _: web.Application) -> None:
        """End all games. Cancellation leaves their processes, which end with this one."""
        for game in self._games.values():
            game.process.kill()
        await asyncio.gather(*(game.task for game in self._games.values() if game.task))

    async def _offer(self, request: web.Request) -> web.Response:
        name = self._run(request)
        games = [(number, game.played) for number, game in self._games.items() if game.run == name]
        return html_response(fill("play.html", frame=self._frame(name, "play"), games=games))

    async def _begin(self, request: web.Request) -> web.Response:
        """Start the process of a game, and redirect to its page."""
        name, given = self._run(request), await request.post()
        run = str(self.watcher.runs[name].root.resolve())
        play = PlayRequest(run, _text(given, "member"), _seed(given), "sit" in given)
        while len(self._games) >= MAX_GAMES:
            self._games.pop(next(iter(self._games))).process.kill()
        process: ChildProcess[FromPlayer] = await ChildProcess.start(
            module_command(MODULE), FromPlayer
        )
        process.send(play)
        number, game = next(self._numbers), Game(name, process, Played(play.sits))
        self._games[number] = game
        game.task = asyncio.create_task(self._listen(game), name=f"play {number}")
        raise web.HTTPSeeOther(f"{self.base}{run_address(name)}play/{number}")

    async def _listen(self, game: Game) -> None:
        """Handle the process's messages until it ends. Cancellation leaves the process as it is."""
        try:
            async for message in game.process.messages(MODULE):
                _add_message(game.played, message)
                self.watcher.notify(game.run)
        except RunError as error:
            game.played.fault = f"the trial was ended: {error}"
        game.played.is_over = True
        self.watcher.notify(game.run)

    async def _show(self, request: web.Request) -> web.Response:
        name, number, game = self._game(request)
        play = f"{run_address(name)}play"
        frame = self._frame(name, f"trial {number}", [("play", play)])
        address = f"{play}/{number}"  # receives the answers
        return html_response(fill("played.html", frame=frame, played=game.played, address=address))

    async def _answer(self, request: web.Request) -> web.Response:
        name, number, game = self._game(request)
        given = await request.post()
        answer = _text(given, "typed") or _text(given, "answer")
        if game.played.choices is not None and answer:
            game.played.lines.append(Line(answer, is_answer=True))
            game.played.choices = None
            game.process.send(Answer(answer))
        raise web.HTTPSeeOther(f"{self.base}{run_address(name)}play/{number}")

    def _run(self, request: web.Request) -> str:
        name = request.match_info["run"]
        if name not in self.watcher.runs:
            raise RunError(f"there is no run {name!r} below {self.watcher.root} any more")
        return name

    def _game(self, request: web.Request) -> tuple[str, int, Game]:
        name, number = self._run(request), int(request.match_info["number"])
        if number not in self._games or self._games[number].run != name:
            raise RunError(f"trial {number} is over and forgotten: begin another one")
        return name, number, self._games[number]

    def _frame(self, name: str, title: str, above: Sequence[tuple[str, str]] = ()) -> Frame:
        crumbs = [(name, run_address(name)), *above]
        change = self.watcher.changes[name]
        return Frame(self.base, title, name, "play", crumbs, change=change)


def _add_message(played: Played, message: FromPlayer) -> None:
    match message:
        case Text():
            played.lines.append(Line(message.text))
        case Choices():
            played.choices, played.may = message.choices, message.in_words
        case TrialEnd():
            played.trial, played.member = message.trial, message.member
            played.version, played.rewards = message.version, message.rewards
        case Fault():
            played.fault = message.reason


def _text(given: Mapping[str, object], name: str) -> str:
    value = given.get(name, "")
    return value.strip()[:MAX_CHARACTERS] if isinstance(value, str) else ""


def _seed(given: Mapping[str, object]) -> int | None:
    text = _text(given, "seed")
    if text and not (text.isascii() and text.isdecimal() and len(text) < 16):
        raise RunError(f"a seed is a whole number of at most 15 digits, got {text[:40]!r}")
    return int(text) if text else None


def html_response(page: Markup, status: int = 200) -> web.Response:
    """Return the response with a page."""
    return web.Response(text=str(page), content_type="text/html", charset="utf-8", status=status)
