"""The learner's coordinator: decides on each message at once, without waiting, and answers it.

It owns the ledger of slots and knows the peers. Whoever runs it calls `take` for each message,
`tick` now and then, and `publish` after each step; `arrived` is set whenever a batch may have
become complete.

    peer's message   the coordinator
    Hello            Welcome now, or when the policy is ready; then grants
    TrialResult      journal, then Acknowledge; perhaps the batch is complete. Of no group that was
                     ever granted: Unwanted
    GroupDrop        frees the slot, counts the reason
    Loaded           frees older weights; where there are newer ones, a Publication
    Heartbeat        remembers it; a peer that stops beating is away: its groups are granted again,
                     and when it is back a new Welcome says which it may go on with; in the end it
                     is forgotten, and the weights that it may read with it
    Goodbye          the same, for good
    (a stranger's)   WhoAreYou, so that it says hello; a result is taken all the same

This file is longer than most: its decisions share one ledger, one journal and the order of what is
sent.

What a peer is told follows from what the journal holds durably: a grant or an acknowledgement
leaves when its record, and with it every earlier one, is on disk. While the journal has no space no
result is taken in and nothing granted; afterwards each actor is welcomed again, and sends again
what was not acknowledged.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec

from mage_async.admission.concurrency import Concurrency
from mage_async.admission.counts import LedgerCounts
from mage_async.admission.groups_in_flight import OVER_AGE
from mage_async.admission.ledger import Accepted, SlotLedger, Unknown
from mage_async.admission.staleness import Lengths
from mage_async.admission.weight_leases import WeightUsers
from mage_async.errors import RunError
from mage_async.protocol.journal_records import Dropped, Head
from mage_async.protocol.messages import (
    Acknowledge,
    Goodbye,
    GroupDrop,
    GroupGrant,
    Heartbeat,
    Hello,
    Loaded,
    Message,
    Publication,
    Rival,
    TrialResult,
    Unwanted,
    Welcome,
    WhoAreYou,
)
from mage_async.tasks.curriculum import horizon
from mage_async.tasks.population import League, version_of
from mage_async.trajectory import Group
from mage_services.learner.coordinator_rules import CoordinatorRules, Journal, Tasks, head_of
from mage_services.learner.peer_registry import SILENCE_S, RegisteredPeer, freest, shares
from mage_services.transport.access import Peer
from mage_services.transport.channel import LearnerChannel, PeerGone

STALL_S = 2.0
"""Where so long passes between two ticks, it was this process that did not run."""
EARLIER = "peers of an earlier life"


@dataclass(slots=True)
class Coordinator:
    """See the module. `clock` gives seconds that never go back."""

    channel: LearnerChannel
    ledger: SlotLedger
    journal: Journal
    tasks: Tasks
    rules: CoordinatorRules
    clock: Callable[[], float]
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    greeted: asyncio.Event = field(default_factory=asyncio.Event)
    """Set whenever a peer says hello."""
    peers: dict[Peer, RegisteredPeer] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    """Sentences about what peers did wrong, oldest first, at most 20."""
    users: WeightUsers = field(default_factory=WeightUsers)
    """Who may still read which weights. An actor is told of one version at a time."""
    league: League = field(default_factory=League)
    """Versions of the policy that sit in opponents' seats, and ratings."""
    weights_of: Callable[[int], Path] = lambda version: Path(f"v{version}")
    """Where a version lies."""
    pace: Concurrency | None = None
    """Age-aware concurrency; None: as many groups in play as the ledger's rule admits."""
    lengths: Lengths = field(default_factory=Lengths)
    """Of trials since this learner began."""
    _published: Publication | None = None
    _for_actors: deque[Publication] = field(default_factory=deque)
    """The newest `lag + 1` publications, oldest first; actors play with the first."""
    _last_drop: str = ""
    _is_full: bool = False
    """The journal had no space when it was last looked at."""
    _opened_at: float = 0.0
    _ticked_at: float | None = None
    _is_closed: bool = False

    def take(self, peer: Peer, message: Message) -> None:
        """Decide on one message.

        Raises:
            RunError: too many groups were dropped in a row.
        """
        known = self.peers.get(peer)
        if known is not None:
            self._hear(peer, known)
        elif not isinstance(message, Hello | Goodbye):
            self._send(peer, WhoAreYou())
        match message:
            case Hello():
                self._greet(peer, message)
            case TrialResult():
                self._result(peer, message)
            case GroupDrop():
                self._drop(message)
            case Loaded():
                self._loaded(peer, message.version)
            case Heartbeat():
                if known is not None:
                    known.beat = message
            case Goodbye():
                self._gone(peer)
            case _:
                self._note(f"{peer}: a learner cannot take {type(message).__name__}")
        self._grant()

    def tick(self) -> None:
        """What only time tells: deadlines passed, peers fallen silent."""
        now = self.clock()
        self._forgive_stall(now)
        for sentence in self.channel.take_notes():
            self._note(sentence)
        for peer, known in list(self.peers.items()):
            self._look_after(peer, known, now)
        self._forget_strangers(now)
        self._expire(now)
        self._look_for_space()
        self._grant()

    def publish(self, publication: Publication) -> None:
        """Tell everyone of new weights, then grant what they free.

        An actor that is still loading hears of the newest when it has done so.
        """
        self._remember(publication)
        for peer, known in list(self.peers.items()):
            if known.hello.role == "actor":
                self._bring_up(peer)
            elif self._is_measured(publication.version):
                self._tell(peer, publication)
        self._grant()

    def unused(self, versions: list[int]) -> list[int]:
        """Of some published versions those that nobody may read any more."""
        newest = max((publication.version for publication in self._for_actors), default=0)
        kept = {publication.version for publication in self._for_actors} | self.rivals()
        return [version for version in self.users.unused(versions, newest) if version not in kept]

    def rivals(self) -> set[int]:
        """Versions whose weights somebody plays against, or will.

        A complete group needs none, in training or not: to a restarted learner groups that were in
        training are in flight again, and it must not miss weights that were removed meanwhile.
        """
        playing = {version_of(member) for member in self.ledger.members_in_play()}
        return self.league.kept() | {version for version in playing if version is not None}

    @property
    def is_open(self) -> bool:
        """The first weights are there."""
        return self._published is not None

    def open(self, *publications: Publication, earlier: Sequence[int] = ()) -> None:
        """The first weights are there: welcome those who waited.

        Several, oldest first, where a restarted learner has lagging actors. `earlier`: versions
        published before this learner began; peers may be reading them.
        """
        for version in earlier:
            self.users.tell(EARLIER, version)
        for publication in publications:
            self._remember(publication)
        self._opened_at = self.clock()
        for peer in list(self.peers):
            self._welcome(peer)
        self._grant()

    def take_batch(self) -> list[Group] | None:
        """The next step's groups, if they are all there."""
        return self.ledger.take_batch()

    def trained(self, version: int) -> None:
        """The oldest batch taken has become `version`, and the journal says so durably."""
        before = self.ledger.grants_in_flight()
        self.ledger.trained(version)
        for grant in sorted(before - self.ledger.grants_in_flight()):
            self.journal.append(Dropped(grant=grant, reason=OVER_AGE))
        self.journal.roll(self.head)

    def head(self) -> Head:
        """All a new segment of the journal has to begin with."""
        return head_of(self.ledger, self.rules, self.league)

    def keep_pace(self, busy_s: float) -> None:
        """A step kept the trainer busy so long: perhaps another number of groups may be in play."""
        if self.pace is not None:
            self.pace.trained(busy_s)
            self.ledger.concurrency = self.pace.limit

    def close(self) -> None:
        """Grant nothing more; what is played is still taken in."""
        self._is_closed = True

    def has_heard_all(self) -> bool:
        """Whether the evaluator and everyone who plays a group has said hello, since the learner's
        restart too: they can be said goodbye to.
        """
        roles = {known.hello.role for known in self.peers.values()}
        return "evaluator" in roles and self.ledger.owners() <= self.peers.keys()

    def dismiss(self, reason: str) -> None:
        """Say goodbye to everyone."""
        for peer in list(self.peers):
            self._send(peer, Goodbye(reason=reason))

    def counts(self) -> LedgerCounts:
        """What became of groups and trials so far."""
        return self.ledger.counts()

    def fates(self) -> dict[str, float]:
        """Of the trials that came in since this learner began: what became of the long ones, and of
        the time that all took.
        """
        in_flight = self.ledger.grants_with_slots()
        return {
            "length_bias": self.lengths.bias(in_flight),
            "wasted_share": self.lengths.wasted_share(in_flight),
        }

    def shares(self) -> dict[str, dict[str, float]]:
        """Seconds by state of each actor, as it last said."""
        return shares(self.peers)

    def _greet(self, peer: Peer, hello: Hello) -> None:
        for other, known in list(self.peers.items()):
            if known.hello.name == hello.name and other != peer:
                self._gone(other)  # the same process, restarted
        for owner in self.ledger.owners():
            if owner.startswith(f"{hello.name}/") and owner != peer:
                self.ledger.peer_gone(owner)  # the same, while there was no learner
        self.peers[peer] = RegisteredPeer(hello, self.clock())
        self.greeted.set()
        if self._published is not None:
            self._welcome(peer)

    def _welcome(self, peer: Peer) -> None:
        """Take a peer in, and repeat its grants: it may not have heard of all."""
        self.peers[peer].last_heard = self.clock()  # until now it was we who were silent
        self._say_what_it_keeps(peer)
        now, deadline_s = self.clock(), self.rules.deadline_s
        mine = self.ledger.grants_of(peer, now=now, deadline_s=deadline_s)
        self._after(peer, *map(self._with_rival, mine))

    def _say_what_it_keeps(self, peer: Peer) -> None:
        assert self._published is not None
        is_actor = self.peers[peer].hello.role == "actor"
        latest = self._for_actors[0] if is_actor else self._published
        keeps = self.ledger.playing(peer)
        self.users.tell(peer, latest.version)
        self._send(peer, Welcome(version=latest.version, weights_path=latest.path, keeps=keeps))

    def _hear(self, peer: Peer, known: RegisteredPeer) -> None:
        """It lives; one that was away learns that its groups are no longer its own."""
        was_away, known.is_away = known.is_away, False
        known.last_heard = self.clock()
        if was_away and self._published is not None:
            self._say_what_it_keeps(peer)

    def _forgive_stall(self, now: float) -> None:
        """Nobody was silent, or late, while it was we who did not listen."""
        gap = 0.0 if self._ticked_at is None else now - self._ticked_at
        self._ticked_at = now
        if gap > STALL_S:
            self._note(f"the learner itself did not run for {gap:.1f} s")
            self._opened_at += gap
            self.ledger.postpone(gap, now + self.rules.deadline_s)
            for known in self.peers.values():
                known.last_heard = now

    def _look_after(self, peer: Peer, known: RegisteredPeer, now: float) -> None:
        """Whether it speaks. Nothing is sent to one that is away, so nothing else tells its end: a
        machine that vanished would keep the weights it was told of, and its place, for ever.
        """
        if self._published is not None and known.is_silent(now):
            self._note(f"{peer}: silent for {known.patience_s():g} s")
            known.is_away = True
            self.ledger.peer_gone(peer)
        elif known.is_lost(now):
            self._note(f"{peer}: forgotten, it has been silent for {now - known.last_heard:.0f} s")
            self.channel.forget(peer)
            self._gone(peer)

    def _result(self, peer: Peer, result: TrialResult) -> None:
        if self._look_for_space():
            return  # it stays with its peer
        verdict = self.ledger.receive(result)
        if isinstance(verdict, Unknown):
            self._refuse(peer, result, verdict.reason)
            return
        self.lengths.arrived(result.grant, result.trial.index, result.trial.duration_s)
        is_first = isinstance(verdict, Accepted)
        answer = Acknowledge(
            grant=result.grant,
            epoch=result.epoch,
            trial=result.trial.index,
            is_duplicate=not is_first,
        )
        if is_first:
            self.journal.append(result, partial(self._send, peer, answer))
        else:
            self._after(peer, answer)  # the first one may not be durable yet
        if is_first and verdict.is_complete:
            if self.pace is not None:
                self.pace.completed(*self.ledger.life(result.grant, self.clock()))
            self.arrived.set()

    def _loaded(self, peer: Peer, version: int) -> None:
        """A peer draws with a version; an actor hears of newer ones now."""
        self.users.loaded(peer, version)
        known = self.peers.get(peer)
        if known is not None and known.hello.role == "actor":
            self._bring_up(peer)

    def _bring_up(self, peer: Peer) -> None:
        """Tell an actor what to draw with, unless it does already or is loading something."""
        target, has = self._for_actors[0], self.users.version_of(peer)
        if not self.users.is_loading(peer) and (has is None or has < target.version):
            self._tell(peer, target)

    def _tell(self, peer: Peer, publication: Publication) -> None:
        self.users.tell(peer, publication.version)
        self._send(peer, publication)

    def _refuse(self, peer: Peer, result: TrialResult, reason: str) -> None:
        self._note(f"{peer}: {reason}")
        index = result.trial.index
        self._send(
            peer, Unwanted(grant=result.grant, epoch=result.epoch, trial=index, reason=reason)
        )

    def _drop(self, drop: GroupDrop) -> None:
        if self.ledger.drop(drop.grant, drop.epoch, drop.reason):
            self.journal.append(Dropped(grant=drop.grant, reason=drop.reason))
            self._last_drop = drop.reason
            self.arrived.set()  # a later group may now be among the oldest
            self._check_drops()

    def _look_for_space(self) -> bool:
        """Whether the journal is full; when it is no longer, ask for what was not taken in."""
        was_full, reason = self._is_full, self.journal.why_full()
        self._is_full = bool(reason)
        if reason and not was_full:
            self._note(f"nothing is taken in or granted: {reason}")
            self.arrived.set()  # a checkpoint may make space
        if was_full and not reason:
            for peer, known in list(self.peers.items()):
                if known.hello.role == "actor" and self._published is not None:
                    self._welcome(peer)
        return self._is_full

    def _forget_strangers(self, now: float) -> None:
        """Owners from before a restart who have not come back."""
        if self._published is not None and now - self._opened_at > SILENCE_S:
            self.users.gone(EARLIER)
            for owner in self.ledger.owners() - self.peers.keys():
                self._note(f"{owner}: has not come back after the learner's restart")
                self.ledger.peer_gone(owner)

    def _expire(self, now: float) -> None:
        before, late = self.ledger.grants_in_flight(), self.ledger.late(now)
        self.ledger.expire(now)
        for peer in late & self.peers.keys():
            if not self.peers[peer].is_away:
                self._say_what_it_keeps(peer)
        for grant in sorted(before - self.ledger.grants_in_flight()):
            self._last_drop = self.ledger.expiry_reason()
            self.journal.append(Dropped(grant=grant, reason=self._last_drop))
            self.arrived.set()
        self._check_drops()

    def _check_drops(self) -> None:
        counts = self.ledger.counts()
        if counts.drops_in_a_row >= self.rules.max_drops_in_a_row:
            raise RunError(
                f"{counts.drops_in_a_row} groups in a row were dropped; the last one: "
                f"{self._last_drop}"
            )

    def _grant(self) -> None:
        """Give lapsed groups, then free slots, to the actor with the most free credits."""
        if self._published is None or self._is_full or self._is_closed:
            return
        if self.league.wants(self.ledger.version):
            return  # `publish` comes back here
        while (peer := freest(self.peers, self.ledger.num_playing)) is not None:
            lapsed = self.ledger.lapsed()
            if lapsed:
                grant = self.ledger.grant_again(
                    lapsed[0], peer=peer, now=self.clock(), deadline_s=self.rules.deadline_s
                )
            elif self.ledger.may_grant():
                grant = self._grant_new(peer)
            else:
                return
            grant = self._with_rival(grant)
            self.journal.append(self.ledger.granted(grant), partial(self._send, peer, grant))

    def _with_rival(self, grant: GroupGrant) -> GroupGrant:
        """Say where the weights of the opponent lie, where it is a version of the policy."""
        version = version_of(grant.member)
        if version is None:
            return grant
        path = str(self.weights_of(version).resolve())
        return msgspec.structs.replace(grant, rival=Rival(version=version, path=path))

    def _grant_new(self, peer: Peer) -> GroupGrant:
        rules, version = self.rules, self.ledger.version
        played = horizon(rules.curriculum, version, rules.num_episodes)
        return self.ledger.grant(
            self.tasks.task(self.ledger.next_grant),
            num_episodes=played.num_episodes,
            peer=peer,
            now=self.clock(),
            deadline_s=rules.deadline_s,
            max_turns=played.max_turns,
        )

    def _remember(self, publication: Publication) -> None:
        self._published = publication
        self._for_actors.append(publication)
        while len(self._for_actors) > self.rules.lag + 1:
            self._for_actors.popleft()

    def _is_measured(self, version: int) -> bool:
        every = self.rules.evaluate_every
        return version == self.rules.last_version or (every > 0 and version % every == 0)

    def _send(self, peer: Peer, message: Message) -> None:
        try:
            self.channel.send(peer, message)
        except PeerGone as gone:
            self._note(str(gone))
            self._gone(peer)

    def _after(self, peer: Peer, *messages: Message) -> None:
        """Send when what was appended so far is durable."""
        for message in messages:
            self.journal.after(partial(self._send, peer, message))

    def _gone(self, peer: Peer) -> None:
        self.peers.pop(peer, None)
        self.users.gone(peer)
        self.ledger.peer_gone(peer)

    def _note(self, sentence: str) -> None:
        self.faults = [*self.faults[-19:], sentence]
