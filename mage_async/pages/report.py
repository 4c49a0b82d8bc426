"""Make the report: one self-contained page about a run, from its headline to its configuration."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from mage_async.config import config_file
from mage_async.config.schema import Admission
from mage_async.doctor import Finding, examine
from mage_async.pages.charts import (
    FATE_COLOURS,
    Chart,
    arrows,
    counted,
    duration,
    fate_bar,
    line_chart,
    percent,
    short_number,
    signed,
    time_bars,
    words,
)
from mage_async.pages.curves import (
    POLICY,
    THROUGHPUT,
    adaptation,
    curve_points,
    environment_curves,
    episode_css,
    episode_lines,
    learning_curves,
    metric_charts,
    set_css,
    staleness,
)
from mage_async.pages.tables import (
    Table,
    TableCell,
    TableRow,
    diversity_table,
    environment_tables,
    family_tables,
    harder_tables,
    population_table,
    sets_tables,
)
from mage_async.pages.templating import fill
from mage_async.pages.turns import sample_trial
from mage_async.results.dropped_bias import Ratio, Selection, Share
from mage_async.results.intervals import half_text, halves_of
from mage_async.results.run_directory import RunDirectory
from mage_async.results.run_files import Record, RunRecords, read_records
from mage_async.results.summary import (
    SETS,
    EpisodeRow,
    Score,
    changed_note,
    chosen_note,
    numbers_note,
    reference_rows,
    unplayed_note,
    worse_note,
)
from mage_async.trajectory import num_decimals

NOTES = (worse_note, numbers_note, changed_note, chosen_note)
"""Functions that return a sentence below the verdict, or ""."""
MAX_FOLDED_TRIALS = 12
"""Largest number of trials that are shown folded."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Hold a number that a page shows in large type, with its label, its interval and a note."""

    label: str
    value: str
    note: str
    interval: str = ""
    css: str = ""
    before: str = ""
    """Earlier number that `value` has grown from; "" for none."""


def render(
    run: RunDirectory,
    summary: Mapping[str, Any],
    records: RunRecords | None = None,
    findings: Sequence[Finding] | None = None,
) -> str:
    """Return the report of a run.

    Args:
        run: Directory of the run, finished or not.
        summary: Summary of the run, from `summarise`.
        records: Records of the run; None: they are read.
        findings: Those of the doctor; None: it examines the records.

    Raises:
        RunError: `run` is no run directory, or one of its files is damaged.
    """
    records = records or read_records(run)
    config, population = records.config, records.learner.get("population")
    name, units = summary["environment"]["name"], summary["environment"]["units"]
    diversity, harder = summary.get("diversity"), summary.get("harder")
    evaluation = summary.get("evaluation", {})
    steps = counted(summary["steps"], "step")
    done = "" if summary["complete"] else ", not finished"
    kind = words(summary["credit"]["kind"])
    return fill(
        "run.html",
        title=f"{name} · seed {summary['seed']} · mage",
        name=name,
        run_line=f"{steps}{done} · seed {summary['seed']} · {kind} credit",
        verdict=verdict(evaluation) if "heldout" in evaluation else _unfinished(records, summary),
        tiles=_set_tiles(evaluation) if "heldout" in evaluation else [],
        levels=" · ".join(map(_last_value, reference_rows(summary))),
        facts=_facts(summary, config.admission),
        findings=examine(records) if findings is None else findings,
        adaptation=adaptation_part(records, summary),
        curves=learning_curves(records),
        notes=[text for each in NOTES if (text := each(summary))],
        unplayed=unplayed_note(summary),
        environment_curves=environment_curves(records),
        episode_names=episode_names(config.most_episodes),
        population=population_table(population, units) if population else None,
        time_bars=time_bars(seconds_by_state(records)),
        staleness=staleness(records.metrics, config.admission.most_stale, config.most_episodes),
        # The learner's own counts are those of its last checkpoint.
        fates=fates_part({**records.learner, "trials": summary.get("trials", {})}),
        selection=selection_table(Selection.of(records.metrics), config.admission),
        throughput=metric_charts(records, THROUGHPUT),
        policy=metric_charts(records, POLICY),
        diversity=_diversity_part(diversity) if diversity else None,
        harder=_harder_part(harder, config.most_episodes) if harder else None,
        **_trials_part(records.samples, units),
        config=config_file.dump(config),
    )


# The top of the page: the return, the returns of the controls, and numbers about the run.


def _set_tiles(evaluation: Mapping[str, Score]) -> list[Tile]:
    """Return a tile for each evaluation set: held-out, its controls, then the training tasks."""
    trials = f"{evaluation['heldout']['num_trials']:,} trials, 95 % interval"
    tiles = [heldout_tile(evaluation["heldout"], trials)]
    for name, each in SETS.items():
        if name != "heldout" and name in evaluation:
            returns, halves = evaluation[name]["return_by_episode"], halves_of(evaluation[name])
            label = f"{each.label}, episode {len(returns)}"
            digits = num_decimals((returns[-1], halves[-1])) - 1
            value, interval = signed(returns[-1], digits), f"± {half_text(halves[-1], digits)}"
            tiles.append(Tile(label, value, each.note, interval, set_css(name)))
    return tiles


def _last_value(reference: EpisodeRow) -> str:
    """Return label and last value of a reference, with its half-width if it was sampled."""
    halves = reference.half_widths
    digits = num_decimals((reference.values[-1], *(halves or [])[-1:])) - 1
    text = f"{reference.label} {signed(reference.values[-1], digits)}"
    return text if halves is None else f"{text} ± {half_text(halves[-1], digits)}"


def verdict(evaluation: Mapping[str, Score]) -> str:
    """Return a sentence on the held-out return and on how much of it is adaptation.

    Two controls play the same held-out tasks: `blind` without earlier episodes in the context,
    `swapped` with another member (the hidden part of a task) in the last episode. Adaptation counts
    as shown if both lower the last return by more than the 95 % half-width of the difference.
    """
    heldout, num_episodes = evaluation["heldout"], len(evaluation["heldout"]["return_by_episode"])
    reached = f"In episode {num_episodes} the policy earns {_last(heldout)} on held-out tasks."
    blind, swapped = evaluation.get("heldout_blind"), evaluation.get("heldout_swapped")
    if blind is None or swapped is None or num_episodes == 1:
        return reached
    controls = (
        f" Without the earlier episodes in its context it earns {_last(blind)}; with another"
        f" member hidden from the last episode on, {_last(swapped)}."
    )
    losses = [_loss(heldout, control) for control in (blind, swapped)]
    if all(loss > noise for loss, noise in losses):
        digits = num_decimals(loss for loss, _ in losses) - 1
        lost = " and ".join(signed(loss, digits).removeprefix("+") for loss, _ in losses)
        return f"{reached}{controls} Adaptation is what these controls take away: {lost}."
    return (
        f"{reached}{controls} Adaptation is what these controls take away, and at least one of them"
        " takes away nothing that can be told from chance, so adaptation is not shown."
    )


def _last(score: Score) -> str:
    """Return the last episode's return with its half-width."""
    mean, half = score["return_by_episode"][-1], halves_of(score)[-1]
    digits = num_decimals((mean, half)) - 1
    return f"{signed(mean, digits)}\u00a0±\u00a0{half_text(half, digits)}"


def _loss(heldout: Score, control: Score) -> tuple[float, float]:
    """Return by how much a control lowers the last return, with the half-width of that loss."""
    loss = heldout["return_by_episode"][-1] - control["return_by_episode"][-1]
    halves = halves_of(heldout)[-1], halves_of(control)[-1]
    return loss, math.hypot(*halves)


def _unfinished(records: RunRecords, summary: Mapping[str, Any]) -> str:
    """Return a sentence on how far a run without a final evaluation came."""
    trained, steps = summary["steps"], records.config.learner.steps
    text = f"Not evaluated: it ended after {trained} of {steps} steps."
    if trained == steps:
        text = (
            f"Not evaluated: all {steps} steps are trained, and it ended before the final sets "
            "were played, which a resumed run plays."
        )
    if points := curve_points(records, "heldout"):
        version, score = points[-1]
        returns = arrows(score["return_by_episode"])
        text += f" The curve's last point, version {version}, held-out: {returns}."
    return text


def _facts(summary: Mapping[str, Any], admission: Admission) -> list[Tile]:
    """Return small tiles with numbers about the run: its time, speed, staleness and faults."""
    staleness, cache = summary.get("staleness", {}), summary.get("prefix_cache", {})
    rates, mismatch = summary.get("throughput", {}), summary.get("logprob_mismatch", {})
    spent = []
    if "warm_start_s" in summary:
        spent.append(f"warm start {duration(summary['warm_start_s'])} of it")
    if "processor_s" in summary:
        spent.append(f"{duration(summary['processor_s'])} of CPU time")
    rows = [("wall time", duration(summary["wall_s"]), "; ".join(spent))]
    if rates:
        speed = f"{short_number(rates['generated_tokens_per_s'])} sampled tokens/s"
        rows.append(("trials/s", short_number(rates["trials_per_s"]), speed))
    if staleness:
        lag = f" + {admission.lag} of lag" if admission.lag else ""
        bound = f"max {short_number(staleness['max'])}"
        if admission.most_stale is None:
            bound += f"; rule {admission.rule!r} has no bound"
        else:
            bound += f" of {admission.nominal_bound}{lag} allowed"
        rows.append(("staleness, mean", f"{staleness['mean']:.2f}", bound))
    if cache:
        reuse = f"{percent(cache['reuse_rate'])} of tokens computed before"
        rows.append(("prefix-cache hits", percent(cache["hit_rate"]), reuse))
    if mismatch:
        mean = f"nats; mean {short_number(mismatch['mean_abs'])}"
        rows.append(("log-prob mismatch, max", short_number(mismatch["max_abs"]), mean))
    if "invalid_actions_per_trial" in summary:
        invalid = short_number(round(summary["invalid_actions_per_trial"], 3))
        rows.append(("invalid actions", invalid, "a trial, while training"))
    for source, count in summary.get("injections", {}).items():
        rows.append(("special tokens in text", f"{count:,}", f"observations of {source}"))
    return [Tile(*row) for row in rows]


# Parts of the report that the live page of a run has too.


def heldout_tile(heldout: Score, note: str) -> Tile:
    """Return the largest tile of a page: the held-out return of the first and the last episode."""
    returns = heldout["return_by_episode"]
    halves = halves_of(heldout) if "ci95_by_episode" in heldout else None
    has_several, digits = len(returns) > 1, num_decimals((*returns, *(halves or ()))) - 1
    return Tile(
        label=f"held-out return, episode 1{f' → {len(returns)}' if has_several else ''}",
        value=signed(returns[-1], digits),
        note=note,
        interval=f"± {half_text(halves[-1], digits)}" if halves else "",
        css="hero",
        before=signed(returns[0], digits) if has_several else "",
    )


def adaptation_part(records: RunRecords, summary: Mapping[str, Any]) -> Record | None:
    """Return the final evaluation as a chart and tables; `None` if there was none."""
    evaluation = summary.get("evaluation", {})
    if not evaluation:
        return None
    references = {row.label: row.values for row in reference_rows(summary)}
    bound = _return_bound(summary["environment"], evaluation)
    version = records.evaluation["version"]
    trials = records.evaluation["sets"]["heldout"]["num_trials"]
    return {
        "measured": f"version {version}, {trials:,} trials a set; bands and ±: 95 % intervals over "
        "trials of these tasks, which say nothing about other tasks, unlike those of mage adapt",
        "set_names": {
            set_css(name): each.label for name, each in SETS.items() if name in evaluation
        },
        "chart": adaptation(evaluation, references),
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
        return max(map(abs, means), default=1.0) or 1.0  # never 0: returns are divided by it
    largest: float = max(abs(environment["min_return"]), abs(environment["max_return"]))
    return largest / float(environment["units"])


def seconds_by_state(records: RunRecords) -> dict[str, dict[str, float]]:
    """Return the seconds that each process spent in each state."""
    seconds = dict(records.learner.get("blocked_s", {}))
    # The evaluator and the supervisor write down their seconds after the learner has ended, so
    # these are newer than the ones in the learner's record.
    for name, record in (("evaluator", records.evaluation), ("supervisor", records.supervisor)):
        if final := record.get("blocked_s"):
            seconds[name] = final
    return seconds


def fates_part(learner: Record) -> Record | None:
    """Return a bar and lines of text on what became of all granted trials: they were trained or
    dropped, or are in flight.

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


MOST_ROWS = 12
"""Largest number of rows of the table of selection for each of: kinds (the families of what tasks
hide), tasks, and causes of drops.
"""


def selection_table(found: Selection, admission: Admission) -> Table | None:
    """Return the table of trained ÷ started groups; None if no group has ended.

    If groups were dropped, it has rows by length, by kind and by task; the last rows name the
    causes.
    """
    if (whole := found.whole()) is None:
        return None
    rows = [_selection_row(whole)]
    if found.causes:
        num_trials = admission.trials_per_group
        rows += map(_selection_row, found.by_length(num_trials))
        if (ratio := found.long_over_short(num_trials)) is not None:
            rows.append(TableRow("long over short", [TableCell(""), _ratio_cell(ratio)]))
        rows += map(_selection_row, [*found.by_kind()[:MOST_ROWS], *found.by_task()[:MOST_ROWS]])
        rows += [
            TableRow(f"dropped: {cause}", [TableCell(f"{count:,}"), TableCell("")], "quiet")
            for cause, count in found.causes.most_common(MOST_ROWS)
        ]
    return Table(["groups", "trained of started", "ratio"], rows)


def _selection_row(share: Share) -> TableRow:
    """Return the row of a share: its counts and its ratio."""
    counts = f"{share.trained:,} of {share.started:,.0f}"
    return TableRow(share.label, [TableCell(counts), _ratio_cell(share.ratio())])


def _ratio_cell(ratio: Ratio) -> TableCell:
    """Return a ratio with its interval."""
    return TableCell(f"{ratio.value:.2f}", f"{ratio.low:.2f} to {ratio.high:.2f}")


def episode_names(count: int) -> dict[str, str]:
    """Return the legend of episodes: labels by CSS class."""
    return {episode_css(k, count): f"episode {k + 1}" for k in range(count)}


# Parts that only the report has.


def _diversity_part(diversity: Mapping[str, Any]) -> Record:
    """Return the entropy of repeated plays of a task (`mage evaluate --diversity`)."""
    plays = f"{diversity['num_tasks']:,} held-out tasks, each played {diversity['repeats']} times"
    return {
        "note": f"{plays}; at most {diversity['most']:.2f} nats",
        "table": diversity_table(diversity),
    }


def _harder_part(harder: Mapping[str, Any], most_episodes: int) -> Record:
    """Return charts and tables of the returns on tasks that are harder than the trained ones, by
    rung of difficulty (`mage evaluate --harder`).
    """
    chart = partial(_rung_chart, harder["rungs"], most_episodes)
    return {
        "ladder": harder["ladder"],
        "returns": chart("return_by_episode", "ci95_by_episode"),
        "wins": chart("won_by_episode", ""),
        **harder_tables(harder),
    }


def _rung_chart(
    rungs: Sequence[Mapping[str, Any]], most_episodes: int, name: str, half_widths: str
) -> Chart | None:
    """Return the chart of a score against difficulty, with a line for each episode.

    Args:
        most_episodes: See `episode_css`.
        name: Field of a rung's score that is drawn; it has one value for each episode.
        half_widths: Field with the half-widths of these values; "" for none.
    """
    points = [(number, rung["score"]) for number, rung in enumerate(rungs)]
    named = [(float(number), rung["label"]) for number, rung in enumerate(rungs)]
    series = episode_lines(points, most_episodes, name, half_widths)
    return line_chart(series, alt_text=f"{name} against difficulty", x_names=named)


def _trials_part(samples: Sequence[Record], units: int) -> Record:
    """Return an early trial and one of the final version, and a few more to unfold."""
    shown = early_and_late(samples) if samples else []
    others = [sample for sample in samples if sample not in shown][-MAX_FOLDED_TRIALS:]
    return {
        "units": units,
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
    """Return what identifies the task of a sample: member, seed and seat."""
    return sample["member"], sample["seed"], sample["seat"]
