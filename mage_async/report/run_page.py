"""The page, from its first line to the folded configuration."""

from collections.abc import Mapping, Sequence
from typing import Any

from mage_async.config import config_file
from mage_async.doctor import examine
from mage_async.report.charts.learning_curves import (
    SETS,
    adaptation,
    environment_curves,
    episode_css,
    learning_curves,
)
from mage_async.report.charts.number_format import words
from mage_async.report.charts.stacked_bars import FATES, fate_bar, time_bars
from mage_async.report.charts.step_metrics import POLICY, THROUGHPUT, metric_charts, staleness
from mage_async.report.headline import facts, headline
from mage_async.report.more_figures import more_figures
from mage_async.report.population_table import population_table
from mage_async.report.return_tables import environment_tables, family_tables, sets_tables
from mage_async.report.templating import fill
from mage_async.report.trial_chat import trial_chat
from mage_async.results.run_directory import RunDirectory
from mage_async.results.run_files import Record, RunRecords, read_records

MAX_FOLDED_TRIALS = 12


def render(run: RunDirectory, summary: Mapping[str, Any]) -> str:
    """One self-contained HTML page about a run; `summary` is what `summarise` made of it.

    Raises:
        RunError: `run` is no run directory, or one of its files is damaged.
    """
    records = read_records(run)
    config, population = records.config, records.learner.get("population")
    units = summary["environment"]["units"]
    return fill(
        "run.html",
        title=f"{summary['environment']['name']} · seed {summary['seed']} · mage",
        headline=headline(records, summary),
        facts=facts(summary, config.admission),
        findings=examine(records),
        adaptation=adaptation_part(records, summary),
        set_names={css: label for label, css in SETS.values()},
        curves=learning_curves(records),
        environment_curves=environment_curves(records),
        episode_names=episode_names(config.trial.episodes),
        population=population_table(population, units) if population else None,
        time_bars=time_bars(blocked_s(records)),
        staleness=staleness(records.metrics, config.admission.max_staleness),
        fates=fates_part(records.learner),
        throughput=metric_charts(records, THROUGHPUT),
        policy=metric_charts(records, POLICY),
        more=more_figures(summary),
        **_trials(records.samples, units),
        config=config_file.dump(config),
    )


def adaptation_part(records: RunRecords, summary: Mapping[str, Any]) -> Record | None:
    """The final evaluation as a chart and tables; None where there was none."""
    evaluation = summary.get("evaluation", {})
    if not evaluation:
        return None
    references = summary.get("references", {})
    bound = _bound(summary["environment"], evaluation)
    return {
        "measured": _measured(records.evaluation),
        "chart": adaptation(evaluation, references.get("heldout", {})),
        **sets_tables(evaluation, summary, bound),
        "families": family_tables(records.evaluation["sets"], bound),
        "environments": environment_tables(evaluation, summary.get("environments", {})),
    }


def _measured(evaluation: Record) -> str:
    trials = evaluation["sets"]["heldout"]["num_trials"]
    return f"version {evaluation['version']}, {trials:,} trials a set; bands: 95 % intervals"


def blocked_s(records: RunRecords) -> dict[str, dict[str, float]]:
    """Seconds by state of each process; two book to their own ends, which are later ones."""
    booked = dict(records.learner.get("blocked_s", {}))
    for name, record in (("evaluator", records.evaluation), ("supervisor", records.supervisor)):
        if at_its_end := record.get("blocked_s"):
            booked[name] = at_its_end
    return booked


def fates_part(learner: Record) -> Record | None:
    """What became of the trials: granted = trained + dropped + in flight; None before the end."""
    trials = learner.get("trials", {})
    if not trials:
        return None
    is_whole = sum(trials[name] for name in FATES) == trials["granted"]
    fates = " + ".join(f"{trials[name]:,} {words(name)}" for name in FATES)
    return {
        "bar": fate_bar(trials),
        "sum": f"{trials['granted']:,} granted {'=' if is_whole else '≠'} {fates}",
        "also": f"{trials['acknowledged']:,} acknowledged, {trials['duplicate']:,} duplicate;"
        f" groups granted again: {learner.get('granted_again', 0)}",
        "reasons": sorted(learner.get("dropped_by_reason", {}).items()),
    }


def _trials(samples: Sequence[Record], units: int) -> Record:
    """An early trial beside one of the final version, and more of them."""
    shown = early_and_late(samples) if samples else []
    others = [sample for sample in samples if sample not in shown][-MAX_FOLDED_TRIALS:]
    return {
        "trials": [trial_chat(sample, units) for sample in shown],
        "more_trials": [trial_chat(sample, units) for sample in others],
    }


def early_and_late(samples: Sequence[Record]) -> list[Record]:
    """The oldest and the newest version, on the same task where that was played, else on any."""
    first = min(samples, key=lambda sample: sample["version"])
    newest = max(sample["version"] for sample in samples)
    late = [sample for sample in samples if sample["version"] == newest]
    same = [sample for sample in late if _task(sample) == _task(first)]
    heldout = [sample for sample in late if sample.get("split") == "heldout"]
    last = (same or heldout or late)[0]
    return [first] if last is first else [first, last]


def _task(sample: Record) -> tuple[str, int, int]:
    return sample["member"], sample["seed"], sample["seat"]


def episode_names(count: int) -> dict[str, str]:
    return {episode_css(k, count): f"episode {k + 1}" for k in range(count)}


def _bound(environment: Mapping[str, Any], evaluation: Mapping[str, Any]) -> float:
    """The largest return per unit that an episode can have, in size; where the environment does not
    declare that, the largest that an episode had on average.
    """
    if environment["min_return"] is None:
        means = (mean for score in evaluation.values() for mean in score["return_by_episode"])
        return max(map(abs, means), default=1.0) or 1.0
    return (
        max(abs(environment["min_return"]), abs(environment["max_return"])) / environment["units"]
    )
