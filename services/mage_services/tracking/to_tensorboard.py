"""TensorBoard: a file of events for each life of a run, written by TensorBoard's own writer."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar

from mage_services.tracking.tracker import Point, Send, TrackedRun, Tracker


class TensorBoard(Tracker, tag="tensorboard"):
    """Write TensorBoard's events into `tracking/tensorboard` of the run. Extra `tensorboard`."""

    package: ClassVar[str] = "tensorboard"

    @contextmanager
    def open(self, run: TrackedRun) -> Iterator[Send]:
        """Begin a file of events in the run's own folder."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        writer = EventFileWriter(str(run.folder / "tensorboard"))
        start = SessionLog(status=SessionLog.START)  # readers forget events of later steps
        writer.add_event(Event(wall_time=run.began, step=run.step + 1, session_log=start))

        def send(points: Sequence[Point]) -> None:
            for point in points:
                pairs = point.values.items()
                values = [Summary.Value(tag=name, simple_value=value) for name, value in pairs]
                time, summary = run.began + point.time_s, Summary(value=values)
                writer.add_event(Event(wall_time=time, step=point.step, summary=summary))
            writer.flush()

        yield send
        writer.close()
