"""Leases of published weights: which peer may still read which version.

A user is a peer by name. A peer pins the version it has loaded (a crashed engine is restored from
it) and every version announced to it since. Weights without a lease may be removed. Nothing here
knows time: the owner reports a peer that has gone.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class WeightLeases:
    """The versions that each user, a peer by name, may read."""

    _told: dict[str, list[int]] = field(default_factory=dict)
    """Versions announced and not loaded yet, oldest first."""
    _loaded: dict[str, int] = field(default_factory=dict)

    def tell(self, user: str, version: int) -> None:
        """Give a user a lease: the location of a version has been announced to it."""
        self._told.setdefault(user, []).append(version)

    def loaded(self, user: str, version: int) -> None:
        """A user has loaded a version, so leases of older announcements end."""
        told = self._told.get(user, [])
        self._told[user] = [other for other in told if other > version]
        self._loaded[user] = version

    def gone(self, user: str) -> None:
        """A user has gone: all its leases end."""
        self._told.pop(user, None)
        self._loaded.pop(user, None)

    def version_of(self, user: str) -> int | None:
        """The version that a user last reported as loaded."""
        return self._loaded.get(user)

    def is_loading(self, user: str) -> bool:
        """Whether a user has not loaded every version announced to it."""
        return bool(self._told.get(user))

    def unused(self, versions: Iterable[int], newest: int) -> list[int]:
        """The versions without a lease; the newest is always kept, for the next peer that joins."""
        used = {newest, *self._loaded.values()}
        used.update(version for told in self._told.values() for version in told)
        return [version for version in versions if version not in used]
