"""The certificate of adaptation names what the returns show, and no more."""

from collections.abc import Callable

import numpy as np
import pytest

from mage_async.results.certificate import TaskReturns, arm_returns, certificate, scaled

Source = np.random.Generator


def tasks(
    num_tasks: int, play: Callable[[Source], tuple[list[float], list[float], float, float]]
) -> list[TaskReturns]:
    """Tasks whose `own`, memoryless, `noise` and `swapped` returns a function draws."""
    source = np.random.default_rng(1)
    found = []
    for number in range(num_tasks):
        own, without, noise, swapped = play(source)
        found.append(TaskReturns("game", str(number), own, without, without, noise, swapped))
    return found


def drawn(source: Source, share: float) -> float:
    return source.binomial(4, share) / 4


def learner(source: Source) -> tuple[list[float], list[float], float, float]:
    without = [drawn(source, 0.5) for _ in range(3)]
    return [drawn(source, 0.5), 1.0, 1.0], without, drawn(source, 0.5), drawn(source, 0.3)


def retrier(source: Source) -> tuple[list[float], list[float], float, float]:
    own, without = ([drawn(source, 0.5) for _ in range(3)] for _ in range(2))
    return own, without, drawn(source, 0.5), drawn(source, 0.5)


def warmed_up(source: Source) -> tuple[list[float], list[float], float, float]:
    without = [drawn(source, 0.4) for _ in range(3)]
    own = [drawn(source, 0.4), drawn(source, 0.8), drawn(source, 0.8)]
    return own, without, drawn(source, 0.8), drawn(source, 0.8)


def steady(source: Source) -> tuple[list[float], list[float], float, float]:
    level = drawn(source, 0.8)
    return [level] * 3, [level] * 3, level, drawn(source, 0.8)


@pytest.mark.parametrize(
    ("play", "verdict", "sentence"),
    [
        (learner, "adapts", "adapts: from 0.5"),
        (
            retrier,
            "improves without memory",
            "improves without memory (luck): the best of its episodes is 0.22 above the first, as "
            "chance alone gives any player of several episodes, and the last one is at most 0.0",
        ),
        (warmed_up, "improves without memory", "improves without memory (practice): from 0.4"),
        (steady, "does not adapt", "does not adapt: from 0.8"),
    ],
)
def test_each_kind_of_player_is_named(
    play: Callable[[Source], tuple[list[float], list[float], float, float]],
    verdict: str,
    sentence: str,
) -> None:
    found = certificate(tasks(384, play))
    assert (found.verdict, found.needs_tasks) == (verdict, None)
    assert found.sentence.startswith(sentence)


def test_too_few_tasks_say_how_many_are_needed() -> None:
    found = certificate(tasks(20, retrier))
    assert found.verdict == "cannot be told"
    assert found.needs_tasks is not None
    assert f"needs about {found.needs_tasks:,} tasks" in found.sentence
    assert certificate(tasks(2 * found.needs_tasks, retrier)).verdict == "improves without memory"


def test_repeated_tasks_are_no_evidence() -> None:
    """A deterministic model plays equal tasks alike, so repetition proves nothing."""
    once = tasks(4, learner)
    found = certificate(once * 64)
    assert found.verdict == "cannot be told"
    assert "they hide 4 different things, and 12 are needed: `members(" in found.sentence
    # Twelve tasks that differ among themselves stay as uncertain, however often they are played.
    mixed = [TaskReturns("g", str(n), [0, 0, n % 2], [0] * 3, [0] * 3, 0, 0) for n in range(12)]
    assert certificate(mixed * 64).differences["first"].low < 0.15


def test_the_best_of_several_is_no_improvement_in_a_game_of_chance() -> None:
    by_chance = [
        TaskReturns("g", t.member, t.own, t.blind, t.retry, t.noise, t.swapped, has_chance=True)
        for t in tasks(384, retrier)
    ]
    found = certificate(by_chance)
    assert (found.verdict, found.luck) == ("does not adapt", None)


@pytest.mark.parametrize("equal", ["first", "blind", "retry", "noise", "swapped"])
def test_one_difference_of_zero_is_enough_against_adaptation(equal: str) -> None:
    """The last episode is above four comparisons, and by chance above the fifth: at most 1 %."""
    source, wrong = np.random.default_rng(2), 0
    for _ in range(300):
        found = []
        for number in range(64):
            low = {name: 0.0 for name in ("first", "blind", "retry", "noise", "swapped")}
            last = float(source.random() < 0.5)
            low[equal] = float(source.random() < 0.5)
            own, blind = [low["first"], 0.5, last], [0.0, 0.0, low["blind"]]
            found.append(
                TaskReturns(
                    "g", str(number), own, blind, [low["retry"]], low["noise"], low["swapped"]
                )
            )
        wrong += certificate(found).verdict == "adapts"
    assert wrong <= 6  # of 300 at 1 %: 7 or more come in 3 of 100 such tests


def test_an_adaptation_of_the_margin_in_all_differences_is_hardly_ever_refused() -> None:
    """One of six upper bounds below the margin is enough for a refusal: at most 1 % in all."""
    source, wrong = np.random.default_rng(3), 0
    for _ in range(300):
        found = []
        for number, low in enumerate(source.normal(0.4, 0.4, (96, 5))):
            own, blind = [low[0], 0.5, 0.5], [0.0, 0.0, low[1]]
            found.append(TaskReturns("g", str(number), own, blind, [low[2]], low[3], low[4]))
        wrong += certificate(found, margin=0.1).verdict not in ("adapts", "cannot be told")
    assert wrong <= 6  # of 300 at 1 %: 7 or more come in 3 of 100 such tests


def test_games_certified_together_are_each_stricter() -> None:
    found = tasks(64, learner)
    alone, among = certificate(found), certificate(found, statements=10)
    assert among.differences["first"].low < alone.differences["first"].low
    assert among.differences["first"].high > alone.differences["first"].high
    assert among.differences["first"].mean == alone.differences["first"].mean


def test_returns_are_scaled_and_averaged() -> None:
    assert scaled([-1.0, 0.0, 1.0], -1.0, 1.0) == [0.0, 0.5, 1.0]
    assert scaled([3.0], 3.0, 3.0) == [0.0]
    rows = arm_returns(tasks(8, steady))
    assert rows["noise"][:2] == [None, None]
    assert rows["noise"][2] == rows["own"][0]
