"""Answer each message of a peer at once, grant groups, and collect their trials.

A peer is an actor or the evaluator. A group is some trials of one task, which one actor plays under
a grant of the learner; if the actor fails, the group is granted again, and its epoch counts how
often. The learner calls `take` for each message, `tick` about twice a second, and `announce` for
new weights; none of them waits. The event `arrived` is set whenever a batch may have become
complete.
"""

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial

import msgspec

from mage_async.admission.concurrent_groups import Concurrency
from mage_async.admission.ledger import NO_VARIANCE, Accepted, Duplicate, Ledger, Unknown
from mage_async.config import config_file
from mage_async.config.schema import Config
from mage_async.errors import MAKE_ROOM, DeterministicFailure
from mage_async.methods.method import Methods
from mage_async.protocol.journal_records import Dropped, LoadedWeights, Published, SegmentHeader
from mage_async.protocol.messages import (
    Acknowledge,
    EpisodeResult,
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
from mage_async.results.progress import ProgressCounts, drop_kind
from mage_async.tasks.league import League, version_of
from mage_async.tasks.task_stream import MatchedTasks
from mage_async.trajectory import Group
from mage_services.journal.writer import JournalFile
from mage_services.transport.access_control import Peer
from mage_services.transport.channels import LearnerChannel, PeerGone
from mage_services.weights.weight_store import UNKNOWN_PEERS, WeightStore

#     message of a peer   answer of the coordinator
#     Hello               Welcome, once there are weights, and then the peer's grants
#     TrialResult         journal the trial, then Acknowledge; Unwanted if it was never granted
#     EpisodeResult       keep the finished episodes in memory, for the actor that is granted the
#                         group next
#     GroupDrop           drop the group
#     Loaded              release older weights; announce newer ones with Publication
#     Heartbeat           note that the peer lives
#     Goodbye             forget the peer; its groups are granted again
#     any, if unknown     WhoAreYou, so that the peer says Hello; a result is accepted even so
#
# Durability. A grant is sent, and a trial is acknowledged, only after the journal has made its
# record durable, and with it every earlier record. So a crash of the learner loses no grant and no
# acknowledgement that it has sent. While the journal's disk is full, no result is accepted and no
# group is granted; afterwards every actor is welcomed again and sends again all unacknowledged
# results.

# The silence below is that of a peer. `processes/supervised_process.py` has that of a process
# (`supervision.silence_s`), `transport/sockets.py` that of a connection (`CONNECTION_SILENCE_MS`).

SILENCE_S = 4.0
"""Seconds without a message after which an actor counts as away: its groups are granted again."""
FIRST_HEARTBEAT_S = 60.0
"""Seconds without a message after which an actor counts as away if it has not sent a heartbeat yet:
it is still starting."""
LOST_INTERVALS = 30
"""Silence after which an actor is forgotten, as a multiple of the silence after which it counts as
away: 2 minutes, or 30 minutes if it has not sent a heartbeat yet. The supervisor normally ends a
silent local actor earlier."""
MAX_FAULTS = 20
"""Sentences kept for the terminal and the run log."""
STALL_S = 2.0
"""Seconds between two ticks above which this process itself counts as having been stopped."""
MAX_DROPS_IN_A_ROW = 50
"""If so many groups are dropped in a row, without a complete one between them, the run ends with
the reason of the last drop. So a run that trains on nothing stops within minutes, and a run that
loses a share of its groups goes on."""


def segment_header(
    ledger: Ledger, config: Config, league: League, methods: Methods, sources: dict[str, str]
) -> SegmentHeader:
    """Return the state that a new segment of the journal begins with."""
    return msgspec.structs.replace(
        ledger.segment_header(config_file.dump(config), config.admission.grant_deadline_s),
        population=league.state() if league.is_on else None,
        methods=methods.states(),
        sources=sources,
    )


@dataclass(slots=True)
class KnownPeer:
    """Describe a peer that has said Hello."""

    hello: Hello
    last_message_at: float
    """When its last message came, by the coordinator's clock."""
    heartbeat: Heartbeat | None = None
    """The last heartbeat; None before the first."""
    is_away: bool = False
    """Whether the peer was silent for too long: it is granted nothing until it sends a message."""

    @property
    def is_actor(self) -> bool:
        """Whether the peer plays groups; otherwise it is the evaluator."""
        return self.hello.role == "actor"

    @property
    def is_present_actor(self) -> bool:
        """Whether the peer is an actor that is not away."""
        return self.is_actor and not self.is_away

    def patience_s(self) -> float:
        """Return the seconds for which the peer may be silent before it counts as away."""
        return FIRST_HEARTBEAT_S if self.heartbeat is None else SILENCE_S

    def is_newly_silent(self, now: float) -> bool:
        """Return whether an actor has been silent for too long and is not marked as away yet."""
        return self.is_present_actor and now - self.last_message_at > self.patience_s()

    def is_lost(self, now: float) -> bool:
        """Return whether an actor has been away long enough to be forgotten."""
        return self.is_away and now - self.last_message_at > LOST_INTERVALS * self.patience_s()


@dataclass(slots=True)
class Coordinator:
    """Answer the messages of peers, and decide which actor plays which group."""

    channel: LearnerChannel
    ledger: Ledger
    """The groups in flight (granted, and neither trained nor dropped), and who plays them."""
    journal: JournalFile
    tasks: MatchedTasks
    """Chooses the task of each new group, and its opponent."""
    config: Config
    clock: Callable[[], float]
    """Returns the time in seconds; it never goes back."""
    weights: WeightStore
    """The published versions, and which peer still needs which of them."""
    league: League = field(default_factory=League)
    """Past versions of the policy that play opponents' seats, and ratings."""
    methods: Methods = field(default_factory=Methods)
    """The active methods, with their states; they may shorten a group or add guidance to it."""
    concurrency: Concurrency | None = None
    """Limits the incomplete groups by the age of tokens; None: only the admission policy does."""
    has_advantage: Callable[[Group], bool] = lambda group: False
    """Returns whether a turn of a group whose trials all earned the same has an advantage."""
    max_drops_in_a_row: int = MAX_DROPS_IN_A_ROW
    """Number of groups dropped in a row that ends the run."""
    cut_length: int | None = None
    """Number of tokens at which an action is cut off; None if none is."""
    sources: dict[str, str] = field(default_factory=dict)
    """Digests of the sources of the user's own classes when this process began. They are not read
    again later, because actors go on with the classes that they have imported."""
    arrived: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    """Set whenever a batch may have become complete."""
    greeted: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    """Set whenever a peer says Hello."""
    peers: dict[Peer, KnownPeer] = field(default_factory=dict, init=False)
    """Peers that have said Hello, by the names of their connections."""
    faults: list[str] = field(default_factory=list, init=False)
    """Sentences for the user about what went wrong, oldest first, at most `MAX_FAULTS`."""
    progress: ProgressCounts = field(default_factory=ProgressCounts, init=False)
    """What has arrived since this process began."""
    _loaded: list[LoadedWeights] = field(default_factory=list, init=False)
    """Records of engines that loaded weights, since `take_load_records` was last called."""
    _actors: dict[int, str] = field(default_factory=dict, init=False)
    """The name of the actor that completed each group, by grant."""
    _is_full: bool = field(default=False, init=False)
    """Whether the journal had no space when `_look_for_space` last asked it."""
    _opened_at: float = field(default=0.0, init=False)
    """When this process announced its first weights, plus the seconds of every stall that
    `_forgive_stall` has noticed."""
    _ticked_at: float | None = field(default=None, init=False)
    """When `tick` was last called."""
    _is_closed: bool = field(default=False, init=False)
    """Whether no group is granted any more."""

    # What the learner calls.

    def take(self, peer: Peer, message: Message) -> None:
        """Handle one message of a peer: record what it says, and answer it.

        Raises:
            DeterministicFailure: too many groups were dropped in a row.
        """
        known = self.peers.get(peer)
        if known is not None:
            self._note_sign_of_life(peer, known)
        elif not isinstance(message, Hello | Goodbye):
            self._send(peer, WhoAreYou())
        match message:
            case Hello():
                self._take_hello(peer, message)
            case TrialResult():
                if self._look_for_space():  # otherwise the peer keeps the result
                    self._take_result(peer, message)
            case EpisodeResult():
                self.ledger.keep(message)
            case GroupDrop():
                turns = message.num_turns
                if self.ledger.drop(message.grant, message.epoch, message.reason, turns):
                    self._record_drops(
                        Dropped(grant=message.grant, reason=message.reason, num_turns=turns)
                    )
            case Loaded():
                self._take_loaded(peer, message)
            case Heartbeat():
                if known is not None:
                    known.heartbeat = message
                    if known.is_actor:
                        self.progress.add_heartbeat(message.name, message.counters)
                    for grant, epoch, num_turns in message.turns:
                        self.ledger.note_turns(grant, epoch, num_turns)
            case Goodbye():
                self._remove(peer)
            case _:
                self.note(f"{peer}: a learner cannot take {type(message).__name__}")
        self._grant()

    def tick(self) -> None:
        """Notice missed deadlines, silent peers and a full disk, which no message reports.

        Raises:
            DeterministicFailure: too many groups were dropped in a row.
        """
        now = self.clock()
        self._forgive_stall(now)
        for sentence in self.channel.take_notes():
            self.note(sentence)
        self._look_after_peers(now)
        self._forget_peers_of_earlier_process(now)
        self._expire(now)
        self._look_for_space()
        self._grant()

    def announce(self, publication: Publication) -> None:
        """Journal that the weights of a version can be read, and announce them to the peers.

        The first announcement is of the version that this process begins with. It opens the store
        of weights, so the peers that waited for weights are welcomed; with `admission.lag`, actors
        begin with older versions. The first version is journaled only if the league awaits it as an
        opponent: otherwise the record would change nothing.
        """
        version, is_open = publication.version, self.weights.is_open
        if is_open or self.league.awaits(version):
            self.journal.append(
                Published(version=version, path=publication.path, digest=publication.digest)
            )
        self.league.published(version)
        if is_open:
            self.publish(publication)
        else:
            self.open(*self.weights.publications_before(version), publication)

    def publish(self, publication: Publication) -> None:
        """Announce new weights to every peer, then grant the groups that may be granted now.

        To an actor that is still loading, the newest weights are announced when it is done. To the
        evaluator, only the versions that it plays are announced.
        """
        self.weights.add(publication)
        is_evaluated = self.config.evaluation.is_due(publication.version, self.config.learner.steps)
        for peer, known in list(self.peers.items()):
            if known.is_actor:
                self._announce_newest(peer)
            elif is_evaluated:
                self._announce(peer, publication)
        self._grant()

    def open(self, *publications: Publication) -> None:
        """Welcome the peers that waited for the first weights.

        Args:
            publications: Oldest first; more than one if the learner was restarted and
                `admission.lag` lets actors use older weights.
        """
        self.weights.open(*publications)
        self._opened_at = self.clock()
        for peer in list(self.peers):
            self._welcome_and_repeat_grants(peer)
        self._grant()

    def trained(self, version: int) -> None:
        """Remove the oldest batch in training from the groups in flight: its step, which made
        `version`, is durable in the journal. Groups that are now too old are dropped.
        """
        for dropped in self.ledger.trained(version):
            self.journal.append(dropped)
        self.journal.roll(
            lambda: segment_header(
                self.ledger, self.config, self.league, self.methods, self.sources
            )
        )

    def limit_concurrency(self, step_s: float) -> None:
        """Set how many groups may be incomplete at once.

        Args:
            step_s: Seconds for which the last step kept the trainer busy.
        """
        if self.concurrency is not None:
            self.concurrency.record_step(step_s)
            self.ledger.max_concurrent_groups = self.concurrency.limit

    def unused(self, versions: Collection[int]) -> list[int]:
        """Return the versions whose weights no peer and no opponent needs."""
        return self.weights.unused(versions, self.rivals())

    def rivals(self) -> set[int]:
        """Return the versions of the policy that are opponents of groups, now or later."""
        # Opponents of complete groups are left out, because they have played. So a restarted
        # learner needs no weights that were removed, although the groups that were in training are
        # in flight again.
        playing = {version_of(member) for member in self.ledger.incomplete_members()}
        return self.league.kept() | {version for version in playing if version is not None}

    def close(self) -> None:
        """Grant no more groups; results are still accepted."""
        self._is_closed = True

    def has_all_hellos(self) -> bool:
        """Return whether the evaluator and every peer that plays a group have said Hello.

        After a restart of the learner this takes a while, and `dismiss` reaches only these peers.
        """
        roles = {known.hello.role for known in self.peers.values()}
        return "evaluator" in roles and self.ledger.playing_peers() <= self.peers.keys()

    def dismiss(self, reason: str) -> None:
        """Send a Goodbye to every peer."""
        for peer in list(self.peers):
            self._send(peer, Goodbye(reason=reason))

    # What the run log reads.

    def blocked_s(self) -> dict[str, dict[str, float]]:
        """Return the seconds that each actor spent in each state, from its last heartbeat."""
        return {
            known.hello.name: dict(known.heartbeat.blocked_s)
            for known in self.peers.values()
            if known.heartbeat is not None
        }

    def present_actors(self) -> tuple[int, int]:
        """Return the number of actors that are not silent, and of those that load their engine."""
        present = [known for known in self.peers.values() if known.is_present_actor]
        # An actor's heartbeats have no counters until its engine is loaded.
        num_loading = sum(not (each.heartbeat and each.heartbeat.counters) for each in present)
        return len(present), num_loading

    def take_load_records(self) -> list[LoadedWeights]:
        """Return and forget the records of engines that loaded weights since the last call."""
        taken, self._loaded = self._loaded, []
        return taken

    def take_actors(self) -> dict[int, str]:
        """Return the name of the actor that completed each group, by grant.

        Forgets the groups that are not in flight.
        """
        known, in_flight = self._actors, self.ledger.grants_in_flight()
        self._actors = {grant: actor for grant, actor in known.items() if grant in in_flight}
        return known

    def note(self, sentence: str) -> None:
        """Keep a sentence about what went wrong, which the terminal and the run's files show."""
        self.faults = [*self.faults[1 - MAX_FAULTS :], sentence]

    # Peers that come and go.

    def _take_hello(self, peer: Peer, hello: Hello) -> None:
        """Register a new or returned peer; forget the process that had its name before."""
        # A process that was started again has a new connection, and has lost its groups. If it was
        # started while the learner was down, only the ledger knows its earlier connection.
        for other, known in list(self.peers.items()):
            if known.hello.name == hello.name and other != peer:
                self._remove(other)
        for owner in self.ledger.playing_peers():
            if owner.startswith(f"{hello.name}/") and owner != peer:
                self.ledger.peer_gone(owner)
        self.peers[peer] = KnownPeer(hello, self.clock())
        self._set_quota(peer)
        total, most = self.ledger.total_quota(), self.ledger.max_concurrent_groups
        # Noted once, when this actor's quota raises the sum above the limit.
        if most is not None and total - hello.group_quota <= most < total:
            self.note(
                f"the actors could play {total} groups at a time, and "
                "admission.max_groups_in_play and over_age_target allow "
                f"{most}: some actors will be idle"
            )
        self.greeted.set()
        if self.weights.is_open:
            self._welcome_and_repeat_grants(peer)

    def _welcome_and_repeat_grants(self, peer: Peer) -> None:
        """Welcome a peer, and repeat its grants: it may not have received all of them."""
        self.peers[peer].last_message_at = self.clock()  # until now the learner kept it waiting
        self._welcome(peer)
        deadline_s = self.config.admission.grant_deadline_s
        for grant in self.ledger.renew_grants(peer, now=self.clock(), deadline_s=deadline_s):
            self._send_when_durable(peer, self._with_rival(grant))

    def _welcome(self, peer: Peer) -> None:
        """Tell a peer which weights to sample with, and which groups it goes on playing."""
        newest = self.weights.welcome(peer, self.peers[peer].hello.role)
        keeps = self.ledger.played_by(peer)
        self._send(peer, Welcome(version=newest.version, weights_path=newest.path, keeps=keeps))

    def _note_sign_of_life(self, peer: Peer, known: KnownPeer) -> None:
        """Note that a peer has sent a message; one that was away may be granted groups again."""
        was_away, known.is_away = known.is_away, False
        known.last_message_at = self.clock()
        if was_away:
            self._set_quota(peer)
            if self.weights.is_open:
                self._welcome(peer)  # its groups were taken away when it was marked as away

    def _set_quota(self, peer: Peer) -> None:
        """Set how many groups a peer may play: its quota for a present actor, otherwise none."""
        known = self.peers.get(peer)
        self.ledger.set_quota(
            peer, known.hello.group_quota if known and known.is_present_actor else 0
        )

    def _look_after_peers(self, now: float) -> None:
        """Mark silent actors as away, and forget those that were away for long.

        Nothing is sent to an actor that is away, so no failed send shows that it has ended. If it
        were not forgotten, an actor that vanished would keep its leases on weights for ever.
        """
        for peer, known in list(self.peers.items()):
            if self.weights.is_open and known.is_newly_silent(now):
                self.note(f"{peer}: silent for {known.patience_s():g} s")
                known.is_away = True
                self._set_quota(peer)
                self.ledger.peer_gone(peer)
            elif known.is_lost(now):
                silent_s = now - known.last_message_at
                self.note(f"{peer}: forgotten, it has been silent for {silent_s:.0f} s")
                self.channel.forget(peer)
                self._remove(peer)

    def _forget_peers_of_earlier_process(self, now: float) -> None:
        """Take groups and leases on weights from peers that have not come back after a restart of
        the learner.

        The leases are kept until the evaluator has come back, however long it is busy: without the
        weights of the evaluations in its queue it would fail. The supervisor restarts an evaluator
        that has ended.
        """
        if self.weights.is_open and now - self._opened_at > SILENCE_S:
            if any(not known.is_actor for known in self.peers.values()):
                self.weights.leases.release(UNKNOWN_PEERS)
            for owner in self.ledger.playing_peers() - self.peers.keys():
                self.note(
                    f"{owner} played groups before the learner's start and has not come back: its "
                    "groups are granted again"
                )
                self.ledger.peer_gone(owner)

    def _forgive_stall(self, now: float) -> None:
        """Do not count time in which this process did not run as silence of the peers. Postpone the
        deadlines of groups by such time, and by time in which the journal is full.
        """
        gap = 0.0 if self._ticked_at is None else now - self._ticked_at
        self._ticked_at = now
        if gap > STALL_S:
            self.note(f"the learner itself did not run for {gap:.1f} s")
            self._opened_at += gap
            for known in self.peers.values():
                known.last_message_at = now
        if gap > STALL_S or self._is_full:  # no result was accepted
            self.ledger.postpone_deadlines(gap, now + self.config.admission.grant_deadline_s)

    def _remove(self, peer: Peer) -> None:
        """Forget a peer that has ended, for good or until it says Hello again."""
        self.peers.pop(peer, None)
        self._set_quota(peer)
        self.weights.leases.release(peer)
        self.ledger.peer_gone(peer)

    def _send(self, peer: Peer, message: Message) -> None:
        """Send at once; a peer that cannot be reached has ended."""
        try:
            self.channel.send(peer, message)
        except PeerGone as gone:
            self.note(str(gone))
            self._remove(peer)

    def _send_when_durable(self, peer: Peer, message: Message) -> None:
        """Send once all records appended so far are durable."""
        self.journal.after(partial(self._send, peer, message))

    # Grants and drops.

    def _grant(self) -> None:
        """Grant lapsed groups (incomplete, played by nobody), then new ones, each to the actor with
        the largest unused part of its quota.
        """
        if not self.weights.is_open or self._is_full or self._is_closed:
            return
        # The newest version becomes an opponent as soon as its weights are on disk. No group is
        # granted until then, so that a group's opponent does not depend on the speed of the disk.
        # `publish` calls this method again.
        if self.league.awaits(self.ledger.version):
            return
        while (peer := self.ledger.peer_with_largest_free_quota()) is not None:
            if (grant := self._next_grant(peer)) is None:
                return
            grant = self._with_rival(grant)
            record = self.ledger.grant_record(grant)
            self.journal.append(record, partial(self._send_grant, peer, grant))

    def _send_grant(self, peer: Peer, grant: GroupGrant) -> None:
        """Send a grant, and before it the finished episodes that earlier actors have played."""
        for result in self.ledger.episodes_of(grant.grant):
            self._send(peer, result)
        self._send(peer, grant)

    def _next_grant(self, peer: Peer) -> GroupGrant | None:
        """Grant the oldest lapsed group, or else a new one; None if no group may be granted."""
        ledger, config = self.ledger, self.config
        now, deadline_s = self.clock(), config.admission.grant_deadline_s
        if lapsed := ledger.lapsed():
            return ledger.grant_again(lapsed[0], peer=peer, now=now, deadline_s=deadline_s)
        if not ledger.may_grant():
            return None
        horizon = self.methods.horizon(ledger.version, config.trial.episodes)
        number = ledger.next_grant
        task = self.tasks.task(number, ledger.version)
        return ledger.grant(
            task,
            num_episodes=horizon.num_episodes,
            peer=peer,
            now=now,
            deadline_s=deadline_s,
            max_turns=horizon.max_turns,
            guidance=self.methods.guidance(number, task),
        )

    def _with_rival(self, grant: GroupGrant) -> GroupGrant:
        """Add the path of the opponent's weights to a grant whose opponent is a past version of the
        policy.
        """
        version = version_of(grant.member)
        if version is None:
            return grant
        rival = Rival(version=version, path=str(self.weights.path(version)))
        return msgspec.structs.replace(grant, rival=rival)

    def _expire(self, now: float) -> None:
        """Take groups from actors that missed a deadline, and welcome these again, with the groups
        that they keep. Groups that missed too many deadlines are dropped.
        """
        late, dropped = self.ledger.late_peers(now), self.ledger.expire(now)
        if late:
            deadline_s, most = self.config.admission.grant_deadline_s, self.ledger.max_expiries
            note = self.progress.first_missed_deadline(deadline_s, most)
            if note is not None:
                self.note(note)
        for peer in late & self.peers.keys():
            if not self.peers[peer].is_away:
                self._welcome(peer)
        self._record_drops(*dropped)

    def _record_drops(self, *records: Dropped) -> None:
        """Journal drops, and note the first drop of each kind.

        Raises:
            DeterministicFailure: too many groups were dropped in a row.
        """
        for record in records:
            self.journal.append(record)
            if (note := self.progress.first_drop(record.reason)) is not None:
                self.note(note)
            self.arrived.set()  # without the dropped group, later ones may be a batch
        counts, most = self.ledger.counts(), self.max_drops_in_a_row
        if counts.drops_in_a_row >= most:
            cure = drop_kind(counts.last_drop).cure or "Mend the cause."
            raise DeterministicFailure(
                f"{counts.drops_in_a_row} groups in a row were dropped, and {most} end a run. The "
                f"last drop: {counts.last_drop.rstrip('.')}. {cure} Then go on with --resume"
            )

    # Results.

    def _take_result(self, peer: Peer, result: TrialResult) -> None:
        """Journal a finished trial, and answer its peer once the trial is durable."""
        grant, epoch, index = result.grant, result.epoch, result.trial.index
        acknowledge = partial(Acknowledge, grant=grant, epoch=epoch, trial=index)
        match self.ledger.receive(result):
            case Accepted(is_complete=is_complete):
                for trial in result.trials():
                    self.progress.add_trial(trial)
                    if (note := self.progress.first_cut(trial, self.cut_length)) is not None:
                        self.note(note)
                answer = acknowledge(is_duplicate=False)
                self.journal.append(result, partial(self._send, peer, answer))
                if is_complete:
                    self._note_complete(peer, grant)
            case Duplicate():
                # The first result for this trial may not be durable yet.
                self._send_when_durable(peer, acknowledge(is_duplicate=True))
            case Unknown(reason=reason):
                self.note(f"{peer}: {reason}")
                self._send(peer, Unwanted(grant=grant, epoch=epoch, trial=index, reason=reason))

    def _note_complete(self, peer: Peer, grant: int) -> None:
        """Note that all trials of a group have arrived. If all earned the same and have no
        advantages, drop the group, so that another is granted in its place.
        """
        if (known := self.peers.get(peer)) is not None:
            self._actors[grant] = known.hello.name
        if self.concurrency is not None:
            self.concurrency.record_group(*self.ledger.playing_time(grant, self.clock()))
        most = self.config.admission.replaced_groups
        if self.ledger.drop_if_no_variance(grant, most, self.has_advantage):
            self.journal.append(Dropped(grant=grant, reason=NO_VARIANCE))
        self.arrived.set()

    def _look_for_space(self) -> bool:
        """Return whether the journal has space; once it has some again, welcome all actors.

        The actors then send again the results that were not accepted.
        """
        was_full, reason = self._is_full, self.journal.why_full()
        self._is_full = bool(reason)
        if reason and not was_full:
            self.note(
                f"no result is accepted and no group is granted: {reason}. {MAKE_ROOM}; "
                "`journal.max_bytes` bounds the journal"
            )
            self.arrived.set()  # the training loop may free space with a checkpoint
        if was_full and not reason:
            for peer, known in list(self.peers.items()):
                if known.is_actor and self.weights.is_open:
                    self._welcome_and_repeat_grants(peer)
        return not self._is_full

    # Weights.

    def _take_loaded(self, peer: Peer, message: Loaded) -> None:
        """Release older weights, journal the engine's fingerprint, and announce newer weights."""
        self.weights.leases.loaded(peer, message.version)
        if message.digest:
            record = LoadedWeights(peer=peer, **msgspec.structs.asdict(message))
            self.journal.append(record)
            self._loaded.append(record)
            if message.num_retries:
                self.note(
                    f"{peer}: had to read the weights of version {message.version} again, because "
                    "the first weights had another fingerprint"
                )
        known = self.peers.get(peer)
        if known is not None and known.is_actor:
            self._announce_newest(peer)

    def _announce_newest(self, peer: Peer) -> None:
        """Announce weights to an actor, unless it has the newest or is loading some."""
        if (publication := self.weights.next_for(peer)) is not None:
            self._announce(peer, publication)

    def _announce(self, peer: Peer, publication: Publication) -> None:
        """Announce weights to a peer; they are kept until the peer has loaded newer ones."""
        self.weights.leases.announce(peer, publication.version)
        self._send(peer, publication)
