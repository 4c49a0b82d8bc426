"""Weights & Biases. Its own variables hold: WANDB_API_KEY, WANDB_MODE=offline, WANDB_ENTITY.

Only numbers and the configuration are sent: no source, no output, no figures of the machine. Points
of a curve come later than steps, and out of order, so the axis is a metric of its own, `step`.
"""

from collections.abc import Sequence

import wandb

from mage_async.results.tracked import Point
from mage_services.tracking.tracker import TrackedRun


class WandbTracker:
    """A run of a W&B project."""

    every_s = 2.0

    def __init__(self, run: TrackedRun) -> None:
        settings = wandb.Settings(
            console="off",
            disable_git=True,
            save_code=False,
            silent=True,
            x_disable_meta=True,
            x_disable_stats=True,
        )
        self._run = wandb.init(
            project=run.target,
            id=run.id,
            name=run.name,
            resume="allow",
            dir=run.folder,
            config=dict(run.config),
            allow_val_change=True,  # a resumed run may be longer
            settings=settings,
        )
        self._run.define_metric("*", step_metric="step")

    def send(self, points: Sequence[Point]) -> None:
        """Hand points to W&B's own process, which sends them."""
        for point in points:
            self._run.log({"step": point.step, **point.values})

    def close(self) -> None:
        """Wait until W&B's process has sent everything."""
        self._run.finish()


TRACKER = WandbTracker
