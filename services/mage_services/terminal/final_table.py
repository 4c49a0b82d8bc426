"""The final table of a run: what it reached, beside what is possible."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.box import ROUNDED
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

SETS = {
    "heldout": "held-out",
    "heldout_blind": "  blind: no memory",
    "heldout_swapped": "  swapped: new last",
    "heldout_unguided": "  unguided: no earlier tasks",
    "train": "train",
}
"""Evaluation sets in the order and the words of the table."""


def final_table(summary: dict[str, Any], *, ascii_only: bool = False) -> RenderableType:
    """Return of each episode in every set with its 95 % interval, the references, the costs."""
    evaluation = summary.get("evaluation", {})
    parts: list[RenderableType] = []
    if evaluation:
        parts.append(_returns(summary, "+-" if ascii_only else "±"))
    else:
        parts.append(Text.from_markup(_title(summary), style="bold"))
    parts += [Text(line, style="dim") for line in _facts(summary)]
    return Group(*parts)


def _returns(summary: dict[str, Any], plus_minus: str) -> Table:
    evaluation = summary["evaluation"]
    shown = _shown(len(next(iter(evaluation.values()))["return_by_episode"]))
    table = Table(title=_title(summary), title_justify="left", title_style="bold", box=ROUNDED)
    table.add_column("return per unit", no_wrap=True)
    for episode in shown:
        table.add_column(f"episode {episode + 1}", justify="right", no_wrap=True)
    for name, label in SETS.items():
        if name in evaluation:
            cells = _with_interval(evaluation[name], plus_minus)
            table.add_row(label, *(cells[k] for k in shown), style=_style(name))
    table.add_section()
    for name, cells in _references(summary, plus_minus).items():
        table.add_row(name, *(cells[k] for k in shown), style="dim")
    _add_environments(table, summary, shown, plus_minus)
    _add_probes(table, evaluation, shown)
    _add_harder(table, summary, shown, plus_minus)
    _add_diversity(table, summary, shown, plus_minus)
    return table


def _add_harder(
    table: Table, summary: dict[str, Any], shown: Sequence[int], plus_minus: str
) -> None:
    """Held-out returns of tasks that are harder than those trained on."""
    for place, rung in enumerate(summary.get("harder", {}).get("rungs", [])):
        if place == 0:
            table.add_section()
            continue  # as trained: the table begins with it
        cells = _with_interval(rung["score"], plus_minus)
        table.add_row(f"harder: {escape(rung['label'])}", *(cells[k] for k in shown))


def _add_diversity(
    table: Table, summary: dict[str, Any], shown: Sequence[int], plus_minus: str
) -> None:
    """Entropy of distinct trajectories, of at most so many nats."""
    if found := summary.get("diversity"):
        table.add_section()
        label = f"diversity, nats of {found['most']:.2f}"
        pairs = zip(found["entropy_by_episode"], found["ci95_by_episode"], strict=True)
        cells = [f"{entropy:.3f} {plus_minus}{half:.3f}" for entropy, half in pairs]
        table.add_row(label, *(cells[k] for k in shown))


def _add_environments(
    table: Table, summary: dict[str, Any], shown: Sequence[int], plus_minus: str
) -> None:
    """Of a mix, held-out returns of each environment, with the best that is known of them."""
    heldout = summary["evaluation"].get("heldout", {}).get("parts", {}).get("environment", {})
    for name, part in heldout.items():
        known = summary["environments"][name]
        table.add_section()
        label = name if known["is_trained_on"] else f"{name} (not trained on)"
        cells = _with_interval(part, plus_minus)
        table.add_row(label, *(cells[k] for k in shown), style="bold green")
        for reference, cells in _references(known, plus_minus).items():
            table.add_row(f"  {reference}", *(cells[k] for k in shown), style="dim")


def _shown(num_episodes: int) -> list[int]:
    """All episodes, or of many the first and the last three: a terminal is narrow."""
    every = list(range(num_episodes))
    return every if num_episodes <= 4 else [0, *every[-3:]]


def _add_probes(table: Table, evaluation: dict[str, Any], shown: Sequence[int]) -> None:
    """Where the environment knows actions that only gather information."""
    probing = {name: score["probes_by_episode"] for name, score in evaluation.items()}
    if any(map(any, probing.values())):
        table.add_section()
        for name in ("heldout", "train"):
            if name in probing:
                shares = [f"{probing[name][k]:.0%}       " for k in shown]
                table.add_row(f"probes, {SETS[name]}", *shares)


def _with_interval(score: dict[str, Any], plus_minus: str) -> list[str]:
    return _between(score["return_by_episode"], score["ci95_by_episode"], plus_minus)


def _between(means: Sequence[float], halves: Sequence[float], plus_minus: str) -> list[str]:
    pairs = zip(means, halves, strict=True)
    return [f"{_return(mean)} {plus_minus}{half:.3f}" for mean, half in pairs]


def _references(known: dict[str, Any], plus_minus: str) -> dict[str, list[str]]:
    """Cells of each reference by name; sampled ones have an interval, exact ones none."""
    errors = known.get("reference_ci95", {}).get("heldout", {})
    return {
        name.replace("_", " "): _between(values, errors[name], plus_minus)
        if name in errors
        else _aligned(values)
        for name, values in known.get("references", {}).get("heldout", {}).items()
    }


def _aligned(values: Sequence[float]) -> list[str]:
    return [f"{_return(value)}       " for value in values]


def _return(value: float) -> str:
    """With its sign, and no minus before zero."""
    return f"{round(value, 3) + 0.0:+.3f}"


def _style(name: str) -> str:
    return {"heldout": "bold green", "train": ""}.get(name, "yellow")


def _title(summary: dict[str, Any]) -> str:
    done = "" if summary["complete"] else "  (not finished)"
    name = escape(summary["environment"]["name"])
    return f"{name}  seed {summary['seed']}  {summary['steps']} steps{done}"


def _facts(summary: dict[str, Any]) -> list[str]:
    rates, trials = summary.get("throughput", {}), summary.get("trials", {})
    staleness, cache = summary.get("staleness", {}), summary.get("prefix_cache", {})
    lines = [f"wall {summary['wall_s']:.1f} s"]
    if "processor_s" in summary:
        lines[0] += f" ({summary['processor_s']:.0f} s of CPU time)"
    if "warm_start_s" in summary:
        lines[0] += f", warm start {summary['warm_start_s']:.1f} s of it"
    if rates:
        lines[0] += f"; {rates['trials_per_s']:.0f} trials/s"
        lines[0] += f", {rates['generated_tokens_per_s']:.0f} sampled tokens/s"
    if staleness:
        lines.append(f"staleness mean {staleness['mean']:.2f}, max {staleness['max']:g}")
    if cache:
        lines[-1] += f"; prefix cache hit {cache['hit_rate']:.1%}, reuse {cache['reuse_rate']:.1%}"
    cut = summary.get("evaluation", {}).get("heldout", {}).get("cut_short", 0.0)
    if cut:
        lines.append(
            f"{cut:.1%} of held-out trials outgrew engine.max_tokens, or had a call that failed, "
            "and count as lost"
        )
    for source, count in summary.get("injections", {}).items():
        lines.append(f"{count} observations of {source} held special tokens, told as plain text")
    if trials:
        lines.append(
            f"trials: {trials['granted']} granted = {trials['trained']} trained"
            f" + {trials['dropped']} dropped + {trials['in_flight']} in flight"
        )
    if reasons := summary.get("dropped_by_reason"):
        reason, count = max(reasons.items(), key=lambda item: item[1])
        lines.append(f"{count} of {sum(reasons.values())} dropped groups: {reason}")
    return lines


def print_final(console: Console, summary: dict[str, Any], report: Path) -> None:
    """Print the table in what the console's encoding has, then the report's path unbroken."""
    table = final_table(summary, ascii_only=console.options.ascii_only)
    console.print(table, highlight=False)
    console.out(f"report: {report}", highlight=False)
