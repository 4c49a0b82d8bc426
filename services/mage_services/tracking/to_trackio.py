"""trackio. Its own variables hold: TRACKIO_DIR, TRACKIO_SPACE_ID, TRACKIO_SERVER_URL.

Without them everything stays in a database on this machine.
"""

from typing import TYPE_CHECKING, ClassVar

from mage_services.tracking.tracker import TrackedRun, Tracker

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mage_async.results.summary import Point


class Trackio(Tracker, tag="trackio"):
    """Write metrics to trackio's database on this machine, or where its variables say. Extra
    `trackio`."""

    project: str = "mage_async"
    """Project of the run."""

    package: ClassVar[str] = "trackio"
    every_s: ClassVar[float] = 10.0

    def open(self, run: TrackedRun) -> "TrackioClient":
        """Begin or continue the run in trackio."""
        return TrackioClient(self.project, run)


class TrackioClient:
    """A run of a trackio project; trackio finds a run again by its name."""

    def __init__(self, project: str, run: TrackedRun) -> None:
        import trackio

        self._finish = trackio.finish
        self._run = trackio.init(
            project=project,
            name=f"{run.name}-{run.id[:6]}",
            resume="allow",
            config=dict(run.config),
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def send(self, points: "Sequence[Point]") -> None:
        """Hand points to trackio's thread."""
        for point in points:
            self._run.log(dict(point.values), step=point.step)

    def close(self) -> None:
        """Wait until trackio's thread has written everything."""
        self._finish()
