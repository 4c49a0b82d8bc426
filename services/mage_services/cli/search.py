"""`mage sweep --search`: combinations chosen by Optuna (extra `search`) from the results so far.

Optuna's record is `search.log` in the sweep's folder. A combination that was chosen but has no
result, because the command was stopped or a run failed, is run first by the next command. It is
given up after the second failure of one of its runs.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mage_async.errors import ConfigError
from mage_async.results.matrix import Matrix, Setting
from mage_async.results.sweep import Axis, Range, combination
from mage_services.cli.matrix_runs import run_matrix

GOAL = "heldout_last_return"
"""The figure that is maximised, in the mean over seeds."""
MOST_FAILURES = 2
"""Failures of a run after which its combination is given up; one may be the machine's fault."""
MatrixOf = Callable[[Sequence[Setting]], Matrix]
Combination = tuple[int, Setting]
"""A combination of values, with the number of Optuna's trial."""


def search(
    axes: Sequence[Axis],
    count: int,
    seed: int,
    matrix_of: MatrixOf,
    run: Callable[[Matrix], int] = run_matrix,
) -> int:
    """Run `count` combinations, `matrix.parallel` at once, and print the best.

    Args:
        matrix_of: makes the matrix of some combinations.
        run: runs the missing cells of a matrix, and returns 0 where none failed.

    Returns:
        The last value of `run`; the search ends where it is not 0, or where runs are left.

    Raises:
        ConfigError: Optuna is not installed, or a combination is no valid configuration.
    """
    # A key that does not exist is an error here, before anything is written.
    first = {
        axis.key: axis.choices.low if isinstance(axis.choices, Range) else axis.choices[0]
        for axis in axes
    }
    root = matrix_of([_setting(axes, first)]).root
    root.mkdir(parents=True, exist_ok=True)
    study = _study(root / "search.log", seed)
    code = 0
    while code == 0 and (chosen := _chosen(study, axes, count, matrix_of([]).parallel)):
        known = [trial for trial in study.trials if trial.value is not None]
        settings = [_setting(axes, trial.params) for trial in known]
        matrix = matrix_of([*settings, *(setting for _, setting in chosen)])
        code = run(matrix)
        if not _record(study, chosen, matrix):
            return code
    if any(trial.value is not None for trial in study.trials):
        print(f"best: {_setting(axes, study.best_params).label}: {study.best_value:.3f}")
    return code


def _study(file: Any, seed: int) -> Any:
    try:
        import optuna
    except ImportError:
        raise ConfigError("--search needs Optuna: pip install 'mage_async[search]'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    backend = optuna.storages.journal.JournalFileBackend(str(file))
    study = optuna.create_study(
        storage=optuna.storages.JournalStorage(backend),
        study_name="sweep",
        direction="maximize",
        load_if_exists=True,
    )
    so_far = len(study.trials)  # with the same seed, the sampler would draw the same ones again
    study.sampler = optuna.samplers.TPESampler(seed=seed + so_far)
    return study


def _chosen(study: Any, axes: Sequence[Axis], count: int, most: int) -> list[Combination]:
    """Return combinations without a result: those of an earlier call, else at most `most` new."""
    from optuna.trial import TrialState

    whole = []
    for trial in study.trials:
        if len(trial.params) == len(axes) and not trial.state.is_finished():
            whole.append(trial)
        elif not trial.state.is_finished():  # the command was killed while choosing it
            study.tell(trial.number, state=TrialState.FAIL)
    if not whole:
        distributions = {axis.key: _distribution(axis) for axis in axes}
        num_new = min(most, count - len(study.trials))
        asked = [study.ask(distributions) for _ in range(num_new)]
        whole = [study.trials[trial.number] for trial in asked]
    return [(trial.number, _setting(axes, trial.params)) for trial in whole]


def _distribution(axis: Axis) -> Any:
    """Return the values of a key as Optuna draws them."""
    from optuna import distributions

    own = axis.choices
    if not isinstance(own, Range):
        return distributions.CategoricalDistribution(own)
    if own.is_whole:
        return distributions.IntDistribution(int(own.low), int(own.high), log=own.is_log)
    return distributions.FloatDistribution(own.low, own.high, log=own.is_log)


def _setting(axes: Sequence[Axis], values: Mapping[str, Any]) -> Setting:
    """Return the setting with these values, by key."""
    texts = [
        axis.choices.text(values[axis.key]) if isinstance(axis.choices, Range) else values[axis.key]
        for axis in axes
    ]
    return combination(axes, texts)


def _record(study: Any, chosen: Sequence[Combination], matrix: Matrix) -> bool:
    """Record the results of combinations whose runs are all done; return whether all are.

    A combination counts as failed where its result is no finite number, as with weights that
    diverged, or where one of its runs failed too often.
    """
    from optuna.trial import TrialState

    goals = {each.cell: each.figures[GOAL] for each in matrix.finished_runs()}
    num_open = 0
    for number, setting in chosen:
        cells = [cell for cell in matrix.configs if cell.setting == setting]
        missing = [cell for cell in cells if cell not in goals]
        mean = math.nan if missing else statistics.fmean(goals[cell] for cell in cells)
        if math.isfinite(mean):
            study.tell(number, mean)
        elif not missing:
            study.tell(number, state=TrialState.FAIL)
        elif any(matrix.num_failures(cell) >= MOST_FAILURES for cell in missing):
            study.tell(number, state=TrialState.FAIL)
            print(f"{setting.label}: a run of it failed {MOST_FAILURES} times; it is given up")
        else:
            num_open += 1
    return num_open == 0
