"""Arrivals: results of trials, taken in once, acknowledged when the journal holds them durably."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from mage_async.admission.concurrency import Concurrency
from mage_async.admission.ledger import Accepted, SlotLedger, Unknown
from mage_async.admission.lengths import Lengths
from mage_async.protocol.messages import Acknowledge, TrialResult, Unwanted
from mage_services.learner.coordinator_rules import Journal
from mage_services.learner.peer_registry import PeerRegistry
from mage_services.transport.access import Peer


@dataclass(slots=True)
class Arrivals:
    """See the module."""

    registry: PeerRegistry
    ledger: SlotLedger
    journal: Journal
    clock: Callable[[], float]
    pace: Concurrency | None
    """Age-aware concurrency; None: as many groups in play as the ledger's rule admits."""
    arrived: asyncio.Event
    """Set whenever a batch may have become complete."""
    lengths: Lengths = field(default_factory=Lengths)
    """Lengths of trials since this learner began."""
    _actors: dict[int, str] = field(default_factory=dict)
    """Which actor finished each group that holds a slot, by grant."""

    def take(self, peer: Peer, result: TrialResult) -> None:
        """Take a result in, or answer that it is a duplicate, or that it was not granted."""
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
            self.journal.append(result, partial(self.registry.send, peer, answer))
        else:
            self.registry.send_when_durable(peer, answer)  # the first may not be durable yet
        if is_first and verdict.is_complete:
            self._complete(peer, result.grant)

    def keep_pace(self, busy_s: float) -> None:
        """A step kept the trainer busy so long: perhaps another number of groups may be in play."""
        if self.pace is not None:
            self.pace.trained(busy_s)
            self.ledger.concurrency = self.pace.limit

    def take_actors(self) -> dict[int, str]:
        """Which actor finished each group, by grant; those that hold no slot are forgotten, and
        so are the single lengths of trials of groups that ended long ago.
        """
        known, in_flight = self._actors, self.ledger.grants_with_slots()
        self.lengths.forget_before(min(in_flight, default=self.ledger.next_grant))
        self._actors = {grant: actor for grant, actor in known.items() if grant in in_flight}
        return known

    def fates(self) -> dict[str, float]:
        """What became of the long ones among the trials that came in since this learner began, and
        of the time that all took.
        """
        in_flight = self.ledger.grants_with_slots()
        return {
            "length_bias": self.lengths.bias(in_flight),
            "wasted_share": self.lengths.wasted_share(in_flight),
        }

    def _complete(self, peer: Peer, grant: int) -> None:
        if (known := self.registry.peers.get(peer)) is not None:
            self._actors[grant] = known.hello.name
        if self.pace is not None:
            self.pace.completed(*self.ledger.life(grant, self.clock()))
        self.arrived.set()

    def _refuse(self, peer: Peer, result: TrialResult, reason: str) -> None:
        self.registry.note(f"{peer}: {reason}")
        index = result.trial.index
        self.registry.send(
            peer, Unwanted(grant=result.grant, epoch=result.epoch, trial=index, reason=reason)
        )
