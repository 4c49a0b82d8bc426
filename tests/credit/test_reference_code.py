"""Credit and advantage against numbers recorded from the code of MAGE (commit 9b2e588) and LaMer
(9a4756c), run in double precision on 1,000 random trials in 125 groups of 8.

`recorded/reference_code.npz` has a row per turn: what was played (episodes cut short by a win,
reflections or none, invalid actions, lengths up to 24 tokens, opponents pure or mixed in a group)
and what came out. Discounts 0.95 and 0.6, penalties 0.5 for an invalid action and 2.0 for length in
MAGE, the anchor term's weight 1.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mage_async.credit.returns import CumulativeCode, Differential
from mage_async.credit.turn_table import build_table
from mage_async.learning.advantages import Gigpo
from mage_async.trajectory import Group, Kind, Task, Trial, Turn

RECORDED = np.load(Path(__file__).parent / "recorded" / "reference_code.npz")
CREDITS = {"mage": Differential, "lamer": CumulativeCode}
MAX_TOKENS = 24


def close(values):
    return pytest.approx(values, rel=0, abs=1e-6)


def recorded_groups():
    """The recorded trials, as this project keeps them."""
    rows = [dict(zip(NAMES, row, strict=True)) for row in zip(*PLAYED, strict=True)]
    trials = {}
    for row in rows:
        trials.setdefault((row["group"], row["trial"]), []).append(row)
    groups = {}
    for (group, _), turns in trials.items():
        groups.setdefault(group, []).append(trial(turns, len(groups.get(group, []))))
    return [Group(number, 0, tuple(members)) for number, members in groups.items()]


WHERE = ["group", "trial", "member", "seat", "episodes", "reflect", "episode"]
NAMES = [*WHERE, "reward", "valid", "num_tokens", "anchor"]
PLAYED = [RECORDED[name].tolist() for name in NAMES]


def trial(rows, index):
    first = rows[0]
    task = Task("recorded", str(first["member"]), first["group"], first["seat"])
    return Trial(task, index, first["episodes"], (), tuple(turns(rows)))


def turns(rows):
    counts = {}
    for row in rows:
        kind = Kind.REFLECT if row["reflect"] else Kind.ACT
        # Here a reflection belongs to the episode it looks back on, there to the one it opens.
        episode = row["episode"] - row["reflect"]
        index = counts[kind, episode] = counts.get((kind, episode), -1) + 1
        reward = row["reward"]
        yield Turn(
            *(kind, episode, index, 0, 0, row["num_tokens"], reward, row["valid"], ""),
            anchor=str(row["anchor"]),
        )


@pytest.fixture(scope="module")
def tables():
    """The recorded turns under both credits."""
    groups = recorded_groups()
    return {
        name: build_table(groups, credit(turn_discount=0.95, episode_discount=0.6))
        for name, credit in CREDITS.items()
    }


def penalties(table, length_penalty):
    return Gigpo(format_penalty=0.5, length_penalty=length_penalty).penalties(table, MAX_TOKENS)


class LamersGigpo(Gigpo, tag="lamers_gigpo"):
    anchor_key = ("group", "anchor")


def gigpo(table, taken, kind=Gigpo, *, divides=False, anchor_weight=1.0):
    """Penalties are taken from scores alone, as the codes do."""
    rows = replace(table, episode_score=table.episode_score - taken)
    scale = ["group"] if divides else "none"
    as_coded = {"baseline": ["group"], "weight": "sample", "anchor": "coded"}
    own = kind(**as_coded, scale=scale, anchor_weight=anchor_weight)
    return own.estimate(rows, "cpu").numpy()


def test_a_thousand_trials_were_recorded():
    assert len(set(RECORDED["trial"].tolist())) == 1000
    assert RECORDED["reflect"].any()
    assert not RECORDED["valid"].all()


@pytest.mark.parametrize("name", CREDITS)
def test_returns_and_episode_scores_are_the_reference_codes(tables, name):
    assert tables[name].returns == close(RECORDED[f"{name}_return"])
    assert tables[name].episode_score == close(RECORDED[f"{name}_score"])


def test_mages_advantages_are_its_codes(tables):
    made = gigpo(tables["mage"], penalties(tables["mage"], 2.0))
    assert made == close(RECORDED["mage_mean_norm"])


@pytest.mark.parametrize(("divides", "mode"), [(False, "mean_norm"), (True, "mean_std_norm")])
def test_lamers_advantages_are_its_codes(tables, divides, mode):
    table = tables["lamer"]
    made = gigpo(table, penalties(table, 0.0), LamersGigpo, divides=divides)
    assert made == close(RECORDED[f"lamer_{mode}"])


def test_their_grpo_is_the_first_term_alone_divided(tables):
    table = tables["lamer"]
    made = gigpo(table, penalties(table, 0.0), anchor_weight=0.0, divides=True)
    assert made == close(RECORDED["grpo"])
