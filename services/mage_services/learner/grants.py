"""Grants: which group is played next and by which actor, and which groups are given up.

Every decision is journaled; an actor hears of a grant when its record is durable.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec

from mage_async.admission.ledger import SlotLedger
from mage_async.errors import DeterministicFailure
from mage_async.graph_memory.memory import GraphMemory
from mage_async.protocol.journal_records import Dropped
from mage_async.protocol.messages import GroupDrop, GroupGrant, Rival
from mage_async.tasks.curriculum import horizon
from mage_async.tasks.population import version_of
from mage_services.learner.coordinator_rules import CoordinatorRules, Journal, Tasks
from mage_services.learner.peer_registry import PeerRegistry
from mage_services.transport.access import Peer
from mage_services.weights.weight_store import WeightStore


@dataclass(slots=True)
class Grants:
    """See the module."""

    registry: PeerRegistry
    ledger: SlotLedger
    journal: Journal
    tasks: Tasks
    rules: CoordinatorRules
    clock: Callable[[], float]
    weights: WeightStore
    memory: GraphMemory
    arrived: asyncio.Event
    """Set whenever a batch may have become complete, as when a group before it is dropped."""

    def hand_out(self) -> None:
        """Give lapsed groups, then free slots, to the actor with the most free credits."""
        while (peer := self.ledger.freest()) is not None:
            if (grant := self._next(peer)) is None:
                return
            grant = self._with_rival(grant)
            send = partial(self.registry.send, peer, grant)
            self.journal.append(self.ledger.granted(grant), send)

    def repeat(self, peer: Peer) -> None:
        """Send a peer the grants it plays once more: it may not have heard of all."""
        mine = self.ledger.grants_of(peer, now=self.clock(), deadline_s=self.rules.deadline_s)
        self.registry.send_when_durable(peer, *map(self._with_rival, mine))

    def drop(self, drop: GroupDrop) -> None:
        """A peer gives a group up.

        Raises:
            DeterministicFailure: too many groups were dropped in a row.
        """
        if self.ledger.drop(drop.grant, drop.epoch, drop.reason):
            self._dropped(drop.grant, drop.reason)
            self._check_drops()

    def expire(self, now: float) -> None:
        """Take back what was not played in time, and tell the peers that were late.

        Raises:
            DeterministicFailure: too many groups were dropped in a row.
        """
        late, dropped = self.ledger.late(now), self.ledger.expire(now)
        peers = self.registry.peers
        for peer in late & peers.keys():
            if not peers[peer].is_away:
                self.registry.welcome(peer)
        for grant in dropped:
            self._dropped(grant, self.ledger.expiry_reason())
        self._check_drops()

    def _dropped(self, grant: int, reason: str) -> None:
        self.journal.append(Dropped(grant=grant, reason=reason))
        self.arrived.set()  # a later group may now be among the oldest

    def _check_drops(self) -> None:
        counts = self.ledger.counts()
        if counts.drops_in_a_row >= self.rules.max_drops_in_a_row:
            raise DeterministicFailure(
                f"{counts.drops_in_a_row} groups in a row were dropped; the last one: "
                f"{counts.last_drop}"
            )

    def _next(self, peer: Peer) -> GroupGrant | None:
        """A lapsed group, or else a new one, if one more may be granted."""
        if lapsed := self.ledger.lapsed():
            now, deadline_s = self.clock(), self.rules.deadline_s
            return self.ledger.grant_again(lapsed[0], peer=peer, now=now, deadline_s=deadline_s)
        return self._new(peer) if self.ledger.may_grant() else None

    def _new(self, peer: Peer) -> GroupGrant:
        rules, version = self.rules, self.ledger.version
        played = horizon(rules.curriculum, version, rules.num_episodes)
        number = self.ledger.next_grant
        task = self.tasks.task(number)
        return self.ledger.grant(
            task,
            num_episodes=played.num_episodes,
            peer=peer,
            now=self.clock(),
            deadline_s=rules.deadline_s,
            max_turns=played.max_turns,
            guidance=self.memory.guidance(number, task),
        )

    def _with_rival(self, grant: GroupGrant) -> GroupGrant:
        """Say where the weights of the opponent lie, where it is a version of the policy."""
        version = version_of(grant.member)
        if version is None:
            return grant
        rival = Rival(version=version, path=str(self.weights.path(version)))
        return msgspec.structs.replace(grant, rival=rival)
