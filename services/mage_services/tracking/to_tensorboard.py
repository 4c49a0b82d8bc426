"""TensorBoard: a file of events for each life of a run, written by TensorBoard's own writer."""

from collections.abc import Sequence

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from mage_async.results.tracked import Point
from mage_services.tracking.tracker import TrackedRun


class TensorBoardTracker:
    """A folder of events, beside the run's other files."""

    every_s = 2.0

    def __init__(self, run: TrackedRun) -> None:
        self._began = run.began
        self._writer = EventFileWriter(str(run.folder / "tensorboard"))
        start = SessionLog(status=SessionLog.START)  # readers forget older events from here on
        self._writer.add_event(Event(wall_time=run.began, step=run.step + 1, session_log=start))

    def send(self, points: Sequence[Point]) -> None:
        """Write points to the file."""
        for point in points:
            values = [
                Summary.Value(tag=name, simple_value=value) for name, value in point.values.items()
            ]
            time, summary = self._began + point.time_s, Summary(value=values)
            self._writer.add_event(Event(wall_time=time, step=point.step, summary=summary))
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


TRACKER = TensorBoardTracker
