"""Read a run as an object: what it measured, what it played, and the policy that it trained."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mage_async.config import config_file
from mage_async.config.schema import Config
from mage_async.errors import ConfigError
from mage_async.results.intervals import halves_of
from mage_async.results.run_directory import RunDirectory
from mage_async.results.run_files import read_document, read_lines, read_records
from mage_services.api.configuration import address_of, assignments_of

if TYPE_CHECKING:
    from mage_async.doctor import Finding
    from mage_services.api.policy import Policy
    from mage_services.api.training import OnStep

Rows = list[dict[str, Any]]
"""A table: one dict for each row."""


class Run:
    """Represent a run on disk, finished or not; `mage.train` and `mage.load` return one.

    Args:
        path: The run directory.

    Raises:
        RunError: the directory holds no run.
    """

    def __init__(self, path: str | Path) -> None:
        self._files = RunDirectory(Path(path).resolve())
        self._files.check()

    def __repr__(self) -> str:
        steps = read_lines(self._files.metrics)
        last = steps[-1]["step"] if steps else 0
        return f"<mage run {self._files.root}: {last} of {self.config.learner.steps} steps>"

    @property
    def path(self) -> Path:
        """The run directory."""
        return self._files.root

    @property
    def config(self) -> Config:
        """The resolved configuration; a class of your own that it names is not imported."""
        return config_file.load_recorded(self._files.config, imports=False)

    @property
    def summary(self) -> dict[str, Any]:
        """The whole run in one document, as `summary.json`; empty before the end."""
        return read_document(self._files.summary)

    def steps(self) -> Any:
        """Return the metrics of training, one row for each step.

        Returns:
            A DataFrame of pandas or, without pandas, of polars; without either a list of dicts.
        """
        return framed(read_lines(self._files.metrics))

    def curve(self) -> Any:
        """Return the learning curve, one row for each version, set and episode. Its last version is
        that of the final evaluation, as in the report.

        Columns are `version`, `time_s` (seconds since training began; NaN for a version that was
        evaluated only after training), `set` ("train" or "heldout"), `episode` (from 1), `return`
        (per unit of the environment, such as a round) and `ci95` (the half-width of its 95 %
        interval; NaN for a single trial).

        Returns:
            As `steps`.
        """
        points = {point["version"]: point for point in read_lines(self._files.curve)}
        if final := read_document(self._files.evaluation):
            version = final["version"]
            points[version] = {"time_s": math.nan} | points.get(version, {}) | final
        return framed(
            [
                {"version": version, "time_s": point["time_s"]} | row
                for version, point in sorted(points.items())
                for row in score_rows({name: point["sets"][name] for name in ("train", "heldout")})
            ]
        )

    def findings(self) -> "list[Finding]":
        """Return the faults of the run and their remedies, as `mage doctor` prints them.

        Returns:
            Findings, with `name`, `onset` (the first step that shows it), `evidence` and `remedy`;
            `sentence()` has all of them.
        """
        from mage_async.doctor import examine

        return examine(read_records(self._files))

    def evaluate(
        self,
        trials: int | None = None,
        *,
        episodes: int | None = None,
        environment: type | str | None = None,
        keys: Mapping[str, Any] | None = None,
        checkpoint: int | str = "newest",
    ) -> Any:
        """Play a checkpoint on fixed tasks with both controls, as `mage evaluate` does.

        The control "blind" removes earlier episodes from the context, and "swapped" hides another
        task variant in the last episode.

        Args:
            trials: Number of trials of each set; None for `evaluation.final_trials` of the run.
            episodes: Number of episodes of a trial; None for that of the run's own evaluation.
            environment: Another environment than in training, by its name or as a class.
            keys: Keys of that environment, such as {"environment.options.size": 5}.
            checkpoint: "newest", "best", or the number of a step that the run has kept.

        Returns:
            A row for each set and episode: `set`, `episode`, `return`, `ci95`; as `steps`. The
            sets are "train", "heldout", "heldout_blind" and "heldout_swapped"; the latter two are
            of trials of several episodes.

        Raises:
            ConfigError: a number is below 1; keys are given without an environment, or cannot be
                played.
            RunError: the run has no policy yet, or not that checkpoint.
        """
        from mage_services.api.evaluation import evaluate

        if environment is None and keys:
            raise ConfigError("`keys` configure another environment: give `environment` too")
        name = environment if isinstance(environment, str | None) else address_of(environment)
        _, _, summary = evaluate(
            self._files,
            trials=trials,
            episodes=episodes,
            environment=name,
            assignments=assignments_of(keys or {}),
            checkpoint=str(checkpoint),
        )
        return framed(score_rows(summary["evaluation"]))

    def trials(self, step: int | None = None, *, tokens: bool = False) -> Iterator[dict[str, Any]]:
        """Yield the trials of the journal as plain data: their text, their rewards, and each turn's
        return and advantage. The `step` of a trial that was dropped, or is in flight, is None, and
        so are its advantages.

        Args:
            step: Step whose trials are yielded; None for all steps, in order.
            tokens: Whether a trial has the values of its tokens too, such as "tokens" and
                "logprobs": a list with an array for each context. Those of a turn are
                `trial["logprobs"][turn["context"]][turn["start"]:turn["stop"]]`.

        Raises:
            RunError: the run has no policy or no journal yet, or the journal has no trial of that
                step.
        """
        self._files.check_policy()
        from mage_async.inference.chat_files import load_chat
        from mage_services.journal.export import (
            journaled_trials,
            selected_trials,
            token_columns,
            trial_row,
        )

        chat = load_chat(self._files.policy)
        # Without a step, a journal without any trial yields none.
        select = journaled_trials if step is None else selected_trials
        found = select(self._files, chat, step=step)
        return (trial_row(each, chat) | (token_columns(each) if tokens else {}) for each in found)

    def policy(
        self, keys: Mapping[str, Any] | None = None, checkpoint: int | str = "newest"
    ) -> "Policy":
        """Return a checkpoint as a policy to load, or to talk to.

        Args:
            keys: Keys to write over the recorded configuration, such as {"engine.max_tokens":
                4096}.
            checkpoint: "newest", "best", or the number of a step that the run has kept.

        Raises:
            RunError: the run has no policy yet, or not that checkpoint.
        """
        from mage_services.api.policy import Policy

        return Policy(self._files, assignments_of(keys or {}), str(checkpoint))

    def resume(
        self,
        keys: Mapping[str, Any] | None = None,
        *,
        actors: int | None = None,
        on_step: "OnStep | None" = None,
        progress: bool = True,
    ) -> "Run":
        """Continue training from the newest checkpoint, as `mage train --resume` does.

        Args:
            keys: Keys to write over the recorded configuration, such as {"learner.steps": 120}.
            actors: Number of actor processes; None for as many as before.
            on_step: See `mage.train`, which also lists the errors.
            progress: See `mage.train`.
        """
        from mage_services.api.configuration import resumed_config
        from mage_services.api.training import supervise

        config = resumed_config(self.path, assignments_of(keys or {}))
        given = {"run_dir": self.path, "actors": actors, "is_resumed": True}
        return supervise(config, on_step, progress, **given)


def load(path: str | Path) -> Run:
    """Return a run on disk.

    Raises:
        RunError: the directory holds no run.
    """
    return Run(path)


def score_rows(sets: Mapping[str, Mapping[str, Any]]) -> Rows:
    """Return a row for each set and episode."""
    return [
        {"set": name, "episode": episode, "return": value, "ci95": half}
        for name, score in sets.items()
        for episode, (value, half) in enumerate(
            zip(score["return_by_episode"], halves_of(score), strict=True), 1
        )
    ]


def framed(rows: Rows) -> Any:
    """Return rows as a DataFrame of pandas or, without pandas, of polars; without either as they
    are.
    """
    try:
        import pandas

        return pandas.DataFrame(rows)
    except ImportError:
        pass
    try:
        import polars

        return polars.DataFrame(rows)
    except ImportError:
        return rows
