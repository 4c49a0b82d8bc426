"""MLflow. Its own variables hold: MLFLOW_TRACKING_URI and those of authentication.

A run is found again by a tag, so nothing is lost where the process ends between making a run and
writing its number down.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mlflow.entities import Metric, Param
from mlflow.tracking import MlflowClient

from mage_async.results.tracked import Point
from mage_services.tracking.tracker import TrackedRun

ID_TAG = "mage.id"
MOST_METRICS, MOST_PARAMS = 1000, 100
"""Of one request: MLflow's own limits."""


class MlflowTracker:
    """A run of an MLflow experiment."""

    every_s = 10.0

    def __init__(self, run: TrackedRun) -> None:
        self._client, self._began = MlflowClient(), run.began
        found = self._client.get_experiment_by_name(run.target)
        experiment = found.experiment_id if found else self._client.create_experiment(run.target)
        ours = self._client.search_runs([experiment], f"tags.`{ID_TAG}` = '{run.id}'")
        self._id = ours[0].info.run_id if ours else self._create(experiment, run)
        self._client.update_run(self._id, status="RUNNING")

    def send(self, points: Sequence[Point]) -> None:
        """Send points, as many requests as that takes."""
        metrics = [
            Metric(name, value, round(1000 * (self._began + point.time_s)), point.step)
            for point in points
            for name, value in point.values.items()
        ]
        for at in range(0, len(metrics), MOST_METRICS):
            self._client.log_batch(self._id, metrics=metrics[at : at + MOST_METRICS])

    def close(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._id)

    def _create(self, experiment: str, run: TrackedRun) -> str:
        """A new run with its configuration, which MLflow does not let a later life change."""
        made = self._client.create_run(experiment, tags={ID_TAG: run.id}, run_name=run.name)
        params = [Param(key, str(value)) for key, value in _flat(run.config)]
        for at in range(0, len(params), MOST_PARAMS):
            self._client.log_batch(made.info.run_id, params=params[at : at + MOST_PARAMS])
        return made.info.run_id


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


TRACKER = MlflowTracker
