"""Datasets of reasoning-gym itself, by `reasoning-gym:DATASET`."""

import random

import pytest

from mage_async.environments import catalogue
from mage_async.environments.environment import Split
from mage_async.errors import ConfigError
from tests.environments.loaders.playing import play, rehearsed

create_dataset = pytest.importorskip("reasoning_gym.factory").create_dataset

DATASETS = ("chain_sum", "spell_backward", "countdown", "mini_sudoku", "pool_matrix", "maze")
SPLITS: tuple[Split, Split] = ("train", "heldout")


@pytest.mark.parametrize("dataset", DATASETS)
def test_questions_and_scores_are_those_of_the_dataset_itself(dataset: str) -> None:
    environment = catalogue.load(f"reasoning-gym:{dataset}", size=50, seed=3)
    own, before = create_dataset(dataset, size=50, seed=3), random.getstate()
    for index in (0, 17, 49):
        entry = own[index]
        for answer in (entry["answer"], "42", f"{entry['answer']} or so"):
            played = play(environment, str(index), [answer])
            assert played.said[0] == entry["question"].strip()
            assert played.rewards == [own.score_answer(answer, entry)]
            assert played.is_done
    if dataset != "pool_matrix":  # our own loop draws from the global state there
        assert random.getstate() == before


def test_the_last_quarter_of_a_dataset_is_held_out() -> None:
    environment = catalogue.load("reasoning-gym:chain_sum", size=50)
    assert [len(environment.members(split)) for split in SPLITS] == [38, 12]
    assert environment.members("heldout")[0] == "38"


def test_a_dataset_is_configured_and_rehearsed() -> None:
    environment = catalogue.load("reasoning-gym:chain_sum", config={"min_terms": 6})
    assert play(environment, "0", []).said[0].count("+") + 1 <= 6
    assert "4 × reset took" in rehearsed("reasoning-gym:chain_sum")[1]


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("chain_sums", {}, "has no such dataset; it has ab, acre, advanced_geometry"),
        (
            "chain_sum",
            {"terms": 3},
            "unknown key 'terms'; the dataset's keys: min_terms",
        ),
        ("chain_sum", {"size": 10}, "`config` has the key 'size': give it as the option"),
        ("chain_sum", {"seed": 1}, "`config` has the key 'seed': give it as the option"),
        ("chain_sum", {"min_terms": 0}, "AssertionError: min_terms must be positive"),
    ],
)
def test_a_mistake_is_one_sentence(name: str, config: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        catalogue.load(f"reasoning-gym:{name}", config=config)
