"""A remote actor plays for a running learner from anywhere: what `mage actor --connect` runs.

A remote actor sees no files of the run. It asks the learner what the run is, downloads the model's
files into a folder of its own, says hello, and from then on is an actor like any other, with one
difference: a file of weights that the learner names is downloaded first (`RemoteChannel`).

    task        waits for                  then
    actor       see `actor.py`             -
    patience    the clock                  ends the actor where there has been no learner for long

Ctrl-C says goodbye: the actor's groups are granted to others at once. After a broken link, or while
a learner starts anew, the actor waits and keeps what it has downloaded and played.
"""

import argparse
import asyncio
import signal
from pathlib import Path

import msgspec

from mage_async.assembly import check
from mage_async.config import config_file
from mage_async.config.schema import Config, digest
from mage_async.errors import PeerRefused, RunError
from mage_async.protocol.messages import (
    Chunk,
    Enquiry,
    Hello,
    Message,
    NoFile,
    Prospectus,
    Publication,
    Welcome,
)
from mage_services.actor.actor import play
from mage_services.actor.file_download import FileDownload, is_there
from mage_services.processes.process import Status, ticks
from mage_services.processes.startup import build_digest
from mage_services.transport.authentication import actor_keys
from mage_services.transport.peer_channel import PeerChannel

LINGER_S = 2.0
MAX_MISSING = 3
"""How often in a row weights that the learner named may be gone."""
KEPT_FILES = 2
"""Files of weights that are kept: the engine's, and the next ones."""


class RemoteChannel:
    """A `PeerChannel` whose publications name files of this machine.

    While weights are on their way, everything else is delivered; they come at most one version at
    a time, for the learner tells an actor of no other before it has loaded one.
    """

    def __init__(self, channel: PeerChannel, folder: Path) -> None:
        self._channel, self._folder = channel, folder
        self._download: FileDownload | None = None
        self._wanted: Publication | None = None
        self._has, self._num_missing = -1, 0

    async def receive(self) -> Message:
        """As `PeerChannel.receive`; a Publication comes when its weights are here.

        Cancellation leaves every message where it was, and weights half fetched.

        Raises:
            RunError: the learner has no such weights, or they cannot be written.
        """
        while True:
            match message := await self._channel.receive():
                case Welcome():
                    await self._welcomed(message)
                    return msgspec.structs.replace(message, weights_path=None)
                case Publication():
                    await self._want(message)
                case Chunk():
                    if whole := await self._take(message):
                        return whole
                case NoFile():
                    await self._missing(message)
                case Prospectus():
                    continue  # the answer to a question asked twice
                case _:
                    return message

    async def send(self, message: Message) -> None:
        """As `PeerChannel.send`."""
        await self._channel.send(message)

    async def _welcomed(self, welcome: Welcome) -> None:
        """Perhaps by a new learner: what was asked of the old one is asked again."""
        version = welcome.version
        if welcome.weights_path is not None and version > self._has:
            path = welcome.weights_path
            await self._want(Publication(version=version, path=path, digest="unknown"))
        if self._download is not None:
            await self._download.ask_again()

    async def _want(self, publication: Publication) -> None:
        if self._wanted is not None and self._wanted.version >= publication.version:
            return
        self._wanted = publication
        name = f"weights/{publication.version}"
        file = self._folder / f"v{publication.version:06d}.safetensors"
        self._download = FileDownload(name, file, self._channel.send)
        await self._download.ask()

    async def _take(self, chunk: Chunk) -> Publication | None:
        if self._download is None or self._wanted is None or not await self._download.take(chunk):
            return None
        whole = msgspec.structs.replace(self._wanted, path=str(self._download.file))
        self._has, self._num_missing, self._download = whole.version, 0, None
        for old in sorted(self._folder.glob("v*.safetensors*"))[:-KEPT_FILES]:
            old.unlink()
        return whole

    async def _missing(self, answer: NoFile) -> None:
        """Weights that a learner of earlier deleted: a new hello is answered with newer ones."""
        if self._download is None or answer.name != self._download.name:
            return
        self._num_missing += 1
        if self._num_missing > MAX_MISSING:
            raise RunError(f"the learner has no {answer.name}: {answer.reason}")
        self._download = self._wanted = None
        await self._channel.say_hello()


async def play_remotely(given: argparse.Namespace, folder: Path) -> str:
    """Connect, play, and return why the remote actor ended. Cancellation says goodbye."""
    keys = actor_keys(given.keys) if given.keys else None
    build = build_digest()
    channel = PeerChannel(given.connect, Enquiry(name=given.name, build=build), keys=keys)
    reason = "it was told to leave"
    try:
        async with asyncio.TaskGroup() as tasks:
            watch = tasks.create_task(_patience(channel, given), name="patience")
            reason = await _live(channel, given, build, folder)
            watch.cancel()
    finally:
        channel.leave(reason, LINGER_S)
    return reason


async def _live(channel: PeerChannel, given: argparse.Namespace, build: str, folder: Path) -> str:
    prospectus = await _prospectus(channel)
    config = config_file.read(prospectus.config.encode(), "the learner's configuration")
    _compare(config, given.config)
    check(config)
    policy = folder / "policy"
    await fetch_policy(channel, prospectus, policy)
    say(f"{given.name} joins {given.connect}: {config.environment.name}")
    await channel.introduce(
        Hello(
            role="actor",
            name=given.name,
            build=build,
            config_digest=digest(config),
            credits=config.engine.max_contexts // config.admission.trials_per_group,
        )
    )
    return await play(
        RemoteChannel(channel, folder / "weights"), config, policy, given.name, Status()
    )


async def _prospectus(channel: PeerChannel) -> Prospectus:
    message = await channel.receive()
    if not isinstance(message, Prospectus):
        raise RunError(f"expected to be told of the run, got {type(message).__name__}")
    return message


def _compare(theirs: Config, own: str | None) -> None:
    """Whether this machine can play it, and a configuration named here is the learner's.

    Raises:
        PeerRefused: it is another one, or its weights are no files.
    """
    if theirs.transport.weights == "nccl":
        raise PeerRefused(
            'the learner publishes by transport.weights = "nccl", which reaches its own machine '
            'alone: actors elsewhere need "disk" or "tensor"'
        )
    if theirs.population.rivals:
        raise PeerRefused(
            "the run has versions of the policy as opponents, whose weights are on its own machine "
            "alone: it can have no actors elsewhere, or set population.rivals = 0"
        )
    if own is None:
        return
    ours = config_file.load(config_file.find(own), [])
    if digest(ours) != digest(theirs):
        raise PeerRefused(
            f"{own} is configuration {digest(ours)}, the learner's {digest(theirs)}: "
            "leave --config out, the learner sends its own"
        )


async def fetch_policy(channel: PeerChannel, prospectus: Prospectus, folder: Path) -> None:
    """Bring the model's files; those that are there stay."""
    for wanted in prospectus.files:
        file = folder / wanted.name.removeprefix("policy/")
        if await asyncio.to_thread(is_there, wanted, file):
            continue
        download = FileDownload(wanted.name, file, channel.send)
        await download.ask()
        while not await _next_part(channel, download):
            continue


async def _next_part(channel: PeerChannel, download: FileDownload) -> bool:
    """Take one answer; whether the file is whole."""
    match message := await channel.receive():
        case Chunk():
            return await download.take(message)
        case NoFile():
            raise RunError(f"the learner has no {message.name}: {message.reason}")
        case Prospectus():  # the link broke, and the channel asked anew
            await download.ask_again()
            return False
        case _:
            raise RunError(f"expected a file, got {type(message).__name__}")


async def _patience(channel: PeerChannel, given: argparse.Namespace) -> None:
    """End where there has been no connection for too long.

    Raises:
        RunError: there has.
    """
    async for _ in ticks(1.0):
        if channel.away_s() > given.patience:
            raise RunError(f"no learner at {given.connect} for {given.patience:g} s")


async def until_told(given: argparse.Namespace, folder: Path) -> str:
    """Play until SIGINT or SIGTERM."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    told: list[int] = []

    def tell(number: int) -> None:
        told.append(number)
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, tell, number)
    try:
        return await play_remotely(given, folder)
    except asyncio.CancelledError:
        if not told:
            raise
    return f"left by {signal.Signals(told[0]).name}"


def say(text: str) -> None:
    """Print a line for the person who started the actor."""
    print(text, flush=True)
