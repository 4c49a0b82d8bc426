"""The page, from its first line to the folded configuration."""

from collections.abc import Mapping, Sequence
from typing import Any

from mage_async.config import config_file
from mage_async.report.charts.learning_curves import (
    SETS,
    adaptation,
    episode_css,
    learning_curves,
    legend,
)
from mage_async.report.charts.measures import POLICY, THROUGHPUT, small_multiples, staleness
from mage_async.report.charts.shares import time_shares, trial_fates
from mage_async.report.document import document, folded, section
from mage_async.report.headline import facts, headline
from mage_async.report.markup import Markup, tag
from mage_async.report.population import population_table
from mage_async.report.reading import chat
from mage_async.report.tables import family_tables, sets_table
from mage_async.results.run_directory import RunDirectory
from mage_async.results.run_files import Record, RunRecords, read_records

MAX_FOLDED_TRIALS = 12


def render(run: RunDirectory, summary: Mapping[str, Any]) -> str:
    """One self-contained HTML page about a run; `summary` is what `summarise` made of it.

    Raises:
        RunError: `run` is no run directory, or one of its files is damaged.
    """
    records = read_records(run)
    title = f"{summary['environment']['name']} · seed {summary['seed']} · mage"
    return document(
        title,
        headline(records, summary),
        facts(summary, records.config.admission),
        *_results(records, summary),
        *_population(records, summary["environment"]["units"]),
        *_process(records),
        *_trials(records, summary["environment"]["units"]),
        section("Configuration", folded("the resolved configuration", _config(records))),
    )


def _results(records: RunRecords, summary: Mapping[str, Any]) -> list[Markup]:
    evaluation = summary.get("evaluation", {})
    parts = [section("Learning curves", _episodes_legend(records), learning_curves(records))]
    if evaluation:
        references, bound = summary.get("references", {}), _bound(summary["environment"])
        picture = tag(
            "figure",
            tag("figcaption", _measured(records.evaluation)),
            adaptation(evaluation, references.get("heldout", {})),
        )
        table = sets_table(evaluation, references, bound)
        both = tag("div", picture, tag("div", table), cls="pair")
        named = {css: label for label, css in SETS.values()}
        parts.insert(0, section("Adaptation", legend(named), both))
        families = family_tables(records.evaluation["sets"], bound)
        parts.append(section("Who it was played against", families))
    return parts


def _population(records: RunRecords, units: int) -> list[Markup]:
    """Where versions of the policy, or a matchmaker, were asked for."""
    table = records.learner.get("population")
    return [section("Whom it met", population_table(table, units))] if table else []


def _measured(evaluation: Record) -> str:
    trials = evaluation["sets"]["heldout"]["num_trials"]
    return f"version {evaluation['version']}, {trials:,} trials a set; bands: 95 % intervals"


def _blocked_s(records: RunRecords) -> dict[str, dict[str, float]]:
    """Seconds by state of each process; two book to their own ends, which are later ones."""
    booked = dict(records.learner.get("blocked_s", {}))
    for name, record in (("evaluator", records.evaluation), ("supervisor", records.supervisor)):
        if at_its_end := record.get("blocked_s"):
            booked[name] = at_its_end
    return booked


def _process(records: RunRecords) -> list[Markup]:
    learner, bound = records.learner, records.config.admission.max_staleness
    fates = trial_fates(
        learner.get("trials", {}),
        learner.get("dropped_by_reason", {}),
        learner.get("granted_again", 0),
    )
    stale = tag("div", tag("h3", "staleness, in steps"), staleness(records.metrics, bound))
    return [
        section("Where the time went", time_shares(_blocked_s(records))),
        section(
            "Staleness and trials",
            tag("div", stale, tag("div", tag("h3", "trials"), fates), cls="pair"),
        ),
        section("Throughput", small_multiples(records.metrics, THROUGHPUT)),
        section("Policy", small_multiples(records.metrics, POLICY)),
    ]


def _trials(records: RunRecords, units: int) -> list[Markup]:
    """An early trial beside one of the final version, and more of them folded."""
    samples = records.samples
    if not samples:
        return []
    shown = early_and_late(samples)
    others = [sample for sample in samples if sample not in shown][-MAX_FOLDED_TRIALS:]
    pair = tag("div", *(chat(sample, units) for sample in shown), cls="pair")
    more = tag("div", *(chat(sample, units) for sample in others), cls="pair")
    more_of_them = folded(f"{len(others)} more trials", more) if others else None
    note = tag(
        "p", "Words on green were drawn by the policy; the rest is what it was told.", cls="note"
    )
    return [section("Trials to read", note, pair, more_of_them)]


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


def _episodes_legend(records: RunRecords) -> Markup:
    count = records.config.trial.episodes
    return legend({episode_css(k, count): f"episode {k + 1}" for k in range(count)})


def _bound(environment: Mapping[str, Any]) -> float:
    """The largest return per unit that an episode can have, in size."""
    return (
        max(abs(environment["min_return"]), abs(environment["max_return"])) / environment["units"]
    )


def _config(records: RunRecords) -> Markup:
    return tag("pre", config_file.dump(records.config))
