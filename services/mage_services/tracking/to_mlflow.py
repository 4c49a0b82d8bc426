"""MLflow. Its own variables hold: MLFLOW_TRACKING_URI and those of authentication."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from mage_services.tracking.tracker import TrackedRun, Tracker

if TYPE_CHECKING:
    from mage_async.results.summary import Point

ID_TAG = "mage.id"
"""Tag by which a run is found again, also where a process ended just after it had made the run."""
MAX_METRICS, MAX_PARAMS = 1000, 100
"""MLflow's own limits of one request."""


class Mlflow(Tracker, tag="mlflow"):
    """Send metrics to MLflow, at MLFLOW_TRACKING_URI. Extra `mlflow`."""

    experiment: str = "mage_async"
    """Experiment of the run."""

    package: ClassVar[str] = "mlflow"
    every_s: ClassVar[float] = 10.0

    def open(self, run: TrackedRun) -> "ExperimentRun":
        """Begin or continue the run in MLflow."""
        return ExperimentRun(self.experiment, run)


class ExperimentRun:
    """A run of an MLflow experiment."""

    def __init__(self, experiment: str, run: TrackedRun) -> None:
        from mlflow.tracking import MlflowClient

        self._client, self._began = MlflowClient(), run.began
        found = self._client.get_experiment_by_name(experiment)
        number = found.experiment_id if found else self._client.create_experiment(experiment)
        ours = self._client.search_runs([number], f"tags.`{ID_TAG}` = '{run.id}'")
        self._id = ours[0].info.run_id if ours else self._create(number, run)
        self._client.update_run(self._id, status="RUNNING")

    def send(self, points: "Sequence[Point]") -> None:
        """Send points, in as many requests as that takes."""
        from mlflow.entities import Metric

        metrics = [
            Metric(name, value, round(1000 * (self._began + point.time_s)), point.step)
            for point in points
            for name, value in point.values.items()
        ]
        for start in range(0, len(metrics), MAX_METRICS):
            self._client.log_batch(self._id, metrics=metrics[start : start + MAX_METRICS])

    def close(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._id)

    def _create(self, experiment: str, run: TrackedRun) -> str:
        """Create a run with its configuration, which MLflow does not let a later life change."""
        from mlflow.entities import Param

        created = self._client.create_run(experiment, tags={ID_TAG: run.id}, run_name=run.name)
        params = [Param(key, str(value)) for key, value in _flat(run.config)]
        for start in range(0, len(params), MAX_PARAMS):
            batch = params[start : start + MAX_PARAMS]
            self._client.log_batch(created.info.run_id, params=batch)
        return created.info.run_id


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
