"""`mage sweep --search`: combinations chosen by Optuna (extra `search`) from the results so far.

Optuna's record is `search.log` in the sweep's folder. A combination that was chosen but has no
result, because the command was stopped or a run failed, is run first by the next command. It is
given up after the second failure of one of its runs.
"""

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
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

    Returns: the last value of `run`; the search ends where it is not 0, or where runs are left.

    Raises:
        ConfigError: Optuna is not installed, or a combination is no valid configuration.
    """
    first = [_lowest(axis) for axis in axes]
    root = matrix_of(
        [combination(axes, first)]
    ).root  # raises the error of a key that does not exist
    root.mkdir(parents=True, exist_ok=True)
    study = _study(root / "search.log", seed)
    code = 0
    while code == 0 and (chosen := _chosen(study, axes, count, matrix_of)):
        matrix = matrix_of([setting for _, setting in (*_finished(study, axes), *chosen)])
        code = run(matrix)
        if not _tell(study, chosen, matrix):
            return code
    if any(trial.value is not None for trial in study.trials):
        print(f"best: {_setting(axes, study.best_trial).label}: {study.best_value:.3f}")
    return code


def _lowest(axis: Axis) -> str:
    """Return the lowest or first value of an axis, to check its key with."""
    choices = axis.choices
    return choices.text(choices.low) if isinstance(choices, Range) else choices[0]


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


def _chosen(
    study: Any, axes: Sequence[Axis], count: int, matrix_of: MatrixOf
) -> list[tuple[int, Setting]]:
    """Return combinations without a result, with Optuna's trial numbers: those of an earlier call,
    else new ones.
    """
    open_ones = [trial for trial in study.trials if not trial.state.is_finished()]
    whole = [trial for trial in open_ones if len(trial.params) == len(axes)]
    for trial in open_ones:
        if trial not in whole:  # the command was killed while choosing it
            study.tell(trial.number, state=type(trial.state).FAIL)
    if not whole:
        num_left = count - len(study.trials)
        for _ in range(min(matrix_of([]).parallel, num_left)):
            asked = study.ask()
            for axis in axes:
                _suggest(asked, axis)
            whole.append(study.trials[asked.number])
    return [(trial.number, _setting(axes, trial)) for trial in whole]


def _suggest(trial: Any, axis: Axis) -> None:
    choices = axis.choices
    if not isinstance(choices, Range):
        trial.suggest_categorical(axis.key, choices)
    elif choices.is_whole:
        trial.suggest_int(axis.key, int(choices.low), int(choices.high), log=choices.is_log)
    else:
        trial.suggest_float(axis.key, choices.low, choices.high, log=choices.is_log)


def _setting(axes: Sequence[Axis], trial: Any) -> Setting:
    return combination(axes, [_text(axis, trial.params[axis.key]) for axis in axes])


def _text(axis: Axis, value: Any) -> str:
    return axis.choices.text(value) if isinstance(axis.choices, Range) else value


def _finished(study: Any, axes: Sequence[Axis]) -> list[tuple[int, Setting]]:
    """Return the combinations that have a result, with Optuna's trial numbers."""
    known = [trial for trial in study.trials if trial.value is not None]
    return [(trial.number, _setting(axes, trial)) for trial in known]


def _tell(study: Any, chosen: Sequence[tuple[int, Setting]], matrix: Matrix) -> bool:
    """Tell Optuna the results of combinations all of whose runs are done; return whether all are.

    A combination counts as failed where its result is no finite number, as with weights that
    diverged, or where one of its runs failed too often.
    """
    results, num_runs = _results(matrix), Counter(cell.setting for cell in matrix.configs)
    whole = [each for each in chosen if len(results[each[1]]) == num_runs[each[1]]]
    hopeless = _hopeless(matrix)
    given_up = [each for each in chosen if each not in whole and each[1] in hopeless]
    for number, setting in (*whole, *given_up):
        mean = math.nan if setting in hopeless else statistics.fmean(results[setting])
        if math.isfinite(mean):
            study.tell(number, mean)
        else:
            study.tell(number, state=type(study.trials[number].state).FAIL)
    for _, setting in given_up:
        print(f"{setting.label}: a run of it failed {MOST_FAILURES} times; it is given up")
    return len(whole) + len(given_up) == len(chosen)


def _hopeless(matrix: Matrix) -> set[Any]:
    """Return combinations of which a run is not done and has failed too often."""
    done = {each.cell for each in matrix.finished_runs()}
    failed = (cell for cell in matrix.configs if matrix.num_failures(cell) >= MOST_FAILURES)
    return {cell.setting for cell in failed if cell not in done}


def _results(matrix: Matrix) -> dict[Any, list[float]]:
    found: dict[Any, list[float]] = defaultdict(list)
    for each in matrix.finished_runs():
        found[each.cell.setting].append(each.figures[GOAL])
    return found
