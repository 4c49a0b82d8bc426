"""Access control and connection limits: who is let in, and what is remembered of strangers."""

from mage_async.protocol.codec import encode
from mage_async.protocol.messages import (
    Acknowledge,
    Goodbye,
    Heartbeat,
    Hello,
    Refusal,
    WhoAreYou,
)
from mage_async.protocol.rate_limits import Allowance, Rate
from mage_services.transport.access import (
    BARRED_S,
    HEARING_S,
    MAX_COUNTED_PEERS,
    MAX_PEERS,
    NOTHING,
    AccessControl,
    Verdict,
)
from mage_services.transport.connection_limits import (
    MAX_BYTES,
    MAX_SILENT,
    PATIENCE_S,
    SilentConnections,
    UnfinishedMessages,
)

SLOW = Allowance(messages=Rate(10, 20), bytes=Rate(10_000, 10_000), malformed=Rate(1, 3))


def hello(name: str = "actor-0", build: str = "b1") -> Hello:
    return Hello(role="actor", name=name, build=build, config_digest="c1", credits=2)


def heartbeat() -> Heartbeat:
    return Heartbeat(name="actor-0", counters={}, blocked_s={})


def opened() -> AccessControl:
    """Access control that has let `a` in."""
    access = AccessControl("b1", "c1", allowance=SLOW)
    access.receive("a", encode(hello()), now=0.0)
    return access


def test_faults_of_strangers_cannot_fill_the_memory() -> None:
    access = AccessControl("b1", "c1")
    for number in range(MAX_COUNTED_PEERS + 50):
        assert access.receive(f"stranger-{number}", [b"x"], now=0.0) == NOTHING
    faults = access.statistics().faults
    assert len(faults) == MAX_COUNTED_PEERS + 1
    assert faults["others"].count == 50


def test_a_peer_that_said_goodbye_has_to_say_hello_again() -> None:
    access = AccessControl("b1", "c1")
    access.receive("a", encode(hello()), now=0.0)
    assert access.receive("a", encode(Goodbye(reason="done")), now=0.0).message == Goodbye(
        reason="done"
    )
    assert access.receive("a", encode(heartbeat()), now=0.0).message is None
    assert not access.statistics().peers


def test_a_snapshot_does_not_change() -> None:
    access = AccessControl("b1", "c1")
    before = access.statistics()
    access.receive("a", encode(hello()), now=0.0)
    access.receive("a", [b"x"], now=0.0)
    assert not before.peers
    assert not before.faults


def test_a_peer_over_its_messages_is_refused_and_named_and_says_goodbye_to_the_learner() -> None:
    access = opened()
    for _ in range(19):
        assert access.receive("a", encode(heartbeat()), now=0.0).message == heartbeat()
    reason = "a is refused: over 10 messages a second"
    verdict = access.receive("a", encode(heartbeat()), now=0.0)
    assert verdict == Verdict(Goodbye(reason=reason), Refusal(reason=reason))
    assert access.take_notes() == [reason]
    assert not access.take_notes()
    assert not access.statistics().peers
    assert access.statistics().num_refused == 1


def test_a_refused_peer_is_not_listened_to_and_its_connection_ends_a_moment_later() -> None:
    access = opened()
    while not access.statistics().num_refused:
        access.receive("a", encode(heartbeat()), now=0.0)
    assert access.receive("a", encode(hello()), now=HEARING_S / 2) == NOTHING
    assert access.receive("a", encode(hello()), now=HEARING_S * 2) == Verdict(is_over=True)
    assert access.receive("b", encode(hello("b")), now=HEARING_S * 2).message == hello("b")


def test_the_connection_of_a_refused_peer_that_floods_ends_at_once_and_again_if_it_comes_back() -> (
    None
):
    access = opened()
    while not access.statistics().num_refused:
        access.receive("a", encode(heartbeat()), now=0.0)
    verdicts = [access.receive("a", encode(heartbeat()), now=0.0) for _ in range(130)]
    assert [number for number, one in enumerate(verdicts) if one.is_over] == [64, 129]


def test_a_peer_within_its_rate_is_never_refused() -> None:
    access = opened()
    for number in range(1000):
        assert access.receive("a", encode(heartbeat()), now=number / 10).message == heartbeat()


def test_a_peer_whose_trials_are_taken_is_not_over_its_messages_and_one_that_repeats_is() -> None:
    taken = Acknowledge(grant=1, epoch=0, trial=0, is_duplicate=False)
    again = Acknowledge(grant=1, epoch=0, trial=0, is_duplicate=True)
    access = AccessControl("b1", "c1", allowance=Allowance(messages=Rate(10, 20)))
    access.receive("a", encode(hello()), now=0.0)
    for _ in range(1000):
        assert access.receive("a", encode(heartbeat()), now=0.0).message == heartbeat()
        access.sent("a", taken)
    for _ in range(19):
        assert access.receive("a", encode(heartbeat()), now=0.0).message == heartbeat()
        access.sent("a", again)
    assert isinstance(access.receive("a", encode(heartbeat()), now=0.0).answer, Refusal)
    assert access.statistics().num_sent == 1019


def test_a_peer_over_its_bytes_is_refused() -> None:
    access = opened()
    large = encode(Goodbye(reason="x" * 1900))
    reasons = [access.receive("b", large, now=0.0).answer for _ in range(6)]
    assert reasons == [None] * 5 + [Refusal(reason="b is refused: over 0.00953674 MiB a second")]


def test_a_peer_that_goes_on_sending_garbage_is_refused_with_what_was_wrong() -> None:
    access = opened()
    verdicts = [access.receive("a", [b"x"], now=0.0) for _ in range(4)]
    assert verdicts[:3] == [NOTHING] * 3
    assert isinstance(verdicts[3].answer, Refusal)
    assert "over 3 malformed messages: peer speaks `x`" in verdicts[3].answer.reason


def test_one_more_than_the_most_peers_is_refused_with_a_sentence() -> None:
    access = AccessControl("b1", "c1")
    for number in range(MAX_PEERS):
        access.receive(f"a{number}", encode(hello()), now=0.0)
    answer = access.receive("late", encode(hello()), now=0.0).answer
    assert answer == Refusal(reason=f"actor-0: the learner serves {MAX_PEERS} peers already")
    assert access.receive("a0", encode(hello()), now=0.0).message == hello()


def test_a_stranger_is_asked_who_it_is_and_a_farewell_is_not_answered() -> None:
    access = AccessControl("b1", "c1")
    assert access.receive("a", encode(heartbeat()), now=0.0) == Verdict(answer=WhoAreYou())
    assert access.receive("a", encode(Goodbye(reason="")), now=0.0) == NOTHING


def test_a_stranger_is_asked_once_until_it_says_hello_or_its_connection_ends() -> None:
    access, asked = AccessControl("b1", "c1"), Verdict(answer=WhoAreYou())
    assert access.receive("a", encode(heartbeat()), now=0.0) == asked
    assert access.receive("a", encode(heartbeat()), now=0.0) == asked  # the first could not be sent
    access.sent("a", WhoAreYou())
    for _ in range(100):
        assert access.receive("a", encode(heartbeat()), now=0.0) == NOTHING
    access.receive("a", encode(hello()), now=0.0)
    assert access.receive("a", encode(heartbeat()), now=0.0).message == heartbeat()
    for _ in range(2):
        access.forget("a")
        assert access.receive("a", encode(heartbeat()), now=0.0) == asked
        access.sent("a", WhoAreYou())


def test_questions_to_strangers_cannot_fill_the_memory() -> None:
    access = AccessControl("b1", "c1")
    for number in range(MAX_COUNTED_PEERS + 1):
        access.sent(f"stranger-{number}", WhoAreYou())
    verdicts = [access.receive(f"stranger-{n}", encode(heartbeat()), now=0.0) for n in (0, 1)]
    assert verdicts == [Verdict(answer=WhoAreYou()), NOTHING]


def test_a_known_key_may_enter_unless_it_was_refused_there_a_moment_ago() -> None:
    access = AccessControl("b1", "c1", known_keys=frozenset([b"known"]))
    assert access.may_enter(b"known", "10.0.0.1", now=0.0)
    assert not access.may_enter(b"unknown", "10.0.0.1", now=0.0)
    access.bar(b"known", "10.0.0.1", now=0.0)
    assert not access.may_enter(b"known", "10.0.0.1", now=1.0)
    assert access.may_enter(b"known", "10.0.0.2", now=1.0)
    assert access.may_enter(b"known", "10.0.0.1", now=BARRED_S + 1)
    assert access.statistics().num_turned_away == 1


def test_of_many_that_are_turned_away_few_are_noted() -> None:
    access = AccessControl("b1", "c1", known_keys=frozenset([b"known"]))
    for _ in range(1000):
        access.may_enter(b"unknown", "10.0.0.1", now=0.0)
    starts = [note.split()[0] for note in access.take_notes()]
    assert starts == ["1.", "10.", "100.", "1000."]


def test_the_oldest_of_too_many_silent_connections_is_ended() -> None:
    silent = SilentConnections()
    ended = [one for number in range(MAX_SILENT + 3) for one in silent.arrived(number, now=0.0)]
    assert ended == [0, 1, 2]
    assert len(silent) == MAX_SILENT


def test_a_connection_that_spoke_or_left_is_not_ended() -> None:
    silent = SilentConnections()
    for number in range(3):
        silent.arrived(number, now=0.0)
    silent.spoke(0)
    silent.left(1)
    assert silent.overdue(now=PATIENCE_S) == []
    assert silent.overdue(now=PATIENCE_S + 1) == [2]
    assert silent.num_ended == 1


def test_a_descriptor_that_is_used_again_is_a_new_connection() -> None:
    silent = SilentConnections()
    silent.arrived(7, now=0.0)
    silent.arrived(7, now=PATIENCE_S)
    assert silent.overdue(now=PATIENCE_S + 1) == []


def test_a_connection_whose_message_does_not_end_is_ended() -> None:
    watched = UnfinishedMessages()
    watched.arrived(7)
    assert not watched.brought(7, MAX_BYTES)
    assert watched.brought(7, MAX_BYTES + 1)
    assert watched.num_ended == 1
    assert not watched.connections()


def test_a_connection_whose_messages_end_may_bring_any_number_of_bytes() -> None:
    watched = UnfinishedMessages()
    watched.arrived(7)
    for number in range(1, 10):
        watched.finished(7)
        assert not watched.brought(7, number * MAX_BYTES)
