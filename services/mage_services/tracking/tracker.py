"""Define trackers: each is a configuration, and a connection that is opened for one run.

A tracker calls a library that may raise, and that may never return. Only the process of
`mage_services/tracking/tracker_worker.py` opens one.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from mage_async.config.section import Variant
from mage_async.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Point:
    """Hold numbers by name that belong to one policy version."""

    step: int
    """The policy version."""
    time_s: float
    """Seconds since the learner began to train."""
    values: dict[str, float]


Send = Callable[[Sequence[Point]], None]
"""Sends points to a tracker; a point that was sent before a crash may come again."""


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """Describe the run that a tracker is opened for."""

    name: str
    """Name of the run's directory, which trackers show."""
    id: str
    """Unique id, the same after a resume, by which the tracker continues its own run."""
    folder: Path
    """Existing folder for files that the tracker keeps on this machine."""
    config: Mapping[str, Any]
    """The run's configuration, nested as in `config.toml`."""
    began: float
    """Time at which training began, in seconds since 1970."""
    step: int
    """Last step that an earlier process sent to the tracker; 0 if there was none."""


class Tracker(Variant):
    """Send a run's metrics somewhere. The fields of a subclass are the keys of its table in the
    configuration.
    """

    package: ClassVar[str] = ""
    """Package that has to be installed; "" for none."""
    every_s: ClassVar[float] = 2.0
    """Seconds between two calls of `send` while new points arrive. A tracker with a database sets
    more seconds, because few calls with many points cost less."""

    def check_installed(self, key: str) -> None:
        """Check that the tracker's package is installed; `key` names the tracker in `tracking`.

        Raises:
            ConfigError: the package is not installed.
        """
        if not self.package or find_spec(self.package) is not None:
            return
        # A tracker of this repository has an extra of the same name, which states the version.
        is_own = type(self).__module__.startswith("mage_services.")
        package = f"'mage_async[{self.package}]'" if is_own else self.package
        raise ConfigError(
            f"tracking.{key} needs the package {self.package}, which is not installed: "
            f"pip install {package}"
        )

    def open(self, run: TrackedRun) -> AbstractContextManager[Send]:
        """Begin the tracker's own run, or continue it, and return a context with its `Send`.

        The context imports the tracker's package. On exit, it ends the tracker's run and returns
        when all points are stored. After an exception it does neither, and the caller opens
        another.
        """
        raise NotImplementedError


class Wandb(Tracker, tag="wandb"):
    """Send metrics to Weights & Biases; WANDB_MODE=offline sends nothing. Extra `wandb`."""

    # W&B reads its environment variables: WANDB_API_KEY, WANDB_MODE=offline, WANDB_ENTITY. Only
    # numbers and the configuration are sent: no source code, no printed output, no measurements of
    # the machine.

    project: str = "mage_async"
    """Project of the run."""

    package: ClassVar[str] = "wandb"

    @contextmanager
    def open(self, run: TrackedRun) -> Iterator[Send]:
        """Begin or continue the run in W&B."""
        import wandb

        settings = wandb.Settings(
            console="off",
            disable_git=True,
            save_code=False,
            silent=True,
            x_disable_meta=True,
            x_disable_stats=True,
        )
        wandb_run = wandb.init(
            project=self.project,
            id=run.id,
            name=run.name,
            resume="allow",
            dir=run.folder,
            config=dict(run.config),
            allow_val_change=True,  # a resumed run may have another number of steps
            settings=settings,
        )
        # Points of evaluations come later than those of steps and out of order, which W&B's own
        # counter does not allow, so the axis is a metric of its own.
        wandb_run.define_metric("*", step_metric="step")

        def send(points: Sequence[Point]) -> None:
            for point in points:  # W&B's own process sends them, so this does not wait
                wandb_run.log({"step": point.step, **point.values})

        yield send
        wandb_run.finish()


class TensorBoard(Tracker, tag="tensorboard"):
    """Write TensorBoard's events into `tracking/tensorboard` of the run. Extra `tensorboard`."""

    # TensorBoard's own writer writes a new file of events each time that the tracker is opened.

    package: ClassVar[str] = "tensorboard"

    @contextmanager
    def open(self, run: TrackedRun) -> Iterator[Send]:
        """Begin a file of events in the run's own folder."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        writer = EventFileWriter(str(run.folder / "tensorboard"))
        # At this event, readers discard earlier events of this step and of later ones.
        start = SessionLog(status=SessionLog.START)
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


ID_TAG = "mage.id"
"""Tag with the run's id. A run in MLflow is found again by this tag, even if the process that
created it ended right afterwards.
"""
MAX_METRICS, MAX_PARAMS = 1000, 100
"""Largest numbers of metrics and of parameters that MLflow accepts in one request."""


class Mlflow(Tracker, tag="mlflow"):
    """Send metrics to MLflow, at MLFLOW_TRACKING_URI. Extra `mlflow`."""

    # MLflow reads its environment variables: MLFLOW_TRACKING_URI and those of authentication.

    experiment: str = "mage_async"
    """Experiment of the run."""

    package: ClassVar[str] = "mlflow"
    every_s: ClassVar[float] = 10.0

    @contextmanager
    def open(self, run: TrackedRun) -> Iterator[Send]:
        """Begin or continue the run in MLflow."""
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        client = MlflowClient()
        found = client.get_experiment_by_name(self.experiment)
        experiment = found.experiment_id if found else client.create_experiment(self.experiment)
        known = client.search_runs([experiment], f"tags.`{ID_TAG}` = '{run.id}'")
        if known:
            mlflow_run = known[0]
            client.update_run(mlflow_run.info.run_id, status="RUNNING")
        else:
            mlflow_run = client.create_run(experiment, tags={ID_TAG: run.id}, run_name=run.name)
        run_id, written = mlflow_run.info.run_id, mlflow_run.data.params
        # Each parameter is written once: MLflow does not let a resumed run change it. An earlier
        # try may have failed before it had written all of them.
        pairs = [pair for pair in _flat(run.config) if pair[0] not in written]
        params = [Param(key, str(value)) for key, value in pairs]
        for batch in _batches(params, MAX_PARAMS):
            client.log_batch(run_id, params=batch)

        def send(points: Sequence[Point]) -> None:
            metrics = [
                Metric(name, value, round(1000 * (run.began + point.time_s)), point.step)
                for point in points
                for name, value in point.values.items()
            ]
            for batch in _batches(metrics, MAX_METRICS):
                client.log_batch(run_id, metrics=batch)

        yield send
        client.set_terminated(run_id)


def _batches(items: list[Any], size: int) -> Iterator[list[Any]]:
    """Yield the items in lists of at most `size`."""
    for start in range(0, len(items), size):
        yield items[start : start + size]


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and the value of each leaf of a nested mapping."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


class Trackio(Tracker, tag="trackio"):
    """Write metrics to trackio's database, on this machine unless an environment variable of
    trackio names another place. Extra `trackio`.
    """

    # trackio reads its environment variables: TRACKIO_DIR, TRACKIO_SPACE_ID, TRACKIO_SERVER_URL.
    # Without them everything stays in a database on this machine.

    project: str = "mage_async"
    """Project of the run."""

    package: ClassVar[str] = "trackio"
    every_s: ClassVar[float] = 10.0

    @contextmanager
    def open(self, run: TrackedRun) -> Iterator[Send]:
        """Begin or continue the run in trackio, which finds a run again by its name."""
        import trackio

        trackio_run = trackio.init(
            project=self.project,
            name=f"{run.name}-{run.id[:6]}",
            resume="allow",
            config=dict(run.config),
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

        def send(points: Sequence[Point]) -> None:
            for point in points:  # trackio's own thread writes them, so this does not wait
                trackio_run.log(dict(point.values), step=point.step)

        yield send
        trackio.finish()
