"""The ratio of selection: it is 1 where chance drops groups, and says whom drops choose."""

import random

import pytest

from mage_async.admission.ledger import DroppedGroup
from mage_async.environments.catalogue import load
from mage_async.environments.user_class import ResetStep
from mage_async.results.dropped_bias import Kinds, Selection, Share, contrast, dropped_groups

TRIALS = 4


def played(hazard: float, first: float = 0.0, num_groups: int = 4000) -> tuple[Selection, float]:
    """Groups of 8 to 80 turns; what their trained share is, long third over short third, in truth.

    Args:
        hazard: how likely a turn is to drop its group.
        first: how likely a group is to be dropped before its first turn.
    """
    source, found = random.Random(7), Selection()
    fates: list[tuple[int, bool]] = []
    for _ in range(num_groups):
        length = source.randint(8, 80)
        lost_at = next((at for at in range(length) if source.random() < hazard), None)
        lost_at = 0 if source.random() < first else lost_at
        row = ["one kind", "task", length if lost_at is None else lost_at]
        if lost_at is None:
            found.add({"trained_groups": [[*row, 1]]})
        else:
            found.add({"dropped_groups": [[*row, "raised", 1]]})
        fates.append((length, lost_at is None))
    fates.sort()
    third = num_groups // 3
    short, long = (sum(kept for _, kept in part) for part in (fates[:third], fates[-third:]))
    return found, long / short


@pytest.mark.parametrize("hazard", [0.0005, 0.002, 0.005])
def test_faults_that_hit_every_turn_alike_lose_long_groups(hazard: float) -> None:
    found, truth = played(hazard)
    ratio = found.long_over_short(TRIALS)
    assert ratio is not None
    assert truth < 0.99
    assert ratio.low < truth < ratio.high
    assert ratio.value == pytest.approx(truth, abs=0.05)


def test_groups_dropped_before_their_first_turn_are_of_any_length() -> None:
    found, truth = played(0.0, first=0.2)
    ratio, whole = found.long_over_short(TRIALS), found.whole()
    assert ratio is not None
    assert whole is not None
    assert ratio.low < 1.0 < ratio.high
    assert ratio.value == pytest.approx(1.0) != truth
    assert whole.ratio().value == pytest.approx(0.8, abs=0.02)


def test_lengths_that_are_never_trained_count_as_long() -> None:
    found = Selection()
    found.add({"trained_groups": [["kind", "a", 8, 50], ["kind", "a", 16, 50]]})
    found.add({"dropped_groups": [["kind", "b", 40, "outgrew the context", 100]]})
    short, *_, last = found.by_length(TRIALS)
    assert (short.label, short.trained, short.started) == ("short: 2 turns a trial", 50, 50)
    assert (last.trained, last.started) == (50, 150)
    assert found.long_over_short(TRIALS) == contrast(last, short)


def test_groups_of_one_length_have_no_ratio_of_lengths() -> None:
    found = Selection()
    assert found.whole() is None
    found.add({"trained_groups": [["kind", "a", 8, 50]]})
    assert found.long_over_short(TRIALS) is None
    assert [share.label for share in found.by_length(TRIALS)] == ["middle: 2 turns a trial"]


def test_intervals_have_a_width_where_nothing_was_dropped() -> None:
    """Wilson's interval of 100 of 100 begins at 0.963."""
    whole = Share("all", 100, 100)
    assert whole.ratio() == pytest.approx((1.0, 0.963, 1.0), abs=1e-3)
    assert contrast(whole, whole) == pytest.approx((1.0, 0.963, 1.038), abs=1e-3)
    assert contrast(Share("lost", 0, 50), whole).value == 0.0
    assert contrast(whole, Share("lost", 0, 50)).low > 1.0
    half = Share("half", 50, 100).ratio()
    assert (half.low, half.high) == pytest.approx((0.404, 0.596), abs=1e-3)


def test_drops_become_rows_by_kind_task_turns_and_cause() -> None:
    environment = load("rps")
    one, other = environment.members("train")[:2]
    raised = "rps against 'a', seed 5: raised ValueError: gone"
    drops = [DroppedGroup(one, 7, raised)] * 2 + [DroppedGroup(other, 3, "over age")]
    rows = dropped_groups(drops, Kinds(environment, pytest.fail))
    assert sorted(rows) == sorted(
        [
            [environment.family(one), one, 7, "the environment raised", 2],
            [environment.family(other), other, 3, "over age", 1],
        ]
    )
    found = Selection.of([{"dropped_groups": rows}])
    assert found.causes == {"the environment raised": 2, "over age": 1}
    assert [share.label for share in found.by_task()] == sorted([one, other])
    trained = [[environment.family(one), one, 10, 3]]
    both = Selection.of([{"dropped_groups": rows, "trained_groups": trained}])
    assert both.wasted_share() == pytest.approx(17 / 47)
    assert Selection().wasted_share() == 0.0


def test_a_family_that_raises_costs_no_record_and_is_noted_once() -> None:
    called: list[str] = []

    class Own:
        """Rules."""

        def members(self, split: str) -> tuple[str, ...]:
            return ("a", "b", "c")

        def family(self, task: str) -> str:
            called.append(task)
            return {"a": "first"}[task]

        def reset(self, seed: int, task: str) -> str:
            return ""

        def step(self, action: str) -> tuple[str, float, bool]:
            return "", 0.0, True

    notes: list[str] = []
    kinds = Kinds(ResetStep(Own, {}), notes.append)
    drops = [DroppedGroup(member, 1, "gone") for member in "aabbc"]
    for _ in range(2):
        rows = dropped_groups(drops, kinds)
        assert [(kind, member, count) for kind, member, _, _, count in rows] == [
            ("?", "b", 2),
            ("?", "c", 1),
            ("first", "a", 2),
        ]
    assert called == ["a", "b", "c"]
    (note,) = notes
    assert note.startswith("family('b') raised, so the task counts as one of the kind '?': environ")
    assert note.endswith("KeyError: 'b'")
