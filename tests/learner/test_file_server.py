"""Files that cross a socket: a run's model and weights on a machine that sees none of its files."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop

from mage_async.errors import PeerRefused, RunError
from mage_async.protocol import file_transfer
from mage_async.protocol.file_transfer import CHUNK_BYTES, WINDOW, Download
from mage_async.protocol.messages import (
    Chunk,
    Enquiry,
    Fetch,
    Hello,
    Message,
    NoFile,
    Prospectus,
    Publication,
    Welcome,
)
from mage_services.actor.file_download import FileDownload
from mage_services.actor.remote_actor import RemoteChannel, fetch_policy
from mage_services.learner import file_server
from mage_services.learner.file_server import FileServer
from mage_services.transport.learner_channel import LearnerChannel
from mage_services.transport.peer_channel import PeerChannel
from tests.helpers.memory_channels import MemoryLearnerChannel

HELLO = Hello(role="actor", name="far", build="b1", config_digest="c1", credits=2)
PATIENCE_S = 60.0
"""For a loaded machine; nothing here takes a tenth of a second on an idle one."""
ENQUIRY = Enquiry(name="far", build="b1")


class Learner:
    """The part of a learner that answers about files; other messages are for the test."""

    def __init__(self, root: Path, address: str = "tcp://127.0.0.1:0") -> None:
        self.channel = LearnerChannel(address, build="b1", config_digest="c1")
        self.root = root
        self.file_server = FileServer(self.channel, "seed = 0", root / "policy", self.weights)
        self.others: asyncio.Queue[tuple[str, Message]] = asyncio.Queue()

    def weights(self, version: int) -> Path:
        return self.root / f"v{version}"

    async def serve(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.file_server.run())
            while True:
                peer, message = await self.channel.receive()
                if isinstance(message, Enquiry | Fetch):
                    self.file_server.take(peer, message)
                else:
                    self.others.put_nowait((peer, message))


@asynccontextmanager
async def serving(learner: Learner) -> AsyncIterator[Learner]:
    task = asyncio.create_task(learner.serve())
    try:
        yield learner
    finally:
        task.cancel()
        await asyncio.wait([task])
        learner.channel.close()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The learner's files: a small one, an empty one, and weights of three chunks."""
    policy = tmp_path / "learner" / "policy"
    policy.mkdir(parents=True)
    (policy / "config.json").write_text("{}")
    (policy / "empty.txt").write_text("")
    (policy.parent / "v1").write_bytes(bytes(range(256)) * (2 * CHUNK_BYTES // 256) + b"end")
    return policy.parent


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    uvloop.run(main())


async def enquire(address: str) -> tuple[PeerChannel, Prospectus]:
    channel = PeerChannel(address, ENQUIRY)
    prospectus = await channel.receive()
    assert isinstance(prospectus, Prospectus)
    return channel, prospectus


def test_a_machine_without_files_gets_the_configuration_and_the_models_files(
    root: Path, tmp_path: Path
) -> None:
    async def main() -> None:
        async with serving(Learner(root)) as learner:
            channel, prospectus = await enquire(learner.channel.address)
            with channel:
                assert prospectus.config == "seed = 0"
                away = tmp_path / "away"
                await fetch_policy(channel, prospectus, away)
                for file in (root / "policy").iterdir():
                    assert (away / file.name).read_bytes() == file.read_bytes()

    run(main)


def test_weights_are_here_when_a_publication_is_delivered(root: Path, tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(Learner(root)) as learner:
            channel, _ = await enquire(learner.channel.address)
            with channel:
                await channel.introduce(HELLO)
                remote = RemoteChannel(channel, tmp_path / "away")
                peer, said = await learner.others.get()
                assert said == HELLO
                path = str(learner.weights(1))
                learner.channel.send(peer, Welcome(version=1, weights_path=path))
                assert await remote.receive() == Welcome(version=1)
                publication = await remote.receive()
                assert isinstance(publication, Publication)
                fetched.append(publication)

    fetched: list[Publication] = []
    run(main)
    assert fetched[0].version == 1
    file = Path(fetched[0].path)
    assert file.is_relative_to(tmp_path / "away")
    assert file.read_bytes() == (root / "v1").read_bytes()


def test_a_fetch_goes_on_with_a_new_learner_where_the_old_one_ended(
    root: Path, tmp_path: Path
) -> None:
    async def main() -> None:
        file = tmp_path / "away" / "v1"
        sent: list[Message] = []

        async def record(message: Message) -> None:
            sent.append(message)

        half = (root / "v1").read_bytes()[: CHUNK_BYTES + 17]
        file.parent.mkdir()
        file.with_name("v1.part").write_bytes(half)  # what an earlier process left
        async with serving(Learner(root)) as learner:
            channel, _ = await enquire(learner.channel.address)
            address = learner.channel.address
            download = FileDownload("weights/1", file, record)
            await download.ask()
            assert sent == [Fetch(name="weights/1", offset=CHUNK_BYTES + 17)]
        with channel:
            async with serving(Learner(root, address)):
                assert isinstance(await channel.receive(), Prospectus)  # it asked the new one
                download = FileDownload("weights/1", file, channel.send)
                await download.ask()
                while not await download.take(await channel.receive()):
                    pass
        assert file.read_bytes() == (root / "v1").read_bytes()

    run(main)


def test_a_part_of_another_file_is_found_by_the_digest_and_fetched_anew(
    root: Path, tmp_path: Path
) -> None:
    async def main() -> None:
        file = tmp_path / "away" / "v1"
        file.parent.mkdir()
        file.with_name("v1.part").write_bytes(b"wrong")
        async with serving(Learner(root)) as learner:
            channel, _ = await enquire(learner.channel.address)
            with channel:
                download = FileDownload("weights/1", file, channel.send)
                await download.ask()
                while not await download.take(await channel.receive()):
                    pass
        assert file.read_bytes() == (root / "v1").read_bytes()

    run(main)


def test_a_file_that_is_not_there_is_said(root: Path, tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(Learner(root)) as learner:
            channel, _ = await enquire(learner.channel.address)
            with channel:
                await channel.send(Fetch(name="weights/9", offset=0))
                answer = await channel.receive()
                assert answer == NoFile(name="weights/9", reason="No such file or directory")
                await channel.send(Fetch(name="policy/config.json", offset=2))
                answer = await channel.receive()
                assert answer == NoFile(name="policy/config.json", reason="it has 2 bytes, not 2")
                await channel.send(Fetch(name="policy/..", offset=0))
                answer = await channel.receive()
                assert isinstance(answer, NoFile)

    run(main)


def test_an_actor_gives_up_weights_that_are_gone_again_and_again(
    root: Path, tmp_path: Path
) -> None:
    async def main() -> None:
        async with serving(Learner(root)) as learner:
            channel, _ = await enquire(learner.channel.address)
            with channel:
                await channel.introduce(HELLO)
                remote = RemoteChannel(channel, tmp_path / "away")

                async def welcome_each_hello() -> None:
                    while True:
                        peer, _ = await learner.others.get()
                        learner.channel.send(peer, Welcome(version=9, weights_path="gone"))

                welcoming = asyncio.create_task(welcome_each_hello())
                with pytest.raises(RunError, match="the learner has no weights/9: No such file"):
                    await drain(remote)
                welcoming.cancel()

    async def drain(remote: RemoteChannel) -> None:
        while True:
            await remote.receive()

    run(main)


def test_who_is_of_another_build_is_told_nothing_of_the_run(root: Path) -> None:
    async def main() -> None:
        async with serving(Learner(root)) as learner:
            stranger = Enquiry(name="far", build="b2")
            with (
                PeerChannel(learner.channel.address, stranger) as channel,
                pytest.raises(PeerRefused, match="far is build b2, the learner b1"),
            ):
                await channel.receive()

    run(main)


def test_who_has_not_enquired_is_asked_who_he_is_before_he_gets_files(root: Path) -> None:
    async def main() -> None:
        async with serving(Learner(root)) as learner:
            other = Hello(role="actor", name="far", build="b1", config_digest="c2", credits=2)
            with PeerChannel(learner.channel.address, other) as channel:
                await channel.send(Fetch(name="policy/config.json", offset=0))
                with pytest.raises(PeerRefused, match="configuration c2"):
                    await channel.receive()
            assert learner.channel.statistics().num_received == 0

    run(main)


def test_more_questions_than_credits_are_not_answered(root: Path) -> None:
    async def main() -> None:
        async with serving(Learner(root)) as learner:
            for number in range(20):
                learner.file_server.take("far/1", Fetch(name="weights/1", offset=number))
            assert len(learner.file_server._questions["far/1"]) == 2 * WINDOW + 1

    run(main)


def test_a_file_arrives_though_its_peer_asks_again_before_what_it_asked_first_is_answered(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        channel = MemoryLearnerChannel()
        peer = channel.connect(HELLO)
        served = FileServer(
            channel, "seed = 0", root / "policy", lambda version: root / f"v{version}"
        )
        download, whole = Download("weights/2"), (root / "v2").read_bytes()
        (first,) = download.requests()
        download.takes(
            Chunk(first.name, 0, len(whole), file_server.digest_of(root / "v2"), whole[:16])
        )
        _lost, *waiting = download.requests()
        for fetch in waiting:
            served.take(peer.peer, fetch)
        download.link_broke()
        answering = asyncio.create_task(served.run())
        async with asyncio.timeout(PATIENCE_S):
            while not download.is_complete:
                for fetch in download.requests():
                    served.take(peer.peer, fetch)
                chunk = await peer.receive()
                assert isinstance(chunk, Chunk)
                download.takes(chunk)
        answering.cancel()

    for module in (file_transfer, file_server):
        monkeypatch.setattr(module, "CHUNK_BYTES", 16)
    (root / "v2").write_bytes(bytes(range(250)))
    run(main)
