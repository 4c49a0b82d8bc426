"""Addresses: where a learner may listen, and where not; and a channel to an address where none
listens any more.
"""

import errno
import socket
import subprocess
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import uvloop
import zmq

from mage_async.errors import ConfigError, RunError
from mage_async.protocol.messages import Hello
from mage_services.transport.channels import LearnerChannel, PeerChannel
from mage_services.transport.sockets import bind, check_free, ipc_address

HELLO = Hello(role="actor", name="actor-0", build="b1", config_digest="c1", group_quota=2)


UNREAD = """
import sys, time, zmq
from mage_async.protocol.messages import Hello
from mage_services.transport.channels import PeerChannel

hello = Hello(role="actor", name="actor-0", build="b1", config_digest="c1", group_quota=2)
channel = PeerChannel(f"ipc://{sys.argv[1]}/learner", hello)
# As many tries to connect as one address has in some minutes.
channel._socket.setsockopt(zmq.RECONNECT_IVL, 1)
for number in range(300):
    channel._socket.connect(f"ipc://{sys.argv[1]}/{number}")
time.sleep(1)
channel.close()
print("closed")
"""


def test_a_channel_closes_although_it_has_not_read_thousands_of_failed_tries(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-c", UNREAD, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == "closed\n"


def learner_at(address: str) -> LearnerChannel:
    return LearnerChannel(address, build="b1", config_digest="c1")


def test_a_socket_lies_in_a_directory_for_its_owner_only(tmp_path: Path) -> None:
    directory = Path(ipc_address(tmp_path).removeprefix("ipc://")).parent
    assert directory == tmp_path / "sockets"
    assert directory.stat().st_mode & 0o777 == 0o700


def test_a_run_directory_with_a_long_name_gets_a_short_socket_and_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    long = tmp_path / ("x" * 120)
    long.mkdir()
    address = ipc_address(long)
    directory = Path(address.removeprefix("ipc://")).parent
    with learner_at(address):
        assert "is too long" in caplog.text
        assert directory.stat().st_mode & 0o777 == 0o700
    directory.rmdir()


def test_a_run_directory_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"no place for a socket in .*: No such file"):
        ipc_address(tmp_path / "none")


def test_a_port_in_use_is_said() -> None:
    with (
        learner_at("tcp://127.0.0.1:0") as learner,
        pytest.raises(RunError, match=f"{learner.address} is in use: end the other run"),
    ):
        learner_at(learner.address)


def test_a_port_in_use_is_said_before_any_process_starts() -> None:
    with learner_at("tcp://127.0.0.1:0") as learner:
        with pytest.raises(RunError, match="is in use: end the other run"):
            check_free(learner.address)
        address = learner.address
    check_free(address)
    with learner_at(address):
        pass


def test_a_file_system_without_sockets_is_answered_with_another_address(tmp_path) -> None:
    tmp_path.chmod(0o700)
    refuses = MagicMock(bind=MagicMock(side_effect=zmq.ZMQError(errno.EPERM)))
    with pytest.raises(
        RunError, match=r"not permitted; where the file system .*tcp://127\.0\.0\.1"
    ):
        bind(refuses, f"ipc://{tmp_path}/work")


@pytest.mark.parametrize("host", ["a.host.invalid", "[::1]"])
def test_a_host_that_is_no_address_of_this_machine_is_answered_with_what_is(host: str) -> None:
    with pytest.raises(RunError, match="cannot be bound: No such device; HOST is an IPv4 address"):
        check_free(f"tcp://{host}:5555")


def test_a_socket_in_use_is_said_and_stays_in_use(tmp_path: Path) -> None:
    async def main() -> None:
        with learner_at(ipc_address(tmp_path)) as learner:
            with pytest.raises(RunError, match="is in use: a learner listens there"):
                learner_at(learner.address)
            with PeerChannel(learner.address, HELLO) as peer:
                assert (await learner.receive())[0] == peer.peer

    uvloop.run(main())


def test_a_socket_left_by_a_killed_learner_is_taken_over(tmp_path: Path) -> None:
    address = ipc_address(tmp_path)
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(address.removeprefix("ipc://"))
    learner_at(address).close()


def test_a_directory_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(RunError, match="must be a directory for its owner only: chmod 700 it"):
        learner_at(f"ipc://{tmp_path}/work")


def test_a_file_is_not_taken_for_a_socket(tmp_path: Path) -> None:
    path = Path(ipc_address(tmp_path).removeprefix("ipc://"))
    path.write_text("data")
    with pytest.raises(RunError, match="is a file, not a socket"):
        learner_at(f"ipc://{path}")
    assert path.read_text() == "data"


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        ("tcp://0.0.0.0:5555", "can be reached from other machines, which needs keys: make"),
        ("tcp://example.org:5555", "with `mage keys new DIR` and name DIR in transport.keys"),
        ("tcp://127.0.0.1", "is no address: write ipc://PATH or tcp://HOST:PORT"),
        ("tcp://127.0.0.1:99999", "is no address"),
        ("inproc://x", "is no address"),
        ("ipc://", "1 to 107 bytes, got 0"),
        ("ipc:///" + "x" * 107, "1 to 107 bytes, got 108: choose a shorter run directory"),
    ],
)
def test_an_address_that_cannot_be_used_is_said_on_both_ends(address: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        learner_at(address)
    with pytest.raises(ConfigError, match=sentence):
        PeerChannel(address, HELLO)
