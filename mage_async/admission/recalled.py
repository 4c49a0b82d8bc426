"""The graph memory as a journal tells of it: learned again, and compared with what was recorded."""

from collections.abc import Sequence
from dataclasses import dataclass

from mage_async.config import config_file
from mage_async.errors import RunError
from mage_async.graph_memory.graph import Table
from mage_async.graph_memory.memory import GraphMemory
from mage_async.protocol.journal_records import Commit, Granted, Head
from mage_async.trajectory import Group, Task


@dataclass(slots=True)
class Recalled:
    """A memory that goes through a journal's records in their order."""

    memory: GraphMemory
    _is_known: bool = False
    """False where trials that the memory learned from lie in deleted segments; the next head has
    the memory whole."""

    def begin(self, head: Head) -> None:
        """A segment begins, perhaps under another configuration."""
        if head.config and self.memory.is_on:
            self.memory.adopt(config_file.loads(head.config))
        self.memory.begin(head.memory or Table(version=head.version))
        self._is_known = self.memory.is_on

    def check_grant(self, granted: Granted) -> None:
        """What a new group was told is what this memory tells it.

        Raises:
            RunError: it is something else.
        """
        grant = granted.grant
        if not self._is_known or grant.epoch:
            return
        task = Task(grant.environment, grant.member, grant.seed, grant.seat)
        if self.memory.guidance(grant.grant, task) != grant.guidance:
            raise RunError(f"group {grant.grant}: the graph memory computed again tells otherwise")

    def trained(self, commit: Commit, groups: Sequence[Group] | None) -> None:
        """A step was trained, and the memory learned from its groups, where they are there.

        Raises:
            RunError: it is another memory than was committed.
        """
        self._is_known = self._is_known and groups is not None
        if not self._is_known or groups is None:
            return
        self.memory.trained(groups)
        if self.memory.digest() != commit.memory:
            raise RunError(
                f"step {commit.version}: the graph memory computed again is another than the one "
                "that was committed; another machine or version of Python computes otherwise"
            )
