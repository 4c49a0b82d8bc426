"""The live panel: everything known of a run, in the space of a small terminal."""

import itertools
import math
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from mage_async.results.metrics import returns_by_environment
from mage_async.results.run_directory import RunDirectory
from mage_services.terminal.process_rows import processes
from mage_services.terminal.run_state import RunState

MAX_WIDTH = 120
EPISODE_STYLES = ("grey62", "deep_sky_blue3", "turquoise2", "bold spring_green2")
_BLOCKS = "▁▂▃▄▅▆▇█"


def panel(state: RunState, run: RunDirectory, now: float, width: int) -> RenderableType:
    """The state of a run as a panel of `width` columns."""
    parts: list[RenderableType] = [_progress(state, now), Text()]
    if state.steps or state.curve:
        parts += [_returns(state, width), *_environments(state), Text(), _figures(state), Text()]
    parts.append(processes(state, width))
    parts += [
        Text(f"! {note}", "bold red", overflow="ellipsis", no_wrap=True)
        for note in state.notes[-3:]
    ]
    config = state.config
    title = f"[bold]mage[/]  {escape(config.environment.name)}  [dim]seed[/] {config.seed}"
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
    """Leaves two columns for the `^C` that a terminal echoes, lest it wrap and shift the panel."""
    return min(MAX_WIDTH, terminal - 2)


def _progress(state: RunState, now: float) -> RenderableType:
    grid = Table.grid(padding=(0, 1), expand=True)
    grid.add_column(no_wrap=True)
    grid.add_column(ratio=1)
    grid.add_column(no_wrap=True, justify="right")
    label, done, total = _position(state)
    bar = ProgressBar(
        total=total,
        completed=done,
        pulse=total is None,
        animation_time=now,
        complete_style="deep_sky_blue3",
        finished_style="spring_green3",
    )
    grid.add_row(Text.from_markup(label), bar, _times(state, now))
    return grid


def _position(state: RunState) -> tuple[str, float, float | None]:
    """What goes on, how much of it is done, and of how much."""
    if state.phase == "warm start":
        warm = state.warm_start
        known = {name: warm[name] for name in ("loss", "gate") if math.isfinite(warm[name])}
        said = "  ".join(f"{name} {value:.2f}" for name, value in known.items())
        text = f"[bold]warm start[/] {warm['step']}/{warm['steps']}"
        return f"{text} [dim]{said}[/]", warm["step"], warm["steps"]
    steps = state.config.learner.steps
    if state.phase == "training":
        return f"[bold]training[/] step {state.step}/{steps}", state.step, max(1, steps)
    if state.phase == "evaluating":
        version = state.step if state.evaluating is None else state.evaluating
        return f"[bold]evaluating[/] version {version}", 0, None
    return f"[bold]{state.phase}[/]", 1.0, 1.0 if state.phase == "done" else None


def _times(state: RunState, now: float) -> Text:
    left = state.seconds_left(now)
    text = Text(_clock(now - state.began))
    if left is not None:
        text.append(f" · {_clock(left)} left", "dim")
        if state.phase == "training":
            text.append(" + evaluation", "dim")
    return text


def _returns(state: RunState, width: int) -> RenderableType:
    """Return of each episode: the batch of every step, and the held-out points of the curve."""
    spark = max(8, (width - 50) // 2)
    grid = Table.grid(padding=(0, 1))
    grid.add_column(min_width=9)
    for _ in range(2):
        grid.add_column(justify="right", min_width=6)
        grid.add_column(min_width=spark)
    version = f" v{state.curve[-1]['version']}" if state.curve else ""
    grid.add_row(
        *(
            Text(word, "dim")
            for word in ("return", "", "train, each step", "", f"held-out{version}")
        )
    )
    rows = _histories(state)
    low, high = _range([value for train, heldout in rows for value in (*train, *heldout)])
    for episode, (train, heldout) in enumerate(rows):
        style = episode_style(episode, len(rows))
        grid.add_row(
            Text(f"episode {episode + 1}", style),
            *_history(train, style, low, high, spark),
            *_history(heldout, style, low, high, spark),
        )
    return grid


def _environments(state: RunState) -> list[Text]:
    """Of a mix, the last episode's return in each environment of the last batch."""
    returns = returns_by_environment(state.last)
    said = "  ".join(f"{name} {row[-1]:+.2f}" for name, row in returns.items())
    line = Text(f"by environment  {said}", "dim", overflow="ellipsis", no_wrap=True)
    return [line] if said else []


def _histories(state: RunState) -> list[tuple[list[float], list[float]]]:
    num_episodes = state.config.trial.episodes
    heldout = [point["sets"]["heldout"] for point in state.curve]
    return [
        (state.returns(k), [row[k] for row in heldout if k < len(row)]) for k in range(num_episodes)
    ]


def _history(values: list[float], style: str, low: float, high: float, width: int) -> list[Text]:
    last = f"{values[-1]:+.2f}" if values else ""
    return [Text(last, style), Text(sparkline(values, low, high, width), style)]


def episode_style(episode: int, num_episodes: int) -> str:
    """From grey for the first episode to green for the last."""
    if num_episodes == 1:
        return EPISODE_STYLES[-1]
    return EPISODE_STYLES[round(episode * (len(EPISODE_STYLES) - 1) / (num_episodes - 1))]


def sparkline(values: Sequence[float], low: float, high: float, width: int) -> str:
    """Values as blocks between `low` and `high`; means of neighbours where there are too many."""
    if len(values) > width:
        edges = [number * len(values) // width for number in range(width + 1)]
        chunks = [values[a:b] for a, b in itertools.pairwise(edges)]
        values = [sum(chunk) / len(chunk) for chunk in chunks]
    top = len(_BLOCKS) - 1
    return "".join(_BLOCKS[round((value - low) / (high - low) * top)] for value in values)


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values, default=0.0), max(values, default=1.0)
    return low, high if high - low > 0.1 else low + 0.1


def _figures(state: RunState) -> RenderableType:
    """The last step's numbers and what became of the trials, a line each."""
    grid = Table.grid(padding=(0, 1))
    grid.add_column(style="dim", min_width=9)
    grid.add_column(no_wrap=True, overflow="ellipsis")
    for label, text in _rows(state):
        grid.add_row(label, Text.from_markup(text))
    return grid


def _rows(state: RunState) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    if last := state.last:
        bound = state.config.admission.max_staleness
        rows += [
            (
                "speed",
                f"{last['trials_per_s']:.0f} [dim]trials/s[/]  "
                f"{short(last['generated_tokens_per_s'])} [dim]sampled[/]  "
                f"{short(last['trained_tokens_per_s'])} [dim]trained tokens/s[/]",
            ),
            (
                "staleness",
                f"{last['staleness_mean']:.2f} [dim]mean[/]  {last['staleness_max']:.0f} [dim]max"
                f" of {bound} allowed[/]  [dim]prefix cache[/] {last['prefix_hit_rate']:.1%}"
                f" [dim]hit[/]",
            ),
            (
                "policy",
                f"{last['entropy']:.3f} [dim]nats entropy[/]  "
                f"{last['valid_action_share']:.1%} [dim]valid actions,[/] "
                f"{last['invalid_actions_per_trial']:.2f} [dim]invalid/trial[/]",
            ),
        ]
    for source, count in state.injections().items():
        said = f"{count:,} [dim]observations of[/] {escape(source)} [dim]held special tokens[/]"
        rows.append(("as text", said))
    if trials := state.trials:
        rows.append(
            (
                "trials",
                f"{trials['granted']:,} [dim]granted =[/] {trials['trained']:,} [dim]trained +[/]"
                f" {trials['dropped']:,} [dim]dropped +[/] {trials['in_flight']:,}"
                " [dim]in flight[/]",
            )
        )
    return rows


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def short(number: float) -> str:
    """1234567 -> 1.2M."""
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if number >= 10 * size or (unit == "M" and number >= size):
            return f"{number / size:.1f}{unit}"
    return f"{number:,.0f}"
