"""Who may still read which published weights: a copy stays until its users have moved on.

A user is a peer by name. It uses the version that it draws with, from which an engine that died is
repaired, and every version it was told of since. Nothing here knows time: who has gone says so.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class WeightUsers:
    """The versions that each user may read."""

    _told: dict[str, list[int]] = field(default_factory=dict)
    """Told of and not loaded yet, oldest first."""
    _loaded: dict[str, int] = field(default_factory=dict)

    def tell(self, user: str, version: int) -> None:
        """A user has been told where a version is."""
        self._told.setdefault(user, []).append(version)

    def loaded(self, user: str, version: int) -> None:
        """A user draws with a version; it will not read what it was told of before that one."""
        told = self._told.get(user, [])
        self._told[user] = [other for other in told if other > version]
        self._loaded[user] = version

    def gone(self, user: str) -> None:
        """A user reads nothing any more."""
        self._told.pop(user, None)
        self._loaded.pop(user, None)

    def version_of(self, user: str) -> int | None:
        """What a user draws with, as it last said."""
        return self._loaded.get(user)

    def is_loading(self, user: str) -> bool:
        """Whether a user was told of a version that it has not loaded yet."""
        return bool(self._told.get(user))

    def unused(self, versions: Iterable[int], newest: int) -> list[int]:
        """Of some versions those that nobody may read; the newest is there for who comes next."""
        used = {newest, *self._loaded.values()}
        used.update(version for told in self._told.values() for version in told)
        return [version for version in versions if version not in used]
