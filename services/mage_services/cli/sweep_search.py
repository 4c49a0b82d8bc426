"""Let Optuna (extra `search`) choose the combinations of `mage sweep --search` from the results so
far.

Optuna's record is `search.log` in the sweep's folder. A combination that was chosen but has no
result, because the command was stopped or a run failed, is run first by the next command. It is
given up after the second failure of one of its runs. A combination that is no valid configuration
is left out; it is one of the `N` of `--search N` all the same, so that every search ends.
"""

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mage_async.errors import ConfigError
from mage_async.results.sweep import (
    Axis,
    Matrix,
    Range,
    Setting,
    best_note,
    combination,
    drawn,
)
from mage_async.trajectory import num_decimals
from mage_services.cli.sweep_runs import lock_folder, run_missing
from mage_services.terminal import lasting_output

GOAL = "heldout_last_return"
"""Name of the result (`FinishedRun.figures`) whose mean over seeds is maximised."""
MOST_FAILURES = 2
"""Number of failures of a run after which its combination is given up; the machine may have caused
one.
"""
TEXTS = "values"
"""Name of the attribute of Optuna's trials that holds the values as texts of the configuration.

They are stored, because the digits of a number depend on the ends of its range, which may change.
"""
NUM_DRAWN = 10
"""Number of results that Optuna needs; until then it draws combinations at random."""
NUM_TRIED = 16
"""Number of combinations drawn for a check, if the first values of all keys are not valid together;
one of them must be a valid configuration."""
MatrixOf = Callable[[Sequence[Setting]], Matrix]
"""Returns the matrix of some combinations of values, with every seed; raises a `ConfigError` if one
is no valid configuration.
"""
Combination = tuple[int, Setting]
"""The number of a trial of Optuna, and its combination of values."""


def search(axes: Sequence[Axis], count: int, seed: int, matrix_of: MatrixOf) -> int:
    """Run `count` combinations, `matrix.parallel` at once, and print the best.

    Args:
        matrix_of: Returns the matrix of some combinations.

    Returns:
        The last exit status of `run_missing`. The search ends early if this is not 0, or if a run
        was not begun before `--for-s` was over.

    Raises:
        ConfigError: Optuna is not installed, no combination that was tried is a valid
            configuration, or the folder holds a search over other keys or values.
        RunError: another process searches there; or as `run_matrix`.
    """
    first = [
        axis.choices.text(axis.choices.low) if isinstance(axis.choices, Range) else axis.choices[0]
        for axis in axes
    ]
    # Refuse wrong keys and values before anything is written. Several combinations are checked,
    # because two keys may contradict each other only at some of their values.
    fault = _fault(combination(axes, first), matrix_of)
    if fault and all(_fault(each, matrix_of) for each in drawn(axes, NUM_TRIED, seed)):
        raise fault
    empty = matrix_of([])
    # Without the lock, two commands would change Optuna's record at once.
    with lock_folder(empty.root), lasting_output():
        study = _study(empty.root / "search.log", seed)
        _check_axes(study, axes, empty.root)
        return _search(study, axes, count, empty, matrix_of)


def _search(
    study: Any, axes: Sequence[Axis], count: int, empty: Matrix, matrix_of: MatrixOf
) -> int:
    """Do the work of `search`, with Optuna's record, in a folder that this process has locked.

    Args:
        empty: The matrix without combinations.
    """
    code, latest_start, matrix = 0, time.monotonic() + empty.for_s, empty
    while code == 0:
        # Combinations of earlier rounds are in the matrix too, so that the report has them.
        known = [_setting(axes, trial) for trial in study.trials if trial.value is not None]
        chosen = _chosen(study, axes, count, empty.parallel)
        valid = _valid(study, chosen, matrix_of)
        if chosen and not valid:
            continue
        # Even if nothing is left to choose, the matrix is run once: then missing seeds of the known
        # combinations are run, and runs of another configuration are refused.
        if not chosen and (matrix is not empty or not known):
            break
        is_first, matrix = matrix is empty, matrix_of([*known, *(each for _, each in valid)])
        # `--for-s` limits all rounds together, and the first round prints the note.
        for_s, note = latest_start - time.monotonic(), matrix.note if is_first else ""
        code = run_missing(replace(matrix, for_s=for_s, note=note))
        if not _record(study, valid, matrix):
            return code
    reached = {each: mean for each, mean in _means(matrix).items() if math.isfinite(mean)}
    if reached:
        best = max(reached, key=reached.__getitem__)
        print(f"best: {best.label}: {reached[best]:.{num_decimals([reached[best]])}f}")
        if note := best_note(len(reached)):
            print(f"careful: {note}")
    return code


def _means(matrix: Matrix) -> dict[Setting, float]:
    """Return the mean of `GOAL` over the seeds, for each combination whose runs are all done."""
    goals = {run.cell: run.figures[GOAL] for run in matrix.finished_runs()}
    by_setting = defaultdict[Setting, list[float | None]](list)
    for cell in matrix.configs:
        by_setting[cell.setting].append(goals.get(cell))
    means = dict[Setting, float]()
    for setting, found in by_setting.items():
        known = [goal for goal in found if goal is not None]
        if len(known) == len(found):
            means[setting] = statistics.fmean(known)
    return means


def _fault(setting: Setting, matrix_of: MatrixOf) -> ConfigError | None:
    """Return why a combination is no valid configuration; None if it is one."""
    try:
        matrix_of([setting])
    except ConfigError as error:
        return error
    return None


def _valid(study: Any, chosen: Sequence[Combination], matrix_of: MatrixOf) -> list[Combination]:
    """Return the combinations that are valid configurations. Record the others as failed, and print
    why.
    """
    from optuna.trial import TrialState

    found = []
    for number, setting in chosen:
        if fault := _fault(setting, matrix_of):
            study.tell(number, state=TrialState.FAIL)
            print(f"{setting.label}: left out: {fault}", flush=True)
        else:
            found.append((number, setting))
    return found


def _study(file: Any, seed: int) -> Any:
    """Open Optuna's record of a sweep, or begin one."""
    try:
        import optuna
        from optuna.storages.journal import JournalFileBackend
    except ImportError:
        raise ConfigError("--search needs Optuna: pip install 'mage_async[search]'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    backend = JournalFileBackend(str(file))
    study = optuna.create_study(
        storage=optuna.storages.JournalStorage(backend),
        study_name="sweep",
        direction="maximize",
        load_if_exists=True,
    )
    # With the seed of an earlier command, the sampler would draw the same combinations again.
    so_far = len(study.trials)
    study.sampler = optuna.samplers.TPESampler(seed=seed + so_far, n_startup_trials=NUM_DRAWN)
    return study


def _check_axes(study: Any, axes: Sequence[Axis], root: Path) -> None:
    """Refuse to go on with a search over other keys, or other values of a key. Ends of a range may
    change.

    Raises:
        ConfigError: the record in the folder `root` is of such a search.
    """
    from optuna.distributions import check_distribution_compatibility

    own = {axis.key: _distribution(axis) for axis in axes}
    for trial in study.trials:
        is_same = trial.value is None or set(trial.distributions) == set(own)
        try:
            for key, values in trial.distributions.items():
                if key in own:
                    check_distribution_compatibility(values, own[key])
                else:
                    is_same = False
        except ValueError:  # the error of Optuna for another kind, or other choices
            is_same = False
        if not is_same:
            raise ConfigError(
                f"{root} holds a search over {', '.join(trial.distributions)} with other --over: "
                "give the same, or another --run-dir"
            )


def _chosen(study: Any, axes: Sequence[Axis], count: int, most: int) -> list[Combination]:
    """Return combinations to run now: those of an earlier command that have no result yet. If there
    are none, return at most `most` new ones, as long as the study has fewer than `count` in all.
    """
    from optuna.trial import TrialState

    unfinished = []
    for trial in study.trials:
        if TEXTS in trial.user_attrs and not trial.state.is_finished():
            unfinished.append(trial)
        elif not trial.state.is_finished():  # the command was killed before the values were stored
            study.tell(trial.number, state=TrialState.FAIL)
    if not unfinished:
        distributions = {axis.key: _distribution(axis) for axis in axes}
        num_new = min(most, count - len(study.trials))
        new = [study.ask(distributions) for _ in range(num_new)]
        for trial in new:
            trial.set_user_attr(TEXTS, _texts(axes, trial.params))
        unfinished = [study.trials[trial.number] for trial in new]
    return [(trial.number, _setting(axes, trial)) for trial in unfinished]


def _distribution(axis: Axis) -> Any:
    """Return the values of a key as Optuna draws them."""
    from optuna import distributions

    own = axis.choices
    if not isinstance(own, Range):
        return distributions.CategoricalDistribution(own)
    if own.is_whole:
        return distributions.IntDistribution(int(own.low), int(own.high), log=own.is_log)
    return distributions.FloatDistribution(own.low, own.high, log=own.is_log)


def _texts(axes: Sequence[Axis], values: Mapping[str, Any]) -> dict[str, str]:
    """Return the values that Optuna drew, by key, as texts of the configuration."""
    return {
        axis.key: axis.choices.text(values[axis.key])
        if isinstance(axis.choices, Range)
        else values[axis.key]
        for axis in axes
    }


def _setting(axes: Sequence[Axis], trial: Any) -> Setting:
    """Return the setting of a trial of Optuna."""
    return combination(axes, [trial.user_attrs[TEXTS][axis.key] for axis in axes])


def _record(study: Any, chosen: Sequence[Combination], matrix: Matrix) -> bool:
    """Record the results of combinations whose runs are all done; return whether all are.

    A combination counts as failed if its result is no finite number, for example because weights
    diverged, or if one of its runs failed `MOST_FAILURES` times.
    """
    from optuna.trial import TrialState

    means, num_open = _means(matrix), 0
    for number, setting in chosen:
        cells = [cell for cell in matrix.configs if cell.setting == setting]
        if math.isfinite(mean := means.get(setting, math.nan)):
            study.tell(number, mean)
        elif setting in means:
            study.tell(number, state=TrialState.FAIL)
        elif any(matrix.num_failures(cell) >= MOST_FAILURES for cell in cells):
            study.tell(number, state=TrialState.FAIL)
            print(f"{setting.label}: given up, because a run failed {MOST_FAILURES} times")
        else:
            num_open += 1
    return num_open == 0
