"""What every tracker can do, which trackers there are, and what each is told first.

A tracker is other people's code: it may raise, and it may take for ever. Only the process that
`mage_services/tracking/follower.py` runs in ever calls one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from mage_async.config.sections.run import Tracking
from mage_async.errors import ConfigError
from mage_async.results.tracked import Point


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """Whose points follow."""

    target: str
    """Project or experiment: what the configuration says of this tracker."""
    name: str
    """For people."""
    id: str
    """The same in all lives of the run, of no other run: the tracker's own run goes on by it."""
    folder: Path
    """For what the tracker keeps on this machine; it is there."""
    config: Mapping[str, Any]
    """Nested, as the run's `config.toml`."""
    began: float
    """When training began, in seconds since 1970."""
    step: int
    """The last that was told in an earlier life; 0 in the first."""


class Tracker(Protocol):
    """A client of one tracker, which is told of a run."""

    every_s: float
    """Between two tellings, where new points come all the time. A tracker that writes to a database
    has less work with many points at once.
    """

    def __init__(self, run: TrackedRun) -> None:
        """Begin the tracker's own run, or go on with it."""
        ...

    def send(self, points: Sequence[Point]) -> None:
        """Tell some points; a point that was told before a crash may come again."""
        ...

    def close(self) -> None:
        """Say that no more comes, and return when all is where it belongs."""
        ...


TRACKERS = ("wandb", "tensorboard", "mlflow", "trackio")
"""Names; each is also a key of `[tracking]`, a package, an extra, and a module here, `to_NAME`."""


def targets(tracking: Tracking) -> dict[str, str]:
    """The trackers that a configuration names, with what it says of each.

    Raises: ConfigError: the package of one is not installed.
    """
    wanted = {name: getattr(tracking, name) for name in TRACKERS}
    for name, target in wanted.items():
        if target and find_spec(name) is None:
            raise ConfigError(
                f"tracking.{name} needs the package {name}, which is not installed: "
                f"pip install 'mage_async[{name}]'"
            )
    return {name: str(target) for name, target in wanted.items() if target}


def open_tracker(name: str, run: TrackedRun) -> Tracker:
    """The tracker of that name; its package is imported here and nowhere else."""
    return import_module(f"mage_services.tracking.to_{name}").TRACKER(run)
