"""MLflow. Its own variables hold: MLFLOW_TRACKING_URI and those of authentication."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from mage_services.tracking.tracker import Point, Send, TrackedRun, Tracker

ID_TAG = "mage.id"
"""Tag by which a run is found again, even if a process ended just after it had created the run."""
MAX_METRICS, MAX_PARAMS = 1000, 100
"""Most metrics and parameters that MLflow accepts in one request."""


class Mlflow(Tracker, tag="mlflow"):
    """Send metrics to MLflow, at MLFLOW_TRACKING_URI. Extra `mlflow`."""

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
        ours = client.search_runs([experiment], f"tags.`{ID_TAG}` = '{run.id}'")
        if ours:
            own = ours[0].info.run_id
            client.update_run(own, status="RUNNING")
        else:
            made = client.create_run(experiment, tags={ID_TAG: run.id}, run_name=run.name)
            own = made.info.run_id
            # The configuration is written once: MLflow does not let a later life change it.
            params = [Param(key, str(value)) for key, value in _flat(run.config)]
            for batch in _batches(params, MAX_PARAMS):
                client.log_batch(own, params=batch)

        def send(points: Sequence[Point]) -> None:
            metrics = [
                Metric(name, value, round(1000 * (run.began + point.time_s)), point.step)
                for point in points
                for name, value in point.values.items()
            ]
            for batch in _batches(metrics, MAX_METRICS):
                client.log_batch(own, metrics=batch)

        yield send
        client.set_terminated(own)


def _batches(items: list[Any], size: int) -> Iterator[list[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
