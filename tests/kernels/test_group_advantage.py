"""Values compared and scaled within cells, by plain PyTorch and by Triton: by hand, and against
numpy.
"""

from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from mage_async.config import config_file, presets
from mage_async.config.components import ESTIMATORS, decode_component
from mage_async.config.schema import Transcript
from mage_async.credit.turn_table import TurnTable
from mage_async.errors import ConfigError
from mage_async.learning.advantages import Advantage, turn_advantages
from mage_async.trajectory import Kind
from mage_kernels import Cells, advantage_report, at_tokens, minus_baseline, over_rms
from tests.kernels import numpy_advantages

LIMITS = Transcript(max_action_tokens=8, max_reflection_tokens=16)
ALL = ["group_mean", "leave_one_out", "token_normalised", "gigpo"]
CONFIGS = Path(__file__).resolve().parents[2] / "configs"


@pytest.fixture(scope="module")
def shipped() -> dict[str, Advantage]:
    """What shipped files and methods say of advantages, each once, by the first that says it."""
    found: dict[bytes, tuple[str, Advantage]] = {}
    for file in sorted(CONFIGS.rglob("*.toml")):
        for method in (None, *presets.presets()):
            with suppress(ConfigError):  # not every method goes with every file
                config = config_file.load(file, [], method)
                config.advantage.check(config)
                rules = config.advantage
                found.setdefault(msgspec.json.encode(rules), (f"{file.stem} {method}", rules))
    return dict(found.values())


def cells(
    ids: list[int], device: str, *, parts: list[int] | None = None, weights: Tensor | None = None
) -> Cells:
    counted = {} if parts is None else {"parts": torch.tensor(parts), "num_parts": max(parts) + 1}
    return Cells(torch.tensor(ids), max(ids) + 1, **counted, weights=weights).to(device)


def by_part(parts: list[int]) -> Tensor:
    """Weights with which each part counts once."""
    return 1.0 / torch.bincount(torch.tensor(parts)).double()[parts]


def column(values: list[float], device: str) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=device)


def test_a_turn_is_compared_with_the_turns_of_its_cell(device: str) -> None:
    found = minus_baseline(column([1, 10, 3, 20], device), cells([0, 1, 0, 1], device))
    assert found.tolist() == [-1.0, -5.0, 1.0, 5.0]


def test_a_mean_counts_turns_or_weighs_them(device: str) -> None:
    values, ids = column([0, 0, 0, 4], device), [0] * 4
    by_turn = minus_baseline(values, cells(ids, device))
    weighed = minus_baseline(values, cells(ids, device, weights=by_part([0, 0, 0, 1])))
    assert by_turn.tolist() == [-1.0, -1.0, -1.0, 3.0]
    assert weighed.tolist() == pytest.approx([-2.0, -2.0, -2.0, 2.0], abs=1e-15)


def test_a_part_is_compared_with_the_other_parts(device: str) -> None:
    values = column([1, 3, 8, 2, 4, 7], device)
    ids, parts = [0, 0, 0, 0, 0, 1], [0, 0, 1, 2, 2, 3]
    here = cells(ids, device, parts=parts, weights=by_part(parts))
    found = minus_baseline(values, here, leave_one_out=True)
    assert found.tolist() == pytest.approx([-4.5, -2.5, 5.5, -3.0, -1.0, 0.0])
    # Weights that differ within a part: the others of the first one are (8 + 2 * 2 + 4 * 4) / 7.
    weights = torch.tensor([3.0, 1.0, 1.0, 2.0, 4.0, 1.0], dtype=torch.float64)
    found = minus_baseline(
        values, cells(ids, device, parts=parts, weights=weights), leave_one_out=True
    )
    assert found.tolist() == pytest.approx([-3.0, -1.0, 8 - 26 / 10, 2 - 14 / 5, 4 - 14 / 5, 0.0])


def test_the_deviation_is_the_unbiased_one(device: str) -> None:
    found = minus_baseline(column([1, 2, 3], device), cells([0] * 3, device), divide_by_std=True)
    assert found.tolist() == pytest.approx([-1.0, 0.0, 1.0], abs=1e-5)


def test_a_turn_without_company_gets_zero_or_by_rule_its_value(device: str) -> None:
    values, alone = column([5], device), cells([0], device)
    assert minus_baseline(values, alone).tolist() == [0.0]
    assert minus_baseline(values, alone, keep_lone=True).tolist() == [5.0]
    both = minus_baseline(values, alone, keep_lone=True, divide_by_std=True)
    assert both.tolist() == pytest.approx([5.0])


def test_the_root_mean_square_is_pooled_over_a_cell(device: str) -> None:
    values = column([-1, 1, -7, 7], device)
    found = over_rms(values, cells([0, 0, 0, 0], device), values, 1.0)
    assert found.tolist() == pytest.approx([value / 6 for value in (-1, 1, -7, 7)])


def test_rounding_of_equal_values_is_not_scaled_up(device: str) -> None:
    values = column([0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1], device)
    here = cells([0, 0], device)
    centred = minus_baseline(values, here)
    assert values[0] != values[1]
    assert over_rms(centred, here, values, 0.0).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("value", [0.1, 1 / 3, -7.3e5])
def test_equal_values_give_exactly_zero(device: str, value: float) -> None:
    values, parts = column([value] * 7, device), [0, 0, 0, 1, 1, 2, 3]
    for weights in (None, by_part(parts)):
        here = cells([0] * 7, device, parts=parts, weights=weights)
        for rule in ({}, {"leave_one_out": True}, {"divide_by_std": True}):
            found = minus_baseline(values, here, **rule)
            assert found.tolist() == over_rms(found, here, values, 0.0).tolist() == [0.0] * 7


def test_a_turns_advantage_stands_at_all_of_its_tokens(device: str) -> None:
    found = at_tokens(column([1, 2, 3], device), torch.tensor([2, 0, 3]))
    assert found.tolist() == [1.0, 1.0, 3.0, 3.0, 3.0]


def test_a_batch_without_turns_gives_nothing(device: str) -> None:
    nothing = column([], device)
    here = Cells(torch.zeros(0, dtype=torch.int64, device=device), 0)
    assert len(minus_baseline(nothing, here)) == len(over_rms(nothing, here, nothing, 1.0)) == 0


def test_what_cannot_be_compared_is_refused() -> None:
    here = Cells(torch.zeros(2, dtype=torch.int64), 1)
    with pytest.raises(ValueError, match=r"must be float64 \[2\].*got torch.float32 \[2\]"):
        minus_baseline(torch.zeros(2), here)
    with pytest.raises(ValueError, match=r"got torch.float64 \[3\]"):
        minus_baseline(torch.zeros(3).double(), here)
    with pytest.raises(ValueError, match="got cells without parts"):
        minus_baseline(torch.zeros(2).double(), here, leave_one_out=True)
    with pytest.raises(ValueError, match=r"weights must be float64 \[2\].*got torch.float32"):
        minus_baseline(torch.zeros(2).double(), Cells(here.ids, 1, weights=torch.ones(2)))


def test_a_line_says_what_computes_advantages(device: str, request: pytest.FixtureRequest) -> None:
    is_triton = "triton" in request.node.callspec.id
    way = "Triton" if is_triton else "plain PyTorch"
    assert advantage_report(torch.device(device)) == f"advantages by {way} on {device}"


def batch(seed: int, num_trials: int = 16, *, is_equal: bool = False) -> TurnTable:
    """Groups of eight ragged trials, remarks and invalid actions among their turns; equal trials
    have a single episode with an action, so that their scores are equal too.
    """
    source = np.random.default_rng(seed)
    trial = np.repeat(np.arange(num_trials), source.integers(1, 9, num_trials))
    group = trial // 8
    kind = source.integers(0, 3, len(trial))
    shape = len(trial)
    if is_equal:
        kind[np.unique(trial, return_index=True)[1]] = Kind.ACT
    return TurnTable(
        group=group,
        component=group % 2,
        trial=trial,
        member=group % 2,
        seat=trial % 2,
        kind=kind,
        episode=np.zeros(shape, np.int64) if is_equal else source.integers(0, 3, shape),
        index=source.integers(0, 3, shape),
        anchor=source.integers(0, 5, shape),
        returns=np.full(shape, 0.1) if is_equal else source.normal(size=shape).round(1),
        episode_score=np.full(shape, 0.7) if is_equal else source.normal(size=shape).round(1),
        is_valid=np.ones(shape, bool) if is_equal else source.random(shape) < 0.8,
        num_tokens=np.ones(shape, np.int64) if is_equal else source.integers(1, 20, shape),
        memory=trial % 2,
        num_sampled=np.ones(shape, np.int64) if is_equal else source.integers(0, 4, shape),
    )


def found_and_true(table: TurnTable, rules: Advantage, device: str) -> tuple[np.ndarray, ...]:
    found = turn_advantages(table, rules, LIMITS, device).cpu().numpy()
    return found, numpy_advantages.turn_advantages(table, rules, LIMITS)


def test_shipped_configurations_give_what_numpy_gives(
    device: str, shipped: dict[str, Advantage]
) -> None:
    for name, rules in shipped.items():
        found, true = found_and_true(batch(0), rules, device)
        assert np.abs(true).max() > 0.1, name
        assert np.allclose(found, true, rtol=1e-12, atol=1e-12), name


def test_shipped_configurations_give_exactly_zero_for_equal_returns(
    device: str, shipped: dict[str, Advantage]
) -> None:
    for name, rules in shipped.items():
        grouped = msgspec.structs.replace(rules, baseline=[*rules.baseline, "group"])
        found = turn_advantages(batch(0, 8, is_equal=True), grouped, LIMITS, device)
        assert not found.any(), name


KEYS = st.lists(
    st.sampled_from(["group", "member", "seat", "kind", "episode", "index", "anchor"]),
    unique=True,
    max_size=4,
)


@st.composite
def any_rules(draw: st.DrawFn) -> Advantage:
    """All that a configuration can say of advantages and that `Advantage.check` lets pass."""
    estimator = draw(st.sampled_from(ALL))
    is_gigpo, baseline = estimator == "gigpo", draw(KEYS)
    scale = draw(st.just("none") | (st.just(baseline) if is_gigpo else KEYS))
    table = {
        "estimator": estimator,
        "baseline": baseline,
        "scale": scale,
        "weight": draw(st.sampled_from(["trial", "sample"])),
        "anchor_weight": draw(st.sampled_from([0.0, 0.3, 1.0])),
        "format_penalty": draw(st.sampled_from([0.0, 0.5])),
        "length_penalty": draw(st.sampled_from([0.0, 2.0])),
        "anchor": draw(st.sampled_from(["global", "local", "coded"])),
        "penalise": draw(st.sampled_from(["advantage", "return", *["score"] * is_gigpo])),
    }
    if not is_gigpo:
        table["epsilon"] = draw(st.sampled_from([0.0, 1e-6, 0.05]))
        table["value"] = draw(st.sampled_from(["return", "trial_score"]))
    return decode_component(ESTIMATORS, table)


@given(rules=any_rules(), seed=st.integers(0, 999))
@settings(max_examples=200, deadline=None)
def test_on_a_cpu_any_rules_give_numpys_bits(rules: Advantage, seed: int) -> None:
    found, true = found_and_true(batch(seed), rules, "cpu")
    assert found.tolist() == true.tolist()


@given(rules=any_rules(), seed=st.integers(0, 999))
@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_the_kernels_give_what_numpy_gives_by_any_rules(
    triton_kernels: str, rules: Advantage, seed: int
) -> None:
    found, true = found_and_true(batch(seed), rules, triton_kernels)
    assert np.allclose(found, true, rtol=1e-9, atol=1e-9)


# Blocks of 8 turns: cells of many, with a ragged last one, and trials that cross their borders.
@pytest.mark.parametrize("estimator", ALL)
def test_large_cells_cross_the_blocks(
    triton_kernels: str, monkeypatch: pytest.MonkeyPatch, estimator: str
) -> None:
    from mage_kernels.fused import group_advantage

    monkeypatch.setattr(group_advantage, "BLOCKS", {"BLOCK_N": 8})
    scale = ["group"] if estimator == "gigpo" else []
    rules = decode_component(
        ESTIMATORS, {"estimator": estimator, "baseline": ["group"], "scale": scale}
    )
    found, true = found_and_true(batch(5), rules, triton_kernels)
    assert np.allclose(found, true, rtol=1e-12, atol=1e-12)
