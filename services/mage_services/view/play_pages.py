"""Serve pages on which a person plays a trial in the agent's place, or watches the agent play one.

Each trial is played by a process of its own, with an engine of its own. The web server sends it a
`PlayRequest`, and then an `Answer` to each of its `Choices`. The process sends texts to show, and
at the end a `TrialEnd` or a `Fault`. `PlayPages` runs in the server, `main` and all after it in the
process.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import uvloop
from aiohttp import web
from markupsafe import Markup

from mage_async.errors import MageError, RunError
from mage_async.pages.templating import Frame, fill, run_address
from mage_async.pages.turns import shown_trial
from mage_async.results.run_directory import RunDirectory
from mage_async.trials.human_play import HumanPrompt, shown
from mage_services.processes.child_process import (
    BlockingChannel,
    ChildProcess,
    channel_to_parent,
    module_command,
)
from mage_services.processes.process import first_failure
from mage_services.view.page_request import base_of, whole_number
from mage_services.view.run_watcher import RunWatcher

MODULE = "mage_services.view.play_pages"
"""This module, which the process runs."""
MAX_BUTTONS = 24
"""Number of legal actions up to which each has a button; with more of them, the person types."""
MAX_GAMES = 3
"""Largest number of trials that are played at a time, because each has an engine. If another one
begins, the oldest is ended.
"""
MAX_CHARACTERS = 2000
"""Number of characters to which an action is cut."""


class PlayRequest(msgspec.Struct, frozen=True, tag=True):
    """Request that the process plays a trial."""

    run: str
    """The run's directory."""
    member: str
    """Name of the task's hidden variant, such as an opponent; "" for any held-out one."""
    seed: int | None
    has_person: bool
    """Whether a person plays before the agent."""


class Answer(msgspec.Struct, frozen=True, tag=True):
    """Carry the person's action."""

    text: str


class Text(msgspec.Struct, frozen=True, tag=True):
    """Carry a text for the person."""

    text: str


class Choices(msgspec.Struct, frozen=True, tag=True):
    """Request an action of the person."""

    choices: tuple[str, ...]
    """Legal actions; empty if any text is legal."""
    in_words: str
    """The legal actions as one line of text."""


class TrialEnd(msgspec.Struct, frozen=True, tag=True):
    """Carry the agent's trial, and the person's rewards."""

    trial: dict[str, Any]
    """The agent's trial, a `ShownTrial` as plain data."""
    member: str
    """Name of the task's hidden variant, which the page may show now."""
    version: int
    """Version of the agent's policy."""
    rewards: list[float]
    """The person's reward of each episode."""


class Fault(msgspec.Struct, frozen=True, tag=True):
    """Carry the reason that the trial cannot be played."""

    reason: str


FromServer = PlayRequest | Answer
FromPlayer = Text | Choices | TrialEnd | Fault
Server = BlockingChannel[FromServer]
"""The channel to the server."""


class Line(NamedTuple):
    """Hold a text of the environment, or an action of the person."""

    text: str
    is_answer: bool = False
    """Whether it is the person's."""


@dataclass(slots=True)
class Game:
    """Hold a trial as far as it has been played, and the process that plays it."""

    run: str
    """Name of the run."""
    process: ChildProcess[FromPlayer]
    has_person: bool
    """Whether the person plays first; if not, only the agent plays."""
    lines: list[Line] = field(default_factory=list)
    choices: Choices | None = None
    """The request for an action while it is the person's turn."""
    end: TrialEnd | None = None
    """The agent's trial and the person's rewards, once both have played."""
    fault: str = ""
    """Why the trial cannot be played on; "" if it can."""
    is_over: bool = False
    listening: asyncio.Task[None] | None = None
    """Receives the messages of the process."""

    @property
    def buttons(self) -> Sequence[str]:
        """Actions to click."""
        choices = self.choices.choices if self.choices else ()
        return choices if len(choices) <= MAX_BUTTONS else ()

    def add(self, message: FromPlayer) -> None:
        """Add a message of the process."""
        match message:
            case Text(text):
                self.lines.append(Line(text))
            case Choices():
                self.choices = message
            case TrialEnd():
                self.end = message
            case Fault(reason):
                self.fault = reason


@dataclass(slots=True)
class PlayPages:
    """Start and hold the games of one server, trials that are played on its pages, and handle the
    requests of these pages.
    """

    base: str
    """Beginning of the path of every request, with the token."""
    watcher: RunWatcher
    _games: dict[int, Game] = field(default_factory=dict)
    """Games by number, oldest first."""
    _numbers: "count[int]" = field(default_factory=lambda: count(1))
    """Numbers of further games."""

    def add_routes(self, app: web.Application) -> None:
        """Add the addresses at which trials are begun and played."""
        home = f"{self.base}runs/{{run}}/play"
        app.router.add_get(home, self._offer)
        app.router.add_post(home, self._begin_game)
        app.router.add_get(f"{home}/{{number:[0-9]{{1,9}}}}", self._show)
        app.router.add_post(f"{home}/{{number:[0-9]{{1,9}}}}", self._answer)

    async def close(self, _: web.Application) -> None:
        """End all games. Cancellation leaves their processes, which end with this one."""
        for game in self._games.values():
            game.process.kill()
        await asyncio.gather(*(each.listening for each in self._games.values() if each.listening))

    async def _offer(self, request: web.Request) -> web.Response:
        """Answer with the page on which a game is begun, and which lists the run's games."""
        name = self._run_name(request)
        games = [(number, game) for number, game in self._games.items() if game.run == name]
        frame = self._frame(request, name, "play")
        return html_response(fill("play.html", frame=frame, games=games))

    async def _begin_game(self, request: web.Request) -> web.Response:
        """Start the process of a game, and redirect to its page."""
        name, given = self._run_name(request), await request.post()
        run = str(self.watcher.run(name).root.resolve())
        # "sit" is the name of the button with which a person takes the agent's place.
        text, has_person = _text(given, "seed"), "sit" in given
        seed = whole_number(text, "a seed") if text else None
        while len(self._games) >= MAX_GAMES:
            self._games.pop(next(iter(self._games))).process.kill()
        command = module_command(MODULE)
        process = await ChildProcess[FromPlayer].start(command, FromPlayer)
        process.send(PlayRequest(run, _text(given, "member"), seed, has_person))
        number = next(self._numbers)
        game = self._games[number] = Game(name, process, has_person)
        game.listening = asyncio.create_task(self._listen(game), name=f"play {number}")
        raise web.HTTPSeeOther(f"{base_of(request)}{run_address(name)}play/{number}")

    async def _listen(self, game: Game) -> None:
        """Handle the process's messages until it ends. Cancellation leaves the process as it is."""
        try:
            async for message in game.process.messages(MODULE):
                game.add(message)
                self.watcher.notify(game.run)
        except RunError as error:
            game.fault = f"the trial was ended: {error}"
        game.is_over = True
        self.watcher.notify(game.run)

    async def _show(self, request: web.Request) -> web.Response:
        """Answer with the page of a game."""
        name, number, game = self._requested_game(request)
        play = f"{run_address(name)}play"
        frame = self._frame(request, name, f"trial {number}", [("play", play)])
        address = f"{play}/{number}"  # receives the answers
        return html_response(fill("played.html", frame=frame, played=game, address=address))

    async def _answer(self, request: web.Request) -> web.Response:
        """Pass the person's action to the game's process, and redirect to the game's page."""
        name, number, game = self._requested_game(request)
        given = await request.post()
        answer = _text(given, "typed") or _text(given, "answer")
        if game.choices is not None and answer:
            game.lines.append(Line(answer, is_answer=True))
            game.choices = None
            game.process.send(Answer(answer))
        raise web.HTTPSeeOther(f"{base_of(request)}{run_address(name)}play/{number}")

    def _run_name(self, request: web.Request) -> str:
        """Return the name of the run in an address; raise a `RunError` if it is gone."""
        name = request.match_info["run"]
        self.watcher.run(name)
        return name

    def _requested_game(self, request: web.Request) -> tuple[str, int, Game]:
        """Return the run's name, the game's number and the game in an address."""
        name, number = self._run_name(request), int(request.match_info["number"])
        if number not in self._games or self._games[number].run != name:
            raise RunError(f"there is no trial {number} any more: begin another one")
        return name, number, self._games[number]

    def _frame(
        self,
        request: web.Request,
        name: str,
        title: str,
        above: Sequence[tuple[str, str]] = (),
    ) -> Frame:
        """Return the frame of a page."""
        crumbs = [(name, run_address(name)), *above]
        change = self.watcher.changes[name]
        return Frame(base_of(request), title, name, "play", crumbs, change=change)


def _text(given: Mapping[str, object], name: str) -> str:
    """Return a field of a form as text, at most `MAX_CHARACTERS` long; "" if it is missing."""
    value = given.get(name, "")
    return value.strip()[:MAX_CHARACTERS] if isinstance(value, str) else ""


def html_response(page: Markup, status: int = 200) -> web.Response:
    """Return the response with a page."""
    return web.Response(text=str(page), content_type="text/html", charset="utf-8", status=status)


def main() -> None:
    """Play one trial, first by the person and then by the agent."""
    server = channel_to_parent(FromServer)
    request = server.receive()
    if not isinstance(request, PlayRequest):  # the server has ended
        return
    try:
        _play(server, request)
    except* MageError as group:
        server.send(Fault(str(first_failure(group))))


def _play(server: Server, request: PlayRequest) -> None:
    """Play the requested trial, and send `TrialEnd` to the server."""
    # Imported here because they import torch, which the server does not need.
    from mage_services.actor.play_session import play_person_and_agent, prepare
    from mage_services.weights.weight_store import WeightFiles

    run = RunDirectory(Path(request.run))
    session = prepare(run, request.member or None, request.seed, episodes=None)

    def ask(prompt: HumanPrompt) -> str:
        """Request an action of the person, and wait for it."""
        server.send(Choices(tuple(prompt.choices), shown(prompt.choices)))
        answer = server.receive()
        if not isinstance(answer, Answer):  # the server has ended
            raise SystemExit
        return answer.text

    rewards, trial = uvloop.run(
        play_person_and_agent(
            session.make,
            session.task,
            WeightFiles(run.weights),
            ask if request.has_person else None,
            lambda text: server.send(Text(text)),
        )
    )
    played = asdict(shown_trial(trial, session.chat.decode, None))  # no credit: no step trains it
    server.send(TrialEnd(played, session.task.member, session.version, rewards))


if __name__ == "__main__":
    main()
