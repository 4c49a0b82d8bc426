"""`mage ablate`: measure what staleness costs, by bound, rule, correction, lag and seed.

The command is a sweep (`mage sweep`) over these five keys. The rule of admission decides which
groups of trials are granted to actors, trained or dropped. A lag delays the actors' weights on
purpose: it changes the staleness, but not the speed of the run. Every combination is a whole run in
a folder of its own under `--run-dir`. Called again, the command reads the finished runs and runs
the missing ones, each in processes of its own, `--parallel` at once. In the end it writes
`report.html` and `runs.csv`.
"""

import argparse
from typing import TYPE_CHECKING, Any

from mage_async.admission.policies import POLICIES
from mage_services.cli.sweep import add_run_arguments, matrix_of, whole_numbers

if TYPE_CHECKING:
    from mage_async.results.sweep import Matrix

HELP = "Measure what staleness costs: whole runs by bound, rule, correction, lag and seed."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the matrix, and how its runs are started."""
    parser.epilog = (
        "Every combination is a whole run; the default matrix has 135. The first value of each "
        "option makes the control, with which the page compares the others. The same command again "
        "goes on where it stopped."
    )
    add_run_arguments(parser, "runs/ablation")

    def axis(name: str, default: str, text: str, **more: Any) -> None:
        """Declare an option with the values of one key."""
        parser.add_argument(
            name, nargs="+", default=default.split(), help=f"{text} (default: {default})", **more
        )

    axis("--bounds", "0 1 2 4 8", "largest staleness in steps", metavar="N")
    guarantees = "; ".join(f"{rule.name} ({rule.guarantee})" for rule in POLICIES.values())
    admission = (
        f"rules of admission, with the bound on staleness that each guarantees: {guarantees}"
    )
    axis("--rules", "slots count drop", admission, choices=POLICIES, metavar="RULE")
    corrections = "values of learner.correction; your own class is module:Class"
    axis("--corrections", "decoupled none ppo", corrections, metavar="NAME")
    lag = "let actors use the weights of N steps ago: more staleness at the same speed"
    axis("--lags", "0", lag, metavar="N")
    axis("--seeds", "0 1 2", "seeds", metavar="N")


def run(given: argparse.Namespace) -> int:
    """Check every configuration of the matrix, run the missing cells, and write the report.

    Returns:
        1 if a run failed, 128 + N if signal N ended the runs, else 0.
    """
    from mage_services.cli.sweep_runs import run_matrix

    return run_matrix(ablation_of(given))


def ablation_of(given: argparse.Namespace) -> "Matrix":
    """Return the matrix of a command line, which has one cell for each combination.

    Raises:
        ConfigError: a cell is no valid configuration; the message names the key and the reason.
    """
    from mage_async.results.sweep import STALENESS, cells

    numbers = {name: whole_numbers(given, name) for name in ("bounds", "lags", "seeds")}
    to_run = cells(rules=given.rules, corrections=given.corrections, **numbers)
    return matrix_of(given, to_run, STALENESS, varied=[])
