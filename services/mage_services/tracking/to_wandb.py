"""Weights & Biases. Its own variables hold: WANDB_API_KEY, WANDB_MODE=offline, WANDB_ENTITY.

Only numbers and the configuration are sent: no source code, no printed output, no figures of the
machine.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar

from mage_services.tracking.tracker import Point, Send, TrackedRun, Tracker


class Wandb(Tracker, tag="wandb"):
    """Send metrics to Weights & Biases; WANDB_MODE=offline sends nothing. Extra `wandb`."""

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
        own = wandb.init(
            project=self.project,
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
        own.define_metric("*", step_metric="step")

        def send(points: Sequence[Point]) -> None:
            for point in points:  # W&B's own process sends them
                own.log({"step": point.step, **point.values})

        yield send
        own.finish()
