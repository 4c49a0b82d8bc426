"""What a tracker is: a configuration, and a connection that is opened for one run.

A tracker is other people's code: it may raise, and it may never return. Only the process of
`mage_services/tracking/tracker_worker.py` opens one. To add a tracker, copy a file `to_NAME.py` and
name it in `mage_async/config/components.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from mage_async.config.section import Variant


@dataclass(frozen=True, slots=True)
class Point:
    """Numbers by name that belong to one policy version."""

    step: int
    """The policy version."""
    time_s: float
    """Seconds since the learner began to train."""
    values: dict[str, float]


Send = Callable[[Sequence[Point]], None]
"""Sends points to a tracker; a point that was sent before a crash may come again."""


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """The run that a tracker is opened for."""

    name: str
    """Name of the run's directory, for people."""
    id: str
    """Unique, and the same in all lives of the run: by it the tracker continues its own run."""
    folder: Path
    """Existing folder for files that the tracker keeps on this machine."""
    config: Mapping[str, Any]
    """The run's configuration, nested as in `config.toml`."""
    began: float
    """When training began, in seconds since 1970."""
    step: int
    """Last step that an earlier life of the tracker sent; 0 in the first life."""


class Tracker(Variant):
    """A tracker of a run's metrics, with its configuration as fields."""

    package: ClassVar[str] = ""
    """Package that has to be installed, which is also the name of the extra; "" for none."""
    every_s: ClassVar[float] = 2.0
    """Seconds between two calls of `send` while new points arrive. A tracker that writes to a
    database works less with many points at once."""

    def open(self, run: TrackedRun) -> AbstractContextManager[Send]:
        """Begin the tracker's own run, or continue it, and return a context with its `Send`.

        The context imports the tracker's package. On leaving, it ends the tracker's run and returns
        when all points are stored; after an exception it does neither, and a new one is opened.
        """
        raise NotImplementedError
