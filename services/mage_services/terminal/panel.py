"""Draw the live panel: the state of a run in the space of a small terminal."""

import atexit
import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from mage_async.pages.charts import short_number
from mage_async.results.metrics import returns_by_environment
from mage_async.results.run_directory import RunDirectory
from mage_async.trajectory import num_decimals
from mage_async.user_modules import shown_name
from mage_services.terminal.final_table import print_final
from mage_services.terminal.run_state import Event, RunState, permanent_line

MAX_FRAMES_PER_S = 5.0
"""Largest number of times per second that the panel is redrawn."""
MAX_WIDTH = 120
"""Largest number of columns of the panel."""
MAX_ACTOR_LINES = 6
"""Number of actors above which all of them share one line."""
EPISODE_STYLES = ("grey62", "deep_sky_blue3", "turquoise2", "bold spring_green2")
"""Styles of the returns of episodes, from the first to the last."""
STATE_STYLES = {
    "training": "spring_green3",
    "engine": "spring_green3",
    "trials": "medium_purple2",
    "environment": "deep_sky_blue3",
    "publishing": "medium_purple2",
    "checkpoint": "orchid3",
    "log-prob check": "plum3",
    "batch not full": "orange3",
    "no grant": "orange3",
    "no fresh weights": "gold3",
}
"""Colours of states. Each kind of work has a colour of its own; states of waiting are amber, or
grey like all states that are not listed.
"""
OTHER_STATE_STYLE = "grey62"
"""Style of states of processes without a style of their own."""
_BLOCKS = "▁▂▃▄▅▆▇█"
"""Characters of a sparkline, from the lowest value to the highest."""


class LiveView:
    """Show a run as a panel that is redrawn in place when an event comes. It hides the cursor, and
    shows it again however the program ends.
    """

    def __init__(
        self, state: RunState, run: RunDirectory, console: Console, clock: Callable[[], float]
    ) -> None:
        self._state, self._run, self._console, self._clock = state, run, console, clock
        self._drawn_at = -1.0
        self._is_closed = False

        def present_panel() -> RenderableType:
            return panel(state, run, clock(), panel_width(console.width))

        self._live = Live(console=console, auto_refresh=False, get_renderable=present_panel)
        atexit.register(self._live.stop)  # shows the cursor again if nobody closes the view

    def event(self, process: str, event: Event) -> None:
        """Handle an event of a process, and redraw the panel if it is time."""
        now = self._clock()
        self._state.take(process, event, now)
        if (text := permanent_line(process, event)) is not None:
            self.line(f"{process}: {text}")
        if not self._is_closed and now - self._drawn_at >= 1 / MAX_FRAMES_PER_S:
            self._drawn_at = now
            self._live.start()
            self._live.refresh()

    def line(self, text: str) -> None:
        """Print a line above the panel."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self, summary: dict[str, Any] | None) -> None:
        """Leave the last panel, or replace it by the final table."""
        was_closed, self._is_closed = self._is_closed, True
        self._live.transient = summary is not None
        self._live.stop()
        atexit.unregister(self._live.stop)
        if summary is not None and not was_closed:
            print_final(self._console, summary, self._run.report)


def panel(state: RunState, run: RunDirectory, now: float, width: int) -> RenderableType:
    """Return the state of a run as a panel of `width` columns."""
    parts: list[RenderableType] = [_progress(state, now), Text()]
    if state.steps or state.curve:
        parts.append(_returns(state, width))
        # In a mix of environments: the last episode's return in each of them, in the last batch.
        if returns := returns_by_environment(state.last):
            digits = num_decimals(row[-1] for row in returns.values()) - 1
            text = "  ".join(f"{name} {row[-1]:+.{digits}f}" for name, row in returns.items())
            parts.append(_line(f"by environment  {text}", "dim"))
        parts += [Text(), _last_metrics(state), Text()]
    if not state.steps and state.progress is not None:
        parts += [Text(state.waiting(now), "dim"), Text()]
    parts.append(_processes(state, width))
    parts += [_line(f"! {note}", "bold red") for note in state.notes[-3:]]
    name = escape(shown_name(state.config.environment.name))
    title = f"[bold]mage[/]  {name}  [dim]seed[/] {state.config.seed}"
    return Panel(
        Group(*parts),
        title=title,
        title_align="left",
        subtitle=Text(str(run.root), "dim", overflow="ellipsis"),
        subtitle_align="right",
        border_style="grey42",
        width=width,
        padding=(0, 1),
    )


def panel_width(terminal: int) -> int:
    """Return the width of the panel, in columns, for a terminal of `terminal` columns.

    Two columns stay free for the `^C` that a terminal echoes: it would wrap and shift the panel.
    """
    return min(MAX_WIDTH, terminal - 2)


def _line(text: str, style: str) -> Text:
    """Return a line that is cut at the panel's edge."""
    return Text(text, style, overflow="ellipsis", no_wrap=True)


def _progress(state: RunState, now: float) -> RenderableType:
    """Return the phase, a progress bar, and the times."""
    columns = (Column(no_wrap=True), Column(ratio=1), Column(no_wrap=True, justify="right"))
    grid = Table.grid(*columns, padding=(0, 1), expand=True)
    label, done, total = _position(state)
    bar = ProgressBar(
        total=total,
        completed=done,
        pulse=total is None,
        animation_time=now,
        complete_style="deep_sky_blue3",
        finished_style="spring_green3",
    )
    grid.add_row(Text.from_markup(label, emoji=False), bar, _times(state, now))
    return grid


def _position(state: RunState) -> tuple[str, float, float | None]:
    """Return the phase in words, how much of it is done, and of how much."""
    if state.phase == "warm start":
        warm = state.warm_start
        # "gate" is a ratio of losses (`Progress.gate` of `warm_start.py`), NaN before it is known.
        known = {name: warm[name] for name in ("loss", "gate") if math.isfinite(warm[name])}
        measured = "  ".join(f"{name} {value:.2f}" for name, value in known.items())
        text = f"[bold]warm start[/] {warm['step']}/{warm['steps']}"
        return f"{text} [dim]{measured}[/]", warm["step"], warm["steps"]
    steps = state.config.learner.steps
    if state.phase == "training":
        return f"[bold]training[/] step {state.step}/{steps}", state.step, max(1, steps)
    if state.phase == "evaluating":
        version = state.step if state.evaluating is None else state.evaluating
        played, of = state.final_trials or (0, None)
        return f"[bold]evaluating[/] version {version}", played, of
    return f"[bold]{state.phase}[/]", 1.0, 1.0 if state.phase == "done" else None


def _times(state: RunState, now: float) -> Text:
    """Return the time since the start and, if known, the remaining time of the phase."""
    left = state.seconds_left(now)
    text = Text(_clock(now - state.began))
    if left is not None:
        text.append(f" · {_clock(left)} left", "dim")
        if state.phase == "training":
            text.append(" + evaluation", "dim")
    return text


def _returns(state: RunState, width: int) -> RenderableType:
    """Return the returns of each episode: of each step's batch, and of the held-out curve."""
    # Two sparklines share what the other columns leave.
    spark, num_episodes = max(8, (width - 50) // 2), state.config.most_episodes
    grid = Table.grid(Column(min_width=9), padding=(0, 1))
    for _ in range(2):
        grid.add_column(justify="right", min_width=6)
        grid.add_column(min_width=spark)
    version = f" v{state.curve[-1]['version']}" if state.curve else ""
    titles = ("return", "", "train, each step", "", f"held-out{version}")
    grid.add_row(*(Text(title, "dim") for title in titles))
    heldout = [point["sets"]["heldout"] for point in state.curve]
    histories = [
        (state.returns(k), [row[k] for row in heldout if k < len(row)]) for k in range(num_episodes)
    ]
    every = [value for train_heldout in histories for row in train_heldout for value in row]
    low = min(every, default=0.0)
    digits = num_decimals(every) - 1
    # Never equal: a sparkline divides by high - low.
    high = max(max(every, default=1.0), low + 10.0 ** (1 - digits))
    for episode, train_heldout in enumerate(histories):
        style = episode_style(episode, num_episodes)
        cells = [Text(f"episode {episode + 1}", style)]
        for row in train_heldout:
            cells.append(Text(f"{row[-1]:+.{digits}f}" if row else "", style))
            cells.append(Text(sparkline(row, low, high, spark), style))
        grid.add_row(*cells)
    return grid


def episode_style(episode: int, num_episodes: int) -> str:
    """Return the style of an episode, from grey for the first to green for the last."""
    if num_episodes == 1:
        return EPISODE_STYLES[-1]
    return EPISODE_STYLES[round(episode * (len(EPISODE_STYLES) - 1) / (num_episodes - 1))]


def sparkline(values: Sequence[float], low: float, high: float, width: int) -> str:
    """Return values as `width` blocks at most, by their place between `low` and `high`; if there
    are more values, neighbours are averaged.
    """
    if len(values) > width:
        edges = [number * len(values) // width for number in range(width + 1)]
        chunks = [values[a:b] for a, b in itertools.pairwise(edges)]
        values = [sum(chunk) / len(chunk) for chunk in chunks]
    top = len(_BLOCKS) - 1
    return "".join(_BLOCKS[round((value - low) / (high - low) * top)] for value in values)


def _last_metrics(state: RunState) -> RenderableType:
    """Return lines with metrics of the last step and the numbers of trials."""
    values = Column(no_wrap=True, overflow="ellipsis")
    grid = Table.grid(Column(style="dim", min_width=9), values, padding=(0, 1))
    if last := state.last:
        most_stale = state.config.admission.most_stale
        bound = ", no bound" if most_stale is None else f" of {most_stale} allowed"
        grid.add_row(
            "speed",
            f"{short_number(last['trials_per_s'])} [dim]trials/s[/]  "
            f"{short_number(last['generated_tokens_per_s'])} [dim]sampled[/]  "
            f"{short_number(last['trained_tokens_per_s'])} [dim]trained tokens/s[/]",
        )
        grid.add_row(
            "staleness",
            f"{last['staleness_mean']:.2f} [dim]mean[/]  {last['staleness_max']:.0f} [dim]max"
            f"{bound}[/]  [dim]prefix cache[/] {last['prefix_hit_rate']:.1%}"
            f" [dim]hit[/]",
        )
        grid.add_row(
            "policy",
            f"{last['entropy']:.3f} [dim]nats entropy[/]  "
            f"{last['valid_action_share']:.1%} [dim]valid actions,[/] "
            f"{last['invalid_actions_per_trial']:.2f} [dim]invalid/trial[/]",
        )
    # Text that looks like a special token is encoded as plain text; such observations are counted.
    for source, count in state.injections().items():
        text = f"{count:,} [dim]observations of[/] {escape(source)} [dim]held special tokens[/]"
        grid.add_row("as text", text)
    if trials := state.trials:
        grid.add_row(
            "trials",
            f"{trials['granted']:,} [dim]granted =[/] {trials['trained']:,} [dim]trained +[/]"
            f" {trials['dropped']:,} [dim]dropped +[/] {trials['in_flight']:,} [dim]in flight[/]",
        )
    return grid


def _processes(state: RunState, width: int) -> RenderableType:
    """Return a line for each process: how it spent its last seconds, as a bar of all states, and
    the shares of the three longest states in percent.
    """
    causes = Column(no_wrap=True, overflow="ellipsis")
    grid = Table.grid(Column(min_width=9), Column(), causes, padding=(0, 1))
    bar_width = max(10, (width - 56) // 2)
    for name, shares, last_state in _process_rows(state):
        spent = Text() if shares else Text(last_state, "dim")
        for cause, share in [*shares.items()][:3]:
            if share >= 0.005:  # a smaller one would be shown as 0 %
                spent.append(f"{share:3.0%} ", "default")
                spent.append(f"{cause}  ", STATE_STYLES.get(cause, OTHER_STATE_STYLE))
        node = state.nodes.get(name)
        title = Text.assemble(name, (f" {node}" if node else "", "dim"))
        grid.add_row(title, _bar(shares, bar_width), spent)
    return grid


def _process_rows(state: RunState) -> list[tuple[str, dict[str, float], str]]:
    """Return name, shares of time by state, and last state of each process.

    More than `MAX_ACTOR_LINES` actors are one row, with their mean shares.
    """
    shares = state.shares()
    rows = [(name, shares.get(name, {}), last) for name, last in state.processes.items()]
    actors = [row for row in rows if row[0].startswith("actor")]
    if len(actors) <= MAX_ACTOR_LINES:
        return rows
    others = [row for row in rows if row not in actors]
    measured = [of_actor for _, of_actor, _ in actors if of_actor]
    total = Counter[str]()
    for each in measured:
        total.update(each)  # `Counter.update` adds, floats too
    mean = {doing: share / len(measured) for doing, share in total.most_common()}
    ready = sum(last != "starting" for _, _, last in actors)
    num_nodes = len({state.nodes[name] for name, _, _ in actors if name in state.nodes})
    where = f" on {num_nodes} nodes" if num_nodes > 1 else ""
    together = (f"{len(actors)} actors{where}", mean, f"{ready} ready")
    # The order of separate lines: the learner, the actors, the evaluator.
    return sorted([*others, together], key=lambda row: row[0] == "evaluator")


def _bar(shares: dict[str, float], width: int) -> Text:
    """Return shares as one bar of `width` cells."""
    bar, filled, until = Text(), 0, 0.0
    for state, share in shares.items():
        until += share
        cells = round(until * width) - filled
        bar.append("█" * cells, STATE_STYLES.get(state, OTHER_STATE_STYLE))
        filled += cells
    return bar.append("·" * (width - filled), "grey35")


def _clock(seconds: float) -> str:
    """Return seconds as minutes:seconds, or as hours:minutes:seconds."""
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
