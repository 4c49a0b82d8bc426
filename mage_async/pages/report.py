"""The report: one self-contained page about a run, from its headline to its configuration."""

from collections.abc import Mapping, Sequence
from typing import Any

from mage_async.config import config_file
from mage_async.doctor import examine
from mage_async.pages.charts import (
    FATE_COLOURS,
    Chart,
    Series,
    fate_bar,
    line_chart,
    time_bars,
    words,
)
from mage_async.pages.curves import (
    POLICY,
    THROUGHPUT,
    adaptation,
    environment_curves,
    episode_css,
    learning_curves,
    metric_charts,
    set_css,
    staleness,
)
from mage_async.pages.headline import facts, headline
from mage_async.pages.tables import (
    diversity_table,
    environment_tables,
    family_tables,
    harder_tables,
    population_table,
    sets_tables,
)
from mage_async.pages.templating import fill
from mage_async.pages.turns import sample_trial
from mage_async.results.return_rows import SETS
from mage_async.results.run_directory import RunDirectory
from mage_async.results.run_files import Record, RunRecords, read_records

MAX_FOLDED_TRIALS = 12
SET_NAMES = {set_css(name): each.label for name, each in SETS.items()}
"""Legend of the evaluation sets: labels by CSS class."""


def render(run: RunDirectory, summary: Mapping[str, Any]) -> str:
    """Return the report of a run.

    Args:
        run: the run, finished or not.
        summary: the run's summary, by `summarise`.

    Raises:
        RunError: `run` is no run directory, or one of its files is damaged.
    """
    records = read_records(run)
    config, population = records.config, records.learner.get("population")
    units = summary["environment"]["units"]
    diversity, harder = summary.get("diversity"), summary.get("harder")
    return fill(
        "run.html",
        title=f"{summary['environment']['name']} · seed {summary['seed']} · mage",
        headline=headline(records, summary),
        facts=facts(summary, config.admission),
        findings=examine(records),
        adaptation=adaptation_part(records, summary),
        set_names=SET_NAMES,
        curves=learning_curves(records),
        environment_curves=environment_curves(records),
        episode_names=episode_names(config.trial.episodes),
        population=population_table(population, units) if population else None,
        time_bars=time_bars(seconds_by_state(records)),
        staleness=staleness(records.metrics, config.admission.max_staleness),
        fates=fates_part(records.learner),
        throughput=metric_charts(records, THROUGHPUT),
        policy=metric_charts(records, POLICY),
        diversity=_diversity_part(diversity) if diversity else None,
        harder=_harder_part(harder) if harder else None,
        **_trials_part(records.samples, units),
        config=config_file.dump(config),
    )


# Parts of the report, which the live page of a run has too.


def adaptation_part(records: RunRecords, summary: Mapping[str, Any]) -> Record | None:
    """Return the final evaluation as a chart and tables; `None` if there was none."""
    evaluation = summary.get("evaluation", {})
    if not evaluation:
        return None
    references = summary.get("references", {})
    bound = _return_bound(summary["environment"], evaluation)
    version = records.evaluation["version"]
    trials = records.evaluation["sets"]["heldout"]["num_trials"]
    return {
        "measured": f"version {version}, {trials:,} trials a set; bands: 95 % intervals",
        "chart": adaptation(evaluation, references.get("heldout", {})),
        **sets_tables(evaluation, summary, bound),
        "families": family_tables(records.evaluation["sets"], bound),
        "environments": environment_tables(summary),
    }


def _return_bound(environment: Mapping[str, Any], evaluation: Mapping[str, Any]) -> float:
    """Return the largest return per unit in absolute value that an episode can have.

    If the environment does not declare it, this is the largest mean return of an episode.
    """
    if environment["min_return"] is None:
        means = (mean for score in evaluation.values() for mean in score["return_by_episode"])
        return max(map(abs, means), default=1.0) or 1.0
    largest = max(abs(environment["min_return"]), abs(environment["max_return"]))
    return largest / environment["units"]


def seconds_by_state(records: RunRecords) -> dict[str, dict[str, float]]:
    """Return the seconds that each process spent in each state."""
    seconds = dict(records.learner.get("blocked_s", {}))
    # These two write their own seconds after the learner has ended: theirs are the later ones.
    for name, record in (("evaluator", records.evaluation), ("supervisor", records.supervisor)):
        if final := record.get("blocked_s"):
            seconds[name] = final
    return seconds


def fates_part(learner: Record) -> Record | None:
    """Return the fates of all trials, granted = trained + dropped + in flight.

    `None` if the learner has not recorded them.
    """
    trials = learner.get("trials", {})
    if not trials:
        return None
    is_whole = sum(trials[name] for name in FATE_COLOURS) == trials["granted"]
    fates = " + ".join(f"{trials[name]:,} {words(name)}" for name in FATE_COLOURS)
    return {
        "bar": fate_bar(trials),
        "sum": f"{trials['granted']:,} granted {'=' if is_whole else '≠'} {fates}",
        "also": f"{trials['acknowledged']:,} acknowledged, {trials['duplicate']:,} duplicate;"
        f" groups granted again: {learner.get('granted_again', 0)}",
        "reasons": sorted(learner.get("dropped_by_reason", {}).items()),
    }


def episode_names(count: int) -> dict[str, str]:
    """Return the legend of episodes: labels by CSS class."""
    return {episode_css(k, count): f"episode {k + 1}" for k in range(count)}


# Parts that only the report has.


def _diversity_part(diversity: Mapping[str, Any]) -> Record:
    plays = f"{diversity['num_tasks']:,} held-out tasks, each played {diversity['repeats']} times"
    return {
        "note": f"{plays}; at most {diversity['most']:.2f} nats",
        "table": diversity_table(diversity),
    }


def _harder_part(harder: Mapping[str, Any]) -> Record:
    return {
        "ladder": harder["ladder"],
        "returns": _rung_chart(harder["rungs"], "return_by_episode", "ci95_by_episode"),
        "wins": _rung_chart(harder["rungs"], "won_by_episode"),
        **harder_tables(harder),
    }


def _rung_chart(
    rungs: Sequence[Mapping[str, Any]], name: str, half_widths: str = ""
) -> Chart | None:
    """Return the chart of a figure against difficulty, with a line for each episode."""
    num_episodes = len(rungs[0]["score"][name])
    series = [
        Series(
            f"episode {episode + 1}",
            [(float(place), rung["score"][name][episode]) for place, rung in enumerate(rungs)],
            episode_css(episode, num_episodes),
            [rung["score"][half_widths][episode] for rung in rungs] if half_widths else (),
            has_dots=True,
        )
        for episode in range(num_episodes)
    ]
    named = [(float(place), rung["label"]) for place, rung in enumerate(rungs)]
    return line_chart(series, described=f"{name} against difficulty", x_names=named)


def _trials_part(samples: Sequence[Record], units: int) -> Record:
    """Return an early trial and one of the final version, and a few more to unfold."""
    shown = early_and_late(samples) if samples else []
    others = [sample for sample in samples if sample not in shown][-MAX_FOLDED_TRIALS:]
    return {
        "trials": [sample_trial(sample, units) for sample in shown],
        "more_trials": [sample_trial(sample, units) for sample in others],
    }


def early_and_late(samples: Sequence[Record]) -> list[Record]:
    """Return a trial of the oldest and one of the newest version, on the same task if possible."""
    first = min(samples, key=lambda sample: sample["version"])
    newest = max(sample["version"] for sample in samples)
    late = [sample for sample in samples if sample["version"] == newest]
    same = [sample for sample in late if _task(sample) == _task(first)]
    heldout = [sample for sample in late if sample.get("split") == "heldout"]
    last = (same or heldout or late)[0]
    return [first] if last is first else [first, last]


def _task(sample: Record) -> tuple[str, int, int]:
    return sample["member"], sample["seed"], sample["seat"]
