"""Render the page of a certificate of adaptation: verdict, differences, returns and costs.

`mage adapt` plays each task in several arms: the model with its history (`own`) and four controls.
`mage_async/results/certificate.py` describes the arms, and computes what the page shows.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mage_async.pages.charts import Series, duration, line_chart, percent, short_number, signed
from mage_async.pages.tables import Table, TableCell, TableRow
from mage_async.pages.templating import fill
from mage_async.results.certificate import ARMS, PlayCounts
from mage_async.results.intervals import half_text

LABELS: dict[str, str] = {arm: arm for arm in ARMS} | {"own": "own history"}
"""Labels of the arms in charts and tables."""
COLOURS = {"own": "heldout", "blind": "blind", "retry": "train", "swapped": "swapped"}
"""CSS class of each arm that the chart draws; the classes are named after the evaluation sets of
other pages. `noise` stands in the table alone: those pages have no fifth set, and it has a return
of the last episode only.
"""
MOST_SHOWN = 80
"""Characters of an invalid answer that are shown: its end, where the action is to stand."""
COMPARED = {
    "first": "the first episode",
    "blind": "blind",
    "retry": "retry, mean of all tries",
    "noise": "noise",
    "swapped": "swapped",
    "all": "mean of the five above",
}
"""Labels of the rows of the table of differences: the last episode is compared with each of these.
The keys are those of `certificate.DIFFERENCES` and `certificate.ALL` in `mage_async/results`.
"""
LARGE_SHARE = 0.05
"""Share of invalid actions, or of completions cut or empty, above which the page warns."""


def render_certificate(document: Mapping[str, Any]) -> str:
    """Return the self-contained HTML page of a certificate.

    Args:
        document: Certificate as `mage adapt` writes it in JSON.
    """
    games = document["games"]
    returns = document["returns"]
    return fill(
        "certificate.html",
        title=f"{document['model']} · mage adapt",
        model=document["model"],
        subtitle=f"{', '.join(game['label'] for game in games)}; "
        f"{document['episodes']} episodes, {document['num_tasks']:,} tasks",
        sentence=document["sentence"],
        warnings=document["warnings"],
        margin=document["margin"],
        carried=" as the model's own reflections" if document["memory"] == "reflection" else "",
        differences=_differences(document),
        charts=[("return by episode", _chart(returns))],
        returns=_returns(document, {}, document["episodes"]),
        games=[
            {
                "label": game["label"],
                "sentence": game["sentence"],
                "table": _returns(game, game["references"], document["episodes"]),
            }
            for game in games
        ],
        costs=_costs(document["costs"]),
    )


def warnings_of(
    counts: Mapping[str, PlayCounts],
    costs: Mapping[str, Any],
    limits: Iterable[int],
    num_fingerprints: int = 0,
) -> list[str]:
    """Return sentences about reasons to doubt a measurement.

    Args:
        counts: By label of the game.
        costs: Value of `costs` in the document.
        limits: Largest numbers of tokens of a completion: of an action, and of a reflection.
        num_fingerprints: Number of different values of `system_fingerprint` of the answers.
    """
    found = []
    for label, (actions, invalid, trials, cut, lost, example) in counts.items():
        if actions and invalid / actions > LARGE_SHARE:
            share = percent(invalid / actions)
            written = f", such as {example[-MOST_SHOWN:]!r}" if example else ""
            found.append(
                f"{label}: {share} of the actions were invalid{written}, so the model may not have "
                "understood what to write"
            )
        if cut:
            found.append(
                f"{label}: {cut:,} of {trials:,} trials outgrew the model's context or had a call "
                "that failed; episodes that they did not finish count as the least return"
            )
        if lost:
            found.append(
                f"{label}: in {lost:,} of {trials:,} trials a reflection was not in <remark> tags, "
                "so later episodes did not see it"
            )
    calls = max(1, costs["calls"])
    if costs["cut"] / calls > LARGE_SHARE:
        share = percent(costs["cut"] / calls)
        limit = " or ".join(map(str, sorted(limits)))
        found.append(f"{share} of the answers were cut at {limit} tokens (--max-tokens)")
    if costs["empty"] / calls > LARGE_SHARE:
        found.append(f"{percent(costs['empty'] / calls)} of the answers were empty")
    if not (costs["prompt_tokens"] and costs["completion_tokens"]):
        found.append(
            "the endpoint does not state how many tokens it reads or samples, so neither their "
            "number nor their price is known"
        )
    if num_fingerprints > 1:
        found.append(
            f"the endpoint answered with {num_fingerprints} different settings or on different "
            "hardware (its system_fingerprint)"
        )
    return found


def _differences(document: Mapping[str, Any]) -> Table:
    """Return the table of differences between the last episode and what it is compared with."""
    rows = [
        TableRow(
            COMPARED[name],
            [TableCell(signed(each[part], 3)) for part in ("mean", "low", "high")],
        )
        for name, each in document["differences"].items()
    ]
    # `luck`: by how much the best of a trial's returns exceeds the first one; repeated tries gain
    # this much without any learning.
    if document["luck"]:
        cells = [TableCell(signed(document["luck"][part], 3)) for part in ("mean", "low", "high")]
        rows.append(TableRow("best so far minus the first", cells, "quiet"))
    return Table(["the last episode minus", "mean", "at least", "at most"], rows)


def _chart(returns: Mapping[str, Sequence[Sequence[float] | None]]) -> Any:
    """Return the chart of the arms' returns by episode; see `_returns` for `returns`."""
    lines = []
    for name, css in COLOURS.items():
        points = [(k, each) for k, each in enumerate(returns[name], 1) if each is not None]
        line = [(float(k), each[0]) for k, each in points]
        lines.append(Series(LABELS[name], line, css, [each[1] for _, each in points]))
    names = [(float(k), str(k)) for k in range(1, len(returns["own"]) + 1)]
    return line_chart(lines, alt_text="return of each arm by episode", x_names=names)


def _returns(
    measured: Mapping[str, Any],
    references: Mapping[str, Sequence[float]],
    episodes: int,
) -> Table:
    """Return the table of returns by arm and episode.

    Args:
        measured: Has in `returns`, for each arm and episode, the mean return over `num_tasks` tasks
            and its half-width; None for an episode that the arm does not measure.
        references: Known returns by name, one per episode.
    """
    rows = [
        TableRow(
            LABELS[name],
            [
                TableCell("")
                if each is None
                else TableCell(
                    signed(each[0], 3), f"± {half_text(each[1], 3, measured['num_tasks'])}"
                )
                for each in measured["returns"][name]
            ],
        )
        for name in LABELS
    ]
    rows += [
        TableRow(name.replace("_", " "), [TableCell(signed(each, 3)) for each in values], "quiet")
        for name, values in references.items()
    ]
    return Table(["", *(f"episode {k}" for k in range(1, episodes + 1))], rows)


def _costs(costs: Mapping[str, Any]) -> Table:
    """Return the table of calls, tokens, seconds and money."""
    cells = {
        "calls": short_number(costs["calls"]),
        "prompt tokens": short_number(costs["prompt_tokens"]),
        "of them from a cache": short_number(costs["cached_tokens"]),
        "sampled tokens": short_number(costs["completion_tokens"]),
        "time, all sessions": duration(costs["wall_s"]),
        "time of all calls": duration(costs["seconds"]),
    }
    if costs["money"] is not None:
        cells["money"] = f"{costs['money']:.2f}"
    return Table(["", ""], [TableRow(name, [TableCell(text)]) for name, text in cells.items()])
