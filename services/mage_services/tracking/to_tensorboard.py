"""TensorBoard: a file of events for each life of a run, written by TensorBoard's own writer."""

from typing import TYPE_CHECKING, ClassVar

from mage_services.tracking.tracker import TrackedRun, Tracker

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mage_async.results.summary import Point


class TensorBoard(Tracker, tag="tensorboard"):
    """Write TensorBoard's events into `tracking/tensorboard` of the run. Extra `tensorboard`."""

    package: ClassVar[str] = "tensorboard"

    def open(self, run: TrackedRun) -> "EventFile":
        """Begin a file of events."""
        return EventFile(run)


class EventFile:
    """A file of events in the run's own folder."""

    def __init__(self, run: TrackedRun) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._began = run.began
        self._writer = EventFileWriter(str(run.folder / "tensorboard"))
        start = SessionLog(status=SessionLog.START)  # readers forget events of later steps
        self._writer.add_event(Event(wall_time=run.began, step=run.step + 1, session_log=start))

    def send(self, points: "Sequence[Point]") -> None:
        """Write points to the file."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

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
