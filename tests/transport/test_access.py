"""Access control: which messages are delivered, and what is remembered of unknown peers."""

from mage_async.protocol.codec import encode
from mage_async.protocol.messages import Goodbye, Heartbeat, Hello, WhoAreYou
from mage_services.transport.access_control import MAX_REMEMBERED_PEERS, AccessControl, Verdict

NOTHING = Verdict()


def hello(name: str = "actor-0", build: str = "b1") -> Hello:
    return Hello(role="actor", name=name, build=build, config_digest="c1", group_quota=2)


def heartbeat() -> Heartbeat:
    return Heartbeat(name="actor-0", counters={}, blocked_s={})


def test_faults_of_strangers_cannot_fill_the_memory() -> None:
    access = AccessControl("b1", "c1")
    for number in range(MAX_REMEMBERED_PEERS + 50):
        assert access.receive(f"stranger-{number}", [b"x"]) == NOTHING
    faults = access.faults
    assert len(faults) == MAX_REMEMBERED_PEERS + 1
    assert faults["others"] == 50


def test_a_peer_that_said_goodbye_has_to_say_hello_again() -> None:
    access = AccessControl("b1", "c1")
    access.receive("a", encode(hello()))
    assert access.receive("a", encode(Goodbye(reason="done"))).message == Goodbye(reason="done")
    assert access.receive("a", encode(heartbeat())).message is None
    assert not access.peers


def test_a_stranger_is_asked_who_it_is_and_a_farewell_is_not_answered() -> None:
    access = AccessControl("b1", "c1")
    assert access.receive("a", encode(heartbeat())) == Verdict(answer=WhoAreYou())
    assert access.receive("a", encode(Goodbye(reason=""))) == NOTHING


def test_a_stranger_is_asked_once_until_it_says_hello_or_its_connection_ends() -> None:
    access, asked = AccessControl("b1", "c1"), Verdict(answer=WhoAreYou())
    assert access.receive("a", encode(heartbeat())) == asked
    assert access.receive("a", encode(heartbeat())) == asked  # the first could not be sent
    access.sent("a", WhoAreYou())
    for _ in range(100):
        assert access.receive("a", encode(heartbeat())) == NOTHING
    access.receive("a", encode(hello()))
    assert access.receive("a", encode(heartbeat())).message == heartbeat()
    for _ in range(2):
        access.forget("a")
        assert access.receive("a", encode(heartbeat())) == asked
        access.sent("a", WhoAreYou())


def test_questions_to_strangers_cannot_fill_the_memory() -> None:
    access = AccessControl("b1", "c1")
    for number in range(MAX_REMEMBERED_PEERS + 1):
        access.sent(f"stranger-{number}", WhoAreYou())
    verdicts = [access.receive(f"stranger-{n}", encode(heartbeat())) for n in (0, 1)]
    assert verdicts == [Verdict(answer=WhoAreYou()), NOTHING]


def test_of_many_that_are_turned_away_few_are_noted() -> None:
    access = AccessControl("b1", "c1")
    for _ in range(1000):
        access.turn_away("10.0.0.1")
    starts = [note.split()[0] for note in access.take_notes()]
    assert starts == ["1.", "10.", "100.", "1000."]
