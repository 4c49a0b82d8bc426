"""Weights & Biases. Its own variables hold: WANDB_API_KEY, WANDB_MODE=offline, WANDB_ENTITY.

Only numbers and the configuration are sent: no source code, no printed output, no figures of the
machine.
"""

from typing import TYPE_CHECKING, ClassVar

from mage_services.tracking.tracker import TrackedRun, Tracker

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mage_async.results.summary import Point


class Wandb(Tracker, tag="wandb"):
    """Send metrics to Weights & Biases; WANDB_MODE=offline sends nothing. Extra `wandb`."""

    project: str = "mage_async"
    """Project of the run."""

    package: ClassVar[str] = "wandb"

    def open(self, run: TrackedRun) -> "WandbClient":
        """Begin or continue the run in W&B."""
        return WandbClient(self.project, run)


class WandbClient:
    """A run of a W&B project."""

    def __init__(self, project: str, run: TrackedRun) -> None:
        import wandb

        settings = wandb.Settings(
            console="off",
            disable_git=True,
            save_code=False,
            silent=True,
            x_disable_meta=True,
            x_disable_stats=True,
        )
        self._run = wandb.init(
            project=project,
            id=run.id,
            name=run.name,
            resume="allow",
            dir=run.folder,
            config=dict(run.config),
            allow_val_change=True,  # a resumed run may be longer
            settings=settings,
        )
        # Points of evaluations come later than those of steps and out of order, which W&B's own
        # counter does not allow, so the axis is a metric of its own.
        self._run.define_metric("*", step_metric="step")

    def send(self, points: "Sequence[Point]") -> None:
        """Hand points to W&B's own process, which sends them."""
        for point in points:
            self._run.log({"step": point.step, **point.values})

    def close(self) -> None:
        """Wait until W&B's process has sent everything."""
        self._run.finish()
