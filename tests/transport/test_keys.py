"""Keys: how they are made and checked, and that nobody comes in without one."""

import asyncio
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop
import zmq

from mage_async.errors import ConfigError, PeerRefused
from mage_async.protocol.messages import Heartbeat, Hello, Welcome
from mage_services.transport import channels
from mage_services.transport.access_control import (
    LearnerKeys,
    PeerKeys,
    actor_keys,
    learner_keys,
    make_keys,
)
from mage_services.transport.channels import LearnerChannel, PeerChannel

BEAT = Heartbeat(name="actor-0", counters={}, blocked_s={})


def hello(name: str = "actor-0") -> Hello:
    return Hello(role="actor", name=name, build="b1", config_digest="c1", group_quota=2)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    directory = tmp_path / "keys"
    make_keys(directory)
    return directory


@pytest.fixture
def others(tmp_path: Path) -> Path:
    """Keys of somebody else."""
    directory = tmp_path / "others"
    make_keys(directory)
    return directory


def learner_at_any_port(keys: LearnerKeys | None) -> LearnerChannel:
    return LearnerChannel("tcp://127.0.0.1:0", build="b1", config_digest="c1", keys=keys)


def test_keys_are_made_for_their_owner_only_and_read_again(keys: Path) -> None:
    files = sorted(keys.iterdir())
    names = ["actor.key", "actor.key_secret", "learner.key", "learner.key_secret"]
    assert [file.name for file in files] == names
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
    assert keys.stat().st_mode & 0o777 == 0o700
    learner, actor = learner_keys(keys), actor_keys(keys)
    assert actor.learner == learner.public
    assert learner.known == {actor.public}


def test_an_actors_machine_needs_two_files(keys: Path, tmp_path: Path) -> None:
    away = tmp_path / "away"
    away.mkdir()
    for name in ("learner.key", "actor.key_secret"):
        shutil.copy2(keys / name, away / name)
    assert actor_keys(away) == actor_keys(keys)


def test_further_public_keys_are_let_in_too(keys: Path, others: Path) -> None:
    shutil.copy2(others / "actor.key", keys / "second.key")
    assert learner_keys(keys).known == {actor_keys(keys).public, actor_keys(others).public}


def test_a_secret_is_in_no_text(keys: Path) -> None:
    learner, actor = learner_keys(keys), actor_keys(keys)
    for made in (learner, actor):
        assert made.secret.decode() not in repr(made)


def test_keys_are_not_overwritten(keys: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds actor\.key already: choose another directory"):
        make_keys(keys)


def swap(one: Path, other: Path) -> None:
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)


def damage(keys: Path, what: str) -> None:
    """One thing that goes wrong with files of keys."""
    secret, public = keys / "actor.key_secret", keys / "actor.key"
    match what:
        case "readable":
            secret.chmod(0o644)
        case "writable":
            (keys / "learner.key").chmod(0o666)
        case "missing secret":
            secret.unlink()
        case "missing public":
            (keys / "learner.key").unlink()
        case "swapped pair":
            swap(secret, public)
        case "swapped public":
            shutil.copyfile(keys / "learner.key_secret", keys / "learner.key")
        case "swapped roles":
            public.unlink()
            shutil.copyfile(keys / "learner.key_secret", secret)
        case "two pairs":
            make_keys(keys / "new")
            shutil.copyfile(keys / "new" / "actor.key", public)
        case "damaged":
            secret.write_text(secret.read_text().replace('secret-key = "', 'secret-key = "!'))
        case "empty":
            secret.write_text("")


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("readable", "actor.key_secret can be read by others: chmod 600 it"),
        ("writable", "learner.key can be written by others: chmod 600 it"),
        ("missing secret", "actor.key_secret is missing: make keys with `mage keys new DIR`"),
        ("missing public", "learner.key is missing"),
        ("swapped pair", "actor.key_secret holds a public key alone: the files of the pair are"),
        ("swapped public", "learner.key holds a secret key: the files of the pair are swapped"),
        ("swapped roles", "actor.key_secret is the learner's: swapped files"),
        ("two pairs", "actor.key_secret and actor.key are of two pairs"),
        ("damaged", "actor.key_secret is damaged"),
        ("empty", "actor.key_secret is no key file"),
    ],
)
def test_what_is_wrong_with_an_actors_keys_is_said(keys: Path, what: str, sentence: str) -> None:
    damage(keys, what)
    with pytest.raises(ConfigError, match=sentence):
        actor_keys(keys)


def test_a_directory_that_cannot_be_entered_is_said(
    keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, **_: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "stat", refuse)  # the superuser may enter every directory
    with pytest.raises(ConfigError, match=r"actor\.key_secret cannot be read: Permission denied"):
        actor_keys(keys)


def test_a_learner_without_actors_or_with_itself_as_one_is_said(keys: Path) -> None:
    (keys / "actor.key").unlink()
    with pytest.raises(ConfigError, match="no actor's public key"):
        learner_keys(keys)
    shutil.copy2(keys / "learner.key", keys / "actor.key")
    with pytest.raises(ConfigError, match="an actor's public key is the learner's own"):
        learner_keys(keys)


@pytest.fixture
def heard(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Everything that anyone logs."""
    with caplog.at_level(logging.DEBUG):
        yield caplog


def test_a_peer_with_a_known_key_is_heard_and_no_secret_is_logged(
    keys: Path, heard: pytest.LogCaptureFixture
) -> None:
    learners, actors = learner_keys(keys), actor_keys(keys)

    async def main() -> None:
        with (
            learner_at_any_port(learners) as learner,
            PeerChannel(learner.address, hello(), keys=actors) as peer,
        ):
            assert await learner.receive() == (peer.peer, hello())
            learner.send(peer.peer, Welcome(version=1))
            assert await peer.receive() == Welcome(version=1)

    uvloop.run(main())
    assert learners.secret.decode() not in heard.text
    assert actors.secret.decode() not in heard.text


def test_a_connection_that_zmq_ends_before_the_hello_is_said_when_receiving(
    keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        with learner_at_any_port(learner_keys(keys)) as learner:
            with monkeypatch.context() as patch:
                # zmq's thread needs half a millisecond for this: a thread that loses the processor
                # after `connect` meets it.
                patch.setattr(channels, "send_now", refuse_to_send)
                peer = PeerChannel(learner.address, hello("stranger"))
            with peer, pytest.raises(PeerRefused, match="ends every connection"):
                await peer.receive()

    uvloop.run(main())


def test_a_learner_with_keys_closes_just_after_it_has_begun_to_wait(keys: Path) -> None:
    async def main() -> None:
        with learner_at_any_port(learner_keys(keys)):
            await asyncio.sleep(0)  # the gate begins to poll its socket

    uvloop.run(main())  # uvloop ends the process if the loop still has a closed socket


def test_a_hello_that_zmq_did_not_take_is_sent_later(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        with learner_at_any_port(None) as learner:
            with monkeypatch.context() as patch:
                patch.setattr(channels, "send_now", refuse_to_send)
                peer = PeerChannel(learner.address, hello())
            with peer:
                outbox = asyncio.create_task(peer.receive())
                assert await learner.receive() == (peer.peer, hello())
                learner.send(peer.peer, Welcome(version=1))
                assert await outbox == Welcome(version=1)

    uvloop.run(main())


def refuse_to_send(*_: object) -> None:
    raise zmq.Again


@pytest.mark.parametrize("wrong", ["actor", "learner", "none", "learner has none"])
def test_a_peer_with_wrong_or_no_keys_gets_nothing_but_a_sentence_of_its_own(
    keys: Path, others: Path, wrong: str
) -> None:
    good, stranger = actor_keys(keys), actor_keys(others)
    given = {
        "actor": PeerKeys(stranger.public, stranger.secret, good.learner),
        "learner": PeerKeys(good.public, good.secret, stranger.learner),
        "none": None,
        "learner has none": good,
    }[wrong]
    own = None if wrong == "learner has none" else learner_keys(keys)

    async def main() -> None:
        with (
            learner_at_any_port(own) as learner,
            PeerChannel(learner.address, hello("stranger"), keys=given) as peer,
        ):
            inbox = asyncio.create_task(learner.receive())
            with pytest.raises(PeerRefused, match=r"refuses this actor's key|ends every"):
                await peer.receive()
            assert not inbox.done()
            friend = PeerChannel(learner.address, hello(), keys=good if own else None)
            with friend:
                assert await inbox == (friend.peer, hello())
            assert not learner.access.faults
            if wrong == "actor":  # zmq ends the other connections before a key is asked about
                assert learner.take_notes()[0].startswith("1. connection turned away")

    uvloop.run(main())
