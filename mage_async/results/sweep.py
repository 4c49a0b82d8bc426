"""Make the settings of a sweep, describe its runs, and read the results of finished runs (`mage
sweep`, `mage ablate`).

`KEY=V1,V2` names the values of a key, `KEY=LOW..HIGH` a range of numbers, and `KEY=LOW..HIGH:log` a
range in which each factor of ten has the same weight. Keys keep the order of the command line.

The *matrix* is all cells of a sweep. A cell is one whole run in a folder of its own. It is done
when its `summary.json` says that it is complete; a later call runs only the cells that are not
done.
"""

import itertools
import json
import math
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from mage_async.assembly import check, with_warm_start
from mage_async.config import config_file
from mage_async.config.schema import BOUND_OF, Config, check_source
from mage_async.errors import ConfigError
from mage_async.policy_version import OLDEST_AGE
from mage_async.results.dropped_bias import Selection
from mage_async.results.run_directory import RunDirectory, distinct_name
from mage_async.results.run_files import (
    Record,
    RunRecords,
    made_with_of,
    read_document,
    read_records,
)
from mage_async.results.summary import over_tokens

LONGEST_FOLDER = 120
"""Largest number of characters of a folder's name."""
_UNSAFE = re.compile(r"[^\w.+=,-]")
"""Characters that are replaced in a folder's name."""
_RANGE = re.compile(r'(?P<low>(?:\.\d|[^.\s,"/])[^\s,"/]*?)\.\.(?P<high>[^:\s,"/]+)(?P<log>:log)?')
"""Pattern of `LOW..HIGH` or `LOW..HIGH:log`. A path such as `../model`, a quoted text and several
values are no range.
"""
_LIST = r'\[(?:[^\[\]"]|"[^"]*"|\[[^\[\]]*\])*\]'
_TABLE = r'\{(?:[^{}"]|"[^"]*")*\}'
_PART = re.compile(rf'(?:{_LIST}|{_TABLE}|"[^"]*"|[^,\[\]{{}}"])+')
"""Pattern of one value between commas; a quoted text, a list of values or lists, or an inline table
may hold commas itself.
"""
AVERAGED = (
    "over_bound_share",
    "k3_mean",
    "effective_share",
    "clipped_share",
    "masked_share",
    "entropy",
)
"""Metrics whose mean over tokens is one of the results of a run."""
SIZES = (
    "learner.steps",
    "admission.groups_per_step",
    "admission.trials_per_group",
    "evaluation.final_trials",
)
"""Keys that say how much a run trains, and how much it plays in its final evaluation."""


@dataclass(frozen=True, slots=True, order=True)
class Setting:
    """Describe one setting that the runs of a matrix compare; runs that differ only in their seed
    have the same setting.

    `staleness_setting` makes those of `mage ablate`, `combination` those of `mage sweep`.
    """

    key: tuple[Any, ...]
    """Identity of the setting, and its order among the others of the matrix."""
    label: str = field(compare=False)
    """The setting in a few words."""
    folder: str = field(compare=False)
    """Beginning of the names of the folders of its runs, unique in the matrix."""
    assignments: Sequence[str] = field(compare=False)
    """Changes to the configuration, as `key=value`."""
    columns: Mapping[str, Any] = field(compare=False)
    """Values of the varied keys by their name, which are columns of the table of runs."""
    place: float = field(compare=False)
    """Position on the x axis of the chart of returns."""
    place_name: str = field(compare=False)
    """Text for `place` in the legend of a chart with one method."""
    method: str = field(compare=False)
    """Name of the line on which a chart draws the setting: settings of one line differ in `place`.
    """
    age_group: str = field(compare=False)
    """Settings of one group train on tokens of the same ages, so their shares of tokens by age are
    averaged together.
    """
    correction: str = field(default="", compare=False)
    """Value of `learner.correction` in an ablation; "" elsewhere."""
    allowed_age: int | None = field(default=None, compare=False)
    """Age in steps of the setting's bound, which the rules "count" and "window" may exceed; None if
    the setting has no bound.
    """


@dataclass(frozen=True, slots=True)
class Cell:
    """Describe one run of the matrix."""

    setting: Setting
    seed: int

    def name(self) -> str:
        """Return the name of the run's folder."""
        return f"{self.setting.folder}-seed{self.seed}"

    def assignments(self) -> list[str]:
        """Return the changes to the configuration, as `key=value`."""
        return [f"seed={self.seed}", *self.setting.assignments]


@dataclass(frozen=True, slots=True)
class Range:
    """Describe numbers between two bounds, inclusive; whole numbers if both bounds are whole."""

    low: float
    high: float
    is_log: bool
    is_whole: bool

    def draw(self, source: random.Random) -> str:
        """Draw a number, and return it as text."""
        # Half a unit more at each end: otherwise fewer draws would be rounded to the end numbers.
        margin = 0.5 if self.is_whole else 0.0
        low, high = self.low - margin, self.high + margin
        if self.is_log:
            number = math.exp(source.uniform(math.log(low), math.log(high)))
        else:
            number = source.uniform(low, high)
        # Python rounds 0.5 to 0 and 3.5 to 4, out of the range 1..3.
        return self.text(min(max(number, self.low), self.high))

    def text(self, number: float) -> str:
        """Return a number of the range in the form that a configuration has: with four digits, or
        as many more as a narrow range needs. The rounded number is within the bounds too.
        """
        if self.is_whole:
            return str(round(number))
        # Leading digits that all numbers of the range share: three for 1000.5..1001.5.
        num_shared = round(math.log10(max(1.0, abs(number) / (self.high - self.low))))
        # With 17 digits the text is the number itself, which is within the bounds.
        fewest = min(17, 4 + num_shared)
        texts = (f"{number:.{digits}g}" for digits in range(fewest, 18))
        return next(text for text in texts if self.low <= float(text) <= self.high)


@dataclass(frozen=True, slots=True)
class Axis:
    """Describe a key of the configuration and the values that a sweep gives it."""

    key: str
    choices: tuple[str, ...] | Range


def axis_of(text: str) -> Axis:
    """Parse `KEY=V1,V2`, `KEY=LOW..HIGH` or `KEY=LOW..HIGH:log`.

    Raises:
        ConfigError: the text has another form.
    """
    key, equals, given = text.partition("=")
    values = tuple(value.strip() for value in _PART.findall(given))
    # `findall` skips text that is no value, such as a bracket or quote without its other end, so
    # the whole text is matched too.
    is_whole = re.fullmatch(f"{_PART.pattern}(?:,{_PART.pattern})*", given)
    if not equals or not key.strip() or not is_whole or not all(values):
        raise ConfigError(f"--over takes KEY=V1,V2 or KEY=LOW..HIGH, got {text!r}")
    if match := _RANGE.fullmatch(given.strip()):
        return Axis(key.strip(), _range(text, match["low"], match["high"], bool(match["log"])))
    numbers = map(number_of, values)  # `1e-3` and `0.001` are one value
    different = {
        text if number is None else number for text, number in zip(values, numbers, strict=True)
    }
    if len(different) < len(values):
        raise ConfigError(f"--over {text}: a value is given twice")
    return Axis(key.strip(), values)


def _range(text: str, low: str, high: str, is_log: bool) -> Range:
    """Return a range; raise a `ConfigError` if its bounds are not finite, or do not rise."""
    try:
        are_whole = all(bound.removeprefix("-").isdigit() for bound in (low, high))
        parsed = Range(float(low), float(high), is_log, are_whole)
    except ValueError:
        raise ConfigError(
            f"--over {text}: a range needs two numbers; put a text that holds `..` in double quotes"
        ) from None
    if not (math.isfinite(parsed.low) and math.isfinite(parsed.high)):
        raise ConfigError(f"--over {text}: the bounds of a range must be finite")
    if not parsed.low < parsed.high or (is_log and parsed.low <= 0):
        above = " and above 0" if is_log else ""
        raise ConfigError(f"--over {text}: the bounds of a range must rise{above}")
    return parsed


def grid(axes: Sequence[Axis]) -> list[Setting]:
    """Return every combination of the values.

    Raises:
        ConfigError: a key has a range, whose values cannot be listed.
    """
    choices: list[tuple[str, ...]] = []
    for axis in axes:
        if isinstance(axis.choices, Range):
            raise ConfigError(
                f"--over {axis.key}: the numbers of a range are drawn; add --random N or --search N"
            )
        choices.append(axis.choices)
    return [combination(axes, values) for values in itertools.product(*choices)]


def drawn(axes: Sequence[Axis], count: int, seed: int) -> list[Setting]:
    """Draw `count` different combinations at random, or fewer if `100 * count` draws find no more.

    Combinations are drawn one after the other, so a larger `count` with the same `seed` begins with
    the same ones.
    """
    source, found = random.Random(seed), dict[Setting, None]()
    # The number of draws is bounded, because there may be fewer than `count` combinations.
    for _ in range(100 * count):
        if len(found) == count:
            break
        found[combination(axes, [_draw(axis, source) for axis in axes])] = None
    return list(found)


def _draw(axis: Axis, source: random.Random) -> str:
    """Draw one value of an axis, as text."""
    if isinstance(axis.choices, Range):
        return axis.choices.draw(source)
    return source.choice(axis.choices)


def combination(axes: Sequence[Axis], values: Sequence[str]) -> Setting:
    """Return the setting with one value for each key; the first key is the x axis of the charts."""
    names = [axis.key for axis in axes]
    pairs = tuple(zip(names, values, strict=True))
    assignments = [f"{key}={value}" for key, value in pairs]
    x, label = _place_on_axis(axes[0], values[0]), ", ".join(assignments)
    return Setting(
        key=(x, pairs),
        label=label,
        folder=_folder(",".join(assignments)),
        assignments=assignments,
        columns=dict(pairs),
        place=x,
        place_name=values[0],
        method=", ".join(assignments[1:]),
        # Any key may change how old the trained tokens are, so the shares of tokens by age are
        # never averaged over different settings.
        age_group=label,
    )


def _folder(text: str) -> str:
    """Return a text as a file name; a digest keeps texts apart that would be spelled alike."""
    return distinct_name(_UNSAFE.sub("_", text)[:LONGEST_FOLDER], text)


def _place_on_axis(axis: Axis, value: str) -> float:
    """Return a value's place on the x axis: the number itself, or its index among the choices if
    one of these is not a number.
    """
    if isinstance(axis.choices, Range):
        return float(value)
    numbers = [number_of(choice) for choice in axis.choices]
    index = axis.choices.index(value)
    number = numbers[index]
    return float(index) if None in numbers or number is None else number


def number_of(text: str) -> float | None:
    """Return a text as a finite number; None if it is not one."""
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        return None
    is_number = isinstance(found, int | float) and not isinstance(found, bool)
    return float(found) if is_number and math.isfinite(found) else None


def sweep_cells(found: Iterable[Setting], seeds: Iterable[int]) -> list[Cell]:
    """Return every setting with every seed; cells of one seed follow one another."""
    settings = list(found)
    return [Cell(setting, seed) for seed in dict.fromkeys(seeds) for setting in settings]


def staleness_setting(rule: str, correction: str, lag: int, bound: int) -> Setting:
    """Return a setting of an ablation of staleness.

    Args:
        rule: Name of the admission rule.
        correction: Name of the off-policy correction.
        lag: Number of steps added to every token's age.
        bound: Value of `admission.max_staleness`, in steps. The rule "unbounded" does not read it;
            with that rule it is only the setting's place on the x axis.
    """
    age, lag_text = bound + lag, f", lag {lag}" if lag else ""
    bound_text = str(bound) if _reads_bound(rule, correction) else ""
    named_rule = f"{rule} {bound_text}".rstrip()
    # The correction `age_mask` has a bound of its own, which becomes that of the setting.
    mask_bound = [f"learner.correction.max_age={age}"] if correction == "age_mask" else []
    return Setting(
        key=(rule, correction, lag, bound),
        label=f"{named_rule}, {correction}{lag_text}",
        folder="-".join(filter(None, [rule, bound_text, correction, f"lag{lag}" if lag else ""])),
        assignments=[
            f"admission.rule={rule}",
            *([f"admission.max_staleness={bound}"] if bound_text else []),
            f"admission.lag={lag}",
            f"learner.correction={correction}",
            *mask_bound,
        ],
        columns={
            "rule": rule,
            "correction": correction,
            "lag": lag,
            "bound": bound if bound_text else "",
        },
        place=age,
        place_name=(bound_text or "no bound") + (f" + lag {lag}" if lag else ""),
        method=f"{rule}, {correction}",
        # Corrections do not change ages, not even one whose bound is the setting's.
        age_group=f"{rule if rule == 'unbounded' else named_rule}{lag_text}",
        correction=correction,
        allowed_age=None if rule == "unbounded" else age,
    )


def _reads_bound(rule: str, correction: str) -> bool:
    """Return whether a rule or a correction reads the bound of a setting."""
    return rule != "unbounded" or correction == "age_mask"


def cells(
    *,
    bounds: Iterable[int],
    rules: Iterable[str],
    corrections: Iterable[str],
    lags: Iterable[int],
    seeds: Iterable[int],
) -> list[Cell]:
    """Return the cells of an ablation: every bound with every rule, correction, lag and seed.

    All cells of a seed come before those of the next one, so that an interrupted matrix is a
    complete matrix of fewer seeds.
    """
    given = list(bounds)
    product = itertools.product(seeds, lags, given, rules, corrections)
    found = dict[Cell, None]()
    for seed, lag, bound, rule, correction in product:
        # A rule with a bound of its own, or without any, gives one cell, not one for each bound.
        own = BOUND_OF.get(rule, bound) if _reads_bound(rule, correction) else max(given)
        found[Cell(staleness_setting(rule, correction, lag, own), seed)] = None
    return list(found)


def is_done(run: RunDirectory) -> bool:
    """Return whether a cell's run is complete."""
    return bool(read_document(run.summary).get("complete"))


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """Hold the results of a finished run."""

    cell: Cell
    figures: dict[str, float]
    """Numbers by name: returns, seconds, means of metrics and more. The return of the last episode
    comes first.
    """
    curve: list[tuple[int, float, float]]
    """For each step: number of trials trained so far, seconds of training, and return of the
    batch's last episode.
    """
    ages: list[dict[int, float]]
    """Share of tokens by age in steps: among all tokens, then among the tokens of each episode."""
    made_with: Mapping[str, str] = field(default_factory=dict)
    """What the run was made with (`made_with_of`), and `SIZES` that its setting does not vary."""
    environment: Mapping[str, Any] = field(default_factory=dict)
    """The part `environment` of its summary, with unit and bounds of a return."""

    def row(self) -> dict[str, Any]:
        """Return setting, seed, results and versions as one row of a table."""
        columns = dict(self.cell.setting.columns)
        return columns | {"seed": self.cell.seed} | self.figures | dict(self.made_with)


def read_cell(cell: Cell, run: RunDirectory) -> FinishedRun:
    """Read a run that is done.

    Raises:
        RunError: a file of the run is damaged.
    """
    records, summary = read_records(run), read_document(run.summary)
    values = config_file.flat_config(records.config)
    sizes = {key: str(values[key]) for key in SIZES if key not in cell.setting.columns}
    made_with = made_with_of(records) | sizes
    figures, curve, ages = _figures(records, summary), _curve(records), _ages(records)
    return FinishedRun(cell, figures, curve, ages, made_with, summary["environment"])


def unreached_bounds_sentence(finished: Iterable[FinishedRun]) -> str:
    """Return a sentence about the settings in which no token reached the age of the bound, or "".

    In such settings the bound had no effect, so those that differ in nothing else differ at random.
    This happens if actors are slower than the learner, because then no trial waits long enough to
    become old.
    """
    oldest = dict[tuple[Setting, int], float]()
    for run in finished:
        allowed = run.cell.setting.allowed_age
        if allowed is not None:
            key = run.cell.setting, allowed
            oldest[key] = max(oldest.get(key, 0.0), run.figures["staleness_max"])
    unused = [(setting, allowed) for (setting, allowed), age in oldest.items() if age < allowed]
    if not unused:
        return ""
    bound = max(allowed for _, allowed in unused)
    reached = max(oldest[key] for key in unused if key[1] == bound)
    return (
        f"In {len(unused)} of {len(oldest)} settings no token reached the age of the bound (at "
        f"{bound} steps: {reached:g} at most). There the bound limited nothing: settings that "
        "differ in such bounds alone differ by chance. `--lags` sets the age directly."
    )


def _figures(records: RunRecords, summary: Record) -> dict[str, float]:
    """Return `FinishedRun.figures`.

    The processor time is NaN if it was not recorded. Results of training are NaN if the run has no
    steps, as a run of `--method zero_shot`; `long_over_short` is 1 if all groups have about one
    length.
    """
    trials, is_trained = summary["trials"], bool(records.metrics)
    staleness = summary["staleness"] if is_trained else {"mean": math.nan, "max": math.nan}
    selection = Selection.of(records.metrics)
    long_over_short = selection.long_over_short(records.config.admission.trials_per_group)
    last = {
        f"{split}_last_return": summary["evaluation"][split]["return_by_episode"][-1]
        for split in ("heldout", "train")
    }
    # A step without tokens of episode 1, as after a curriculum, has no share of that episode.
    averaged = (*AVERAGED, "over_bound_share_episode_1", "masked_share_episode_1")
    tokens, recorded = records.step_tokens(), set(itertools.chain(*records.metrics))
    return {
        **last,
        "wall_s": summary["wall_s"],
        "processor_s": summary.get("processor_s", math.nan),
        "trials_per_s": summary["throughput"]["trials_per_s"] if is_trained else math.nan,
        "staleness_mean": staleness["mean"],
        "staleness_max": staleness["max"],
        "sampled_tokens": sum(tokens),
        **{
            name: over_tokens(records.metrics, tokens, name) if name in recorded else math.nan
            for name in averaged
        },
        "dropped_share": trials["dropped"] / max(1, trials["granted"]),
        "wasted_share": selection.wasted_share(),
        "long_over_short": 1.0 if long_over_short is None else long_over_short.value,
    }


def _curve(records: RunRecords) -> list[tuple[int, float, float]]:
    """Return a point for each step; see `FinishedRun.curve`."""
    admission = records.config.admission
    batch = admission.groups_per_step * admission.trials_per_group
    return [
        (record["step"] * batch, record["time_s"], record["return_by_episode"][-1])
        for record in records.metrics
    ]


def _ages(records: RunRecords) -> list[dict[int, float]]:
    """Return shares of tokens by age; see `FinishedRun.ages`."""
    suffixes = ["", *(f"_episode_{k + 1}" for k in range(records.config.trial.episodes))]
    return [_histogram(records, suffix) for suffix in suffixes]


def _histogram(records: RunRecords, suffix: str) -> dict[int, float]:
    """Return the share of tokens of each age.

    Args:
        suffix: Suffix of the metric's name, such as "_episode_1"; "" for all episodes.
    """
    tokens: dict[int, float] = {}
    for record, weight in zip(records.metrics, records.step_tokens(), strict=True):
        for age in range(OLDEST_AGE + 1):
            if share := record.get(f"token_share_age_{age}{suffix}", 0.0):
                tokens[age] = tokens.get(age, 0.0) + share * weight
    total = sum(tokens.values())  # only steps with tokens of the episode count
    return {age: tokens[age] / total for age in sorted(tokens)} if total else {}


@dataclass(frozen=True, slots=True)
class Subject:
    """Describe what a matrix is about, for its page."""

    heading: str
    axis: str
    """Label of the x axis, on which settings have their `place`."""
    is_about_staleness: bool = False
    """Whether runs with different bounds on staleness are compared, so that the page shows how old
    the weights were that sampled each token."""


def best_note(num_settings: int) -> str:
    """Return a sentence on the return of the best of several settings; "" if there is one alone."""
    if num_settings < 2:
        return ""
    return (
        f"the best of {num_settings} settings is chosen by these held-out returns, so its own "
        "return is biased upwards; report the return of new runs of it, with other seeds"
    )


STALENESS = Subject("What staleness costs", "bound plus lag, steps", is_about_staleness=True)
"""Subject of `mage ablate`."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """Hold a matrix whose configurations have been checked."""

    root: Path
    title: str
    configs: dict[Cell, Config]
    num_actors: int
    parallel: int
    """Number of runs at once."""
    for_s: float
    """No run is started later than this number of seconds after the call that runs the matrix."""
    subject: Subject
    note: str = ""
    """Sentence for the user before the first run; "" for none."""

    def run_of(self, cell: Cell) -> RunDirectory:
        """Return the directory of a cell's run."""
        return RunDirectory(self.root / cell.name())

    def log_of(self, cell: Cell) -> Path:
        """Return the file with the output of a cell's run."""
        return self.root / f"{cell.name()}.log"

    def failures_of(self, cell: Cell) -> Path:
        """Return the file that has one line for each failure of a cell's run."""
        return self.root / f"{cell.name()}.failures"

    def num_failures(self, cell: Cell) -> int:
        """Return the number of failures of a cell's run, over all calls."""
        file = self.failures_of(cell)
        return len(file.read_text().splitlines()) if file.is_file() else 0

    def finished_runs(self) -> list[FinishedRun]:
        """Read the runs that are done, setting by setting, in the order of the command.

        Raises:
            RunError: a file of a run is damaged.
        """
        # In `configs` the cells of a seed come before those of the next one.
        settings = [cell.setting for cell in self.configs]
        cells = sorted(self.configs, key=lambda cell: settings.index(cell.setting))
        runs = [(cell, self.run_of(cell)) for cell in cells]
        return [read_cell(cell, run) for cell, run in runs if is_done(run)]


def checked_configs(
    file: Path,
    to_run: Iterable[Cell],
    assignments: list[str],
    method: str | None,
) -> dict[Cell, Config]:
    """Return the checked configuration of each cell.

    Args:
        file: Configuration that all cells begin with.
        assignments: Changes of all cells, as `key=value`; a cell's own changes come after them.
        method: Name of a method of the papers, applied to the file first.

    Raises:
        MageError: a cell cannot be run; the message names the key and the reason.
    """
    configs = {}
    for cell in to_run:
        config = config_file.load(file, [*assignments, *cell.assignments()], method)
        check(config)
        check_source(config.policy)
        # A run records its configuration in this form, so a cell that is run already is recognised.
        configs[cell] = with_warm_start(config)
    return configs


def by_setting(finished: Iterable[FinishedRun]) -> dict[Setting, list[FinishedRun]]:
    """Group runs that differ only in their seed; settings and seeds ascend."""
    ordered = sorted(finished, key=lambda run: (run.cell.setting, run.cell.seed))
    return {key: list(runs) for key, runs in groupby(ordered, lambda run: run.cell.setting)}
