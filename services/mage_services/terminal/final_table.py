"""Print the final table of a run: its returns, with controls and references, and its costs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.box import ROUNDED
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from mage_async.admission.ledger import OTHER_REASONS
from mage_async.pages.charts import counted, short_number
from mage_async.results.intervals import half_text
from mage_async.results.progress import drop_kind, dropped_by_kind, printable
from mage_async.results.summary import (
    SETS,
    EpisodeRow,
    changed_note,
    chosen_note,
    diversity_row,
    environment_rows,
    harder_rows,
    numbers_note,
    probe_rows,
    reference_rows,
    set_rows,
    unplayed_note,
    worse_note,
)
from mage_async.trajectory import num_decimals

SET_STYLES = {"heldout": "bold green", "train": ""}
"""Styles of evaluation sets; controls are yellow."""
MOST_EPISODES = 4
"""Largest number of episodes in the table; of more episodes it shows the first and the last ones.
"""


def print_final(console: Console, summary: dict[str, Any], report: Path) -> None:
    """Print the table of returns, the costs and the path of the report.

    The characters are those that the console can encode. A log or a pipe gets whole lines, however
    wide the table and the costs are; a terminal gets as many episodes as fit, so that no number is
    cut. The path is never broken into lines, so that it can be copied.
    """
    own_width, plus_minus = console.width, "+-" if console.options.ascii_only else "±"
    endless = console.options.update(width=1000)  # wider than any table
    for most in range(MOST_EPISODES, 1, -1):
        table = _return_table_or_title(summary, plus_minus, most)
        needed = Measurement.get(console, endless, table).maximum
        if needed <= own_width or not console.is_terminal:
            break
    if not console.is_terminal:
        console.width = max(own_width, needed)
    console.print(table, highlight=False)
    console.width = own_width
    if note := worse_note(summary):
        console.print(
            Text(note, style="yellow"), highlight=False, soft_wrap=not console.is_terminal
        )
    # Never break these lines: a user who searches a log for a reason or a rate needs whole lines.
    costs = Group(*(Text(line, style="dim") for line in _costs(summary)))
    console.print(costs, highlight=False, soft_wrap=not console.is_terminal)
    console.out(f"report: {report}", highlight=False)


def _return_table_or_title(
    summary: dict[str, Any], plus_minus: str, most_episodes: int
) -> RenderableType:
    """Return the table of returns, or only the title if the run was not evaluated."""
    if not summary.get("evaluation"):
        return Text.from_markup(_title(summary), style="bold", emoji=False)
    return _return_table(summary, plus_minus, most_episodes)


def _return_table(summary: dict[str, Any], plus_minus: str, most_episodes: int) -> Table:
    """Return the table of returns by episode. Its sections: evaluation sets, references,
    environments of a mix, probes, harder tasks, diversity of trajectories.
    """
    scores = summary["evaluation"]
    every = list(range(len(next(iter(scores.values()))["return_by_episode"])))
    shown = every if len(every) <= most_episodes else [0, *every[1 - most_episodes :]]
    title = f"{_title(summary)}  {plus_minus} 95 % over trials of these tasks"
    table = Table(title=title, title_justify="left", title_style="bold", box=ROUNDED)
    table.add_column("return per unit", no_wrap=True)
    for episode in shown:
        table.add_column(f"episode {episode + 1}", justify="right", no_wrap=True)

    digits = num_decimals(value for row in set_rows(scores).values() for value in row.values)

    def add(row: EpisodeRow, label: str = "", style: str = "", sign: str = "+") -> None:
        """Add a row of returns, with their half-widths if there are some."""
        cells = []
        for k in shown:
            value = f"{round(row.values[k], digits) + 0.0:{sign},.{digits}f}"  # no -0.000
            halves = row.half_widths
            # All of the same width, so that the values are aligned.
            half = "" if halves is None else plus_minus + half_text(halves[k], digits)
            cells.append(f"{value} {half:{2 + digits + len(plus_minus)}}")
        # A user's class names its references, so a label may hold brackets: plain text, no markup.
        plain = Text(label or row.label)
        table.add_row(plain, *cells, style="dim" if row.is_reference else style)

    for name, row in set_rows(scores).items():
        note = SETS[name].short_note
        add(row, f"  {row.label}: {note}" if note else row.label, SET_STYLES.get(name, "yellow"))
    table.add_section()
    for row in reference_rows(summary):
        add(row)
    for environment in environment_rows(summary):
        if "heldout" in environment.sets:
            table.add_section()
            add(environment.sets["heldout"], environment.label, "bold green")
            for row in environment.references:
                add(row, f"  {row.label}")
    table.add_section()
    # Probes are actions that only gather information; few environments know such actions.
    probes = probe_rows(scores)
    for name in ("heldout", "train"):
        if name in probes:
            shares = [f"{probes[name].values[k]:.0%}       " for k in shown]
            table.add_row(f"probes, {probes[name].label}", *shares)
    table.add_section()
    if "harder" in summary:
        # Skip the first row, the returns on tasks as trained: the table begins with them.
        for row in harder_rows(summary["harder"])[1:]:
            add(row, f"harder: {row.label}")
    table.add_section()
    if "diversity" in summary:
        add(diversity_row(summary["diversity"]), sign="")
    return table


def _title(summary: dict[str, Any]) -> str:
    """Return the title: environment, seed and number of steps."""
    done = "" if summary["complete"] else "  (not finished)"
    name = escape(summary["environment"]["name"])
    title = f"{name}  seed {summary['seed']}  {counted(summary['steps'], 'step')}{done}"
    evaluated = summary.get("evaluated_step", summary["steps"])
    return title if evaluated == summary["steps"] else f"{title}  evaluated at step {evaluated}"


def _costs(summary: dict[str, Any]) -> list[str]:
    """Return lines on time, staleness, the prefix cache, and trials that were lost."""
    rates, trials = summary.get("throughput", {}), summary.get("trials", {})
    staleness, cache = summary.get("staleness", {}), summary.get("prefix_cache", {})
    lines = [f"wall {summary['wall_s']:.1f} s"]
    if "processor_s" in summary:
        lines[0] += f" ({summary['processor_s']:.0f} s of CPU time)"
    if "warm_start_s" in summary:
        lines[0] += f", warm start {summary['warm_start_s']:.1f} s of it"
    if rates:
        lines[0] += f"; {short_number(rates['trials_per_s'])} trials/s"
        lines[0] += f", {short_number(rates['generated_tokens_per_s'])} sampled tokens/s"
    if staleness:
        lines.append(f"staleness mean {staleness['mean']:.2f}, max {staleness['max']:g}")
    if cache:
        lines[-1] += f"; prefix cache hit {cache['hit_rate']:.1%}, reuse {cache['reuse_rate']:.1%}"
    if cut := summary.get("evaluation", {}).get("heldout", {}).get("cut_short", 0.0):
        lines.append(
            f"{cut:.1%} of held-out trials outgrew engine.max_tokens, or failed in every try, "
            "and count as lost"
        )
    for source, count in summary.get("injections", {}).items():
        lines.append(f"{count} observations of {source} held special tokens, shown as plain text")
    if trials:
        lines.append(
            f"trials: {trials['granted']} granted = {trials['trained']} trained"
            f" + {trials['dropped']} dropped + {trials['in_flight']} "
            # Actors play ahead of the learner, so some trials are left at any end of a run.
            + ("begun for later steps" if summary["complete"] else "in flight, kept for --resume")
        )
    if reasons := summary.get("dropped_by_reason"):
        lines.append(_most_dropped(reasons))
    notes = (numbers_note, changed_note, chosen_note, unplayed_note)
    lines += filter(None, (note(summary) for note in notes))
    return lines


def _most_dropped(reasons: Mapping[str, int]) -> str:
    """Return a line on the most frequent kind of reasons for which groups were dropped.

    A reason names a task, a seed and a turn, so nearly all are different, and are counted by kind.
    """
    known = {reason: count for reason, count in reasons.items() if reason != OTHER_REASONS}
    kind, count = next(iter(dropped_by_kind(known or reasons).items()))
    of_kind = [reason for reason in known or reasons if drop_kind(reason).name == kind]
    what = of_kind[0] if len(of_kind) == 1 else f"{kind}, such as: {of_kind[0]}"
    line = f"{count} of {sum(reasons.values())} dropped groups: {printable(what)}"
    if known and (others := reasons.get(OTHER_REASONS)):
        line += f"; the reasons of {others} were not counted one by one: see `mage journal`"
    return line
