"""trackio. Its own variables hold: TRACKIO_DIR, TRACKIO_SPACE_ID, TRACKIO_SERVER_URL.

Without them everything stays in a database on this machine.
"""

from collections.abc import Sequence

import trackio

from mage_async.results.tracked import Point
from mage_services.tracking.tracker import TrackedRun


class TrackioTracker:
    """A run of a trackio project; trackio finds a run again by its name."""

    every_s = 10.0

    def __init__(self, run: TrackedRun) -> None:
        self._run = trackio.init(
            project=run.target,
            name=f"{run.name}-{run.id[:6]}",
            resume="allow",
            config=dict(run.config),
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def send(self, points: Sequence[Point]) -> None:
        """Hand points to trackio's thread."""
        for point in points:
            self._run.log(dict(point.values), step=point.step)

    def close(self) -> None:
        """Wait until trackio's thread has written everything."""
        trackio.finish()


TRACKER = TrackioTracker
