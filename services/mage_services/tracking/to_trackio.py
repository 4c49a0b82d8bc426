"""trackio. Its own variables hold: TRACKIO_DIR, TRACKIO_SPACE_ID, TRACKIO_SERVER_URL.

Without them everything stays in a database on this machine.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar

from mage_services.tracking.tracker import Point, Send, TrackedRun, Tracker


class Trackio(Tracker, tag="trackio"):
    """Write metrics to trackio's database on this machine, or where its variables say. Extra
    `trackio`."""

    project: str = "mage_async"
    """Project of the run."""

    package: ClassVar[str] = "trackio"
    every_s: ClassVar[float] = 10.0

    @contextmanager
    def open(self, run: TrackedRun) -> Iterator[Send]:
        """Begin or continue the run in trackio, which finds a run again by its name."""
        import trackio

        own = trackio.init(
            project=self.project,
            name=f"{run.name}-{run.id[:6]}",
            resume="allow",
            config=dict(run.config),
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

        def send(points: Sequence[Point]) -> None:
            for point in points:  # trackio's own thread writes them
                own.log(dict(point.values), step=point.step)

        yield send
        trackio.finish()
