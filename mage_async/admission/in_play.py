"""Groups in play, by the peer that plays each, and the peer that can take on the most groups more.

The learner asks after every message, so no answer about one peer or one group looks at all of them:
with thousands of actors that would be most of what the learner does.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(slots=True)
class GroupsInPlay:
    """Groups that are granted and not complete. A group without a peer is lapsed."""

    _peers: dict[int, str | None] = field(default_factory=dict)
    """By grant."""
    _grants: dict[str | None, set[int]] = field(default_factory=dict)
    """By peer, none of them empty."""
    _credits: dict[str, int] = field(default_factory=dict)
    _by_free: dict[int, dict[str, None]] = field(default_factory=dict)
    """Peers by how many groups more they can take on, none of these empty; of equals, the one that
    became so first stands first."""

    def __len__(self) -> int:
        return len(self._peers)

    def __contains__(self, grant: int) -> bool:
        return grant in self._peers

    def __iter__(self) -> Iterator[int]:
        return iter(self._peers)

    def num_places(self) -> int:
        """Groups that all peers may be granted at a time."""
        return sum(self._credits.values())

    def give(self, grant: int, peer: str | None) -> None:
        """A group is played by a peer now, or by none."""
        self.end(grant)
        self._leave(peer)
        self._peers[grant] = peer
        self._grants.setdefault(peer, set()).add(grant)
        self._enter(peer)

    def end(self, grant: int) -> None:
        """A group is complete, or has ended; again is the same as once."""
        if grant not in self._peers:
            return
        peer = self._peers.pop(grant)
        self._leave(peer)
        self._grants[peer].remove(grant)
        if not self._grants[peer]:
            del self._grants[peer]
        self._enter(peer)

    def of(self, peer: str | None) -> list[int]:
        """Grants of what a peer plays, or of the lapsed groups, oldest first."""
        return sorted(self._grants.get(peer, ()))

    def num_of(self, peer: str | None) -> int:
        """How many groups a peer plays."""
        return len(self._grants.get(peer, ()))

    def peers(self) -> set[str]:
        """Peers that play a group."""
        return {peer for peer in self._grants if peer is not None}

    def set_credits(self, peer: str, credits: int) -> None:
        """A peer may be granted so many groups at a time; 0: none."""
        self._leave(peer)
        self._credits.pop(peer, None)
        if credits:
            self._credits[peer] = credits
        self._enter(peer)

    def freest(self) -> str | None:
        """The peer that can take on the most groups more, if any can."""
        most = max(self._by_free, default=0)
        return next(iter(self._by_free[most])) if most > 0 else None

    def _free(self, peer: str) -> int:
        return self._credits[peer] - self.num_of(peer)

    def _leave(self, peer: str | None) -> None:
        """Take a peer off its list: what it can take on changes."""
        if peer is None or peer not in self._credits:
            return
        free = self._free(peer)
        del self._by_free[free][peer]
        if not self._by_free[free]:
            del self._by_free[free]

    def _enter(self, peer: str | None) -> None:
        if peer is not None and peer in self._credits:
            self._by_free.setdefault(self._free(peer), {})[peer] = None
