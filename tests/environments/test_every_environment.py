"""One test for all environments: each is played against the facts it declares."""

import importlib.util
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mage_async.config import config_file
from mage_async.environments import catalogue
from mage_async.environments.environment import Environment, Outcome, Play, Script, Split
from mage_async.trajectory import Task

ENVIRONMENTS = {
    "bandit": catalogue.load("bandit"),
    "large bandit": catalogue.load("bandit", contexts=6, arms=2, rounds=12),
    "blackjack": catalogue.load("blackjack"),
    "family": catalogue.load("family", games=32),
    "family of other structures": catalogue.load("family", games=32, heldout="structures"),
    "family of other sizes": catalogue.load("family", structures=2, games=16, heldout="sizes"),
    "hangman": catalogue.load("hangman", lives=20),
    "mastermind": catalogue.load("mastermind"),
    "large mastermind": catalogue.load("mastermind", pegs=4, colours=5, turns=8),
    "maze": catalogue.load("maze"),
    "grid": catalogue.load("grid"),
    "small grid": catalogue.load("grid", size=4, turns=6),
    "grid from the middle": catalogue.load("grid", size=5, turns=12, start="middle"),
    "numberlock": catalogue.load("numberlock"),
    "wordle": catalogue.load("wordle"),
    "boxes": catalogue.load("boxes"),
    "five boxes": catalogue.load("boxes", boxes=5, scripted="guesses"),
    "rps": catalogue.load("rps"),
    "scout": catalogue.load("scout"),
    "cheap scout": catalogue.load("scout", cost=0.7, safe=0.2),
    "minesweeper": catalogue.load("minesweeper"),
    "small minesweeper": catalogue.load("minesweeper", size=4, mines=2, view="news"),
    "sokoban": catalogue.load("sokoban"),
    "shop": catalogue.load("shop"),
    "openspiel kuhn": catalogue.load("openspiel", game="kuhn_poker", restart="same"),
    "openspiel goofspiel": catalogue.load(
        "openspiel", game="goofspiel(num_cards=3)", iterations=20
    ),
    "openspiel hex": catalogue.load(
        "openspiel", game="hex(board_size=3)", heldout=["mcts-30", "mcts-50"], restart="new"
    ),
    "kuhn": catalogue.load("kuhn"),
    "kuhn mage": catalogue.load("kuhn", opponents="mage"),
    "kuhn archetypes": catalogue.load("kuhn", opponents="archetypes"),
    "kuhn again": catalogue.load("kuhn", opponents="contrasts", hands=2, redeals=False),
    "tictactoe": catalogue.load("tictactoe"),
    "tictactoe careless": catalogue.load("tictactoe", opponents="careless", view="news"),
}
OPTIONAL = {
    "textworld": {"games": 8},
}
"""Environments of engines that may not be installed; `test_text_engines.py` says so."""
ENVIRONMENTS |= {
    name: catalogue.load(name, **options)
    for name, options in OPTIONAL.items()
    if importlib.util.find_spec(name)
}
ORBIT = catalogue.load(
    "mix", **config_file.load(config_file.find("papers/orbit")).environment.options
)
ENVIRONMENTS |= {f"orbit's {part.label}": part.environment for part in ORBIT.parts}
CLOSED = {name: each for name, each in ENVIRONMENTS.items() if not each.facts.has_open_text}
SPLITS: tuple[Split, ...] = ("train", "heldout")
ENOUGH = 50
"""Members of a split that stand for all where there are more."""
NONSENSE = ("", " ", "nonsense", "rock paper", "Check", "scout!", "mine", "<action>", "9", "ä")

every_environment = pytest.mark.parametrize("environment", ENVIRONMENTS.values(), ids=ENVIRONMENTS)
Choose = Callable[[Play], str]


@dataclass(frozen=True)
class Record:
    """All that happened in one episode."""

    observation: str
    anchors: tuple[str, ...]
    actions: tuple[str, ...]
    outcomes: tuple[Outcome, ...]
    draws: tuple[str, ...]

    def said(self) -> list[str]:
        return [self.observation, *(outcome.observation for outcome in self.outcomes)]


def play_out(environment: Environment, task: Task, episode: int, choose: Choose) -> Record:
    """Play an episode to its end, and check what must hold at every turn."""
    play = environment.begin(task, episode)
    first = play.observation
    anchors: list[str] = []
    actions: list[str] = []
    outcomes: list[Outcome] = []
    while not outcomes or not outcomes[-1].is_done:
        legal = play.legal_actions()
        assert legal
        assert len(outcomes) < environment.facts.max_turns
        action = choose(play)
        anchors.append(play.anchor)
        actions.append(action)
        outcomes.append(play.act(action))
        assert outcomes[-1].is_valid == (action in legal)
    assert not play.legal_actions()
    return Record(first, tuple(anchors), tuple(actions), tuple(outcomes), tuple(play.chance.draws))


def tasks(environment: Environment, most: int = ENOUGH) -> Iterator[tuple[Task, int]]:
    """Every member, or about so many of each split, in every seat, with two seeds and two
    episodes.
    """
    for split in SPLITS:
        members = environment.members(split)
        for member in members[:: -(-len(members) // most)]:
            for seat in environment.seats():
                for seed in range(2):
                    task = Task(environment.facts.name, member, seed, seat)
                    yield task, 0
                    yield task, 1


def legally(source: random.Random) -> Choose:
    return lambda play: source.choice(play.legal_actions())


def carelessly(source: random.Random) -> Choose:
    """Nonsense every other time."""

    def choose(play: Play) -> str:
        return source.choice(NONSENSE if source.random() < 0.5 else play.legal_actions())

    return choose


@every_environment
def test_an_expert_can_be_asked_wherever_a_policy_went(environment: Environment) -> None:
    """Its action is legal there, although another one was taken each time."""
    for number, (task, _) in enumerate(tasks(environment, 3)):
        expert = environment.best_script(random.Random(number))
        assert expert is not None
        taken = carelessly(random.Random(number))

        def ask_and_go_on(play: Play, expert: Script = expert, taken: Choose = taken) -> str:
            assert expert.choose(play) in play.legal_actions()
            return taken(play)

        for episode in range(2):
            play_out(environment, task, episode, ask_and_go_on)


def assert_within_facts(environment: Environment, record: Record) -> None:
    facts = environment.facts
    total = sum(outcome.reward for outcome in record.outcomes)
    assert facts.min_return - 1e-9 <= total <= facts.max_return + 1e-9
    for said in record.said():
        assert said == " ".join(said.split())
        assert facts.has_open_text or set(said.split()) <= set(facts.words)


@every_environment
@pytest.mark.parametrize("style", [legally, carelessly])
def test_every_episode_keeps_to_the_declared_facts(
    environment: Environment, style: Callable[[random.Random], Choose]
) -> None:
    for number, (task, episode) in enumerate(tasks(environment)):
        record = play_out(environment, task, episode, style(random.Random(number)))
        assert_within_facts(environment, record)
        assert bool(record.draws) <= environment.facts.has_chance


@every_environment
def test_nothing_but_nonsense_ends_the_episode_within_its_bounds(environment: Environment) -> None:
    for task, episode in tasks(environment):
        record = play_out(environment, task, episode, lambda _: "nonsense")
        assert_within_facts(environment, record)
        assert not any(outcome.is_valid for outcome in record.outcomes)


@every_environment
@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_any_text_at_all_is_an_action(environment: Environment, data: st.DataObject) -> None:
    split = data.draw(st.sampled_from(SPLITS))
    member = data.draw(st.sampled_from(environment.members(split)))
    seat = data.draw(st.sampled_from(environment.seats()))
    task = Task(environment.facts.name, member, data.draw(st.integers(0, 2**63 - 1)), seat)
    anything = st.text() | st.sampled_from(environment.facts.words)
    record = play_out(environment, task, 0, lambda _: data.draw(anything))
    assert_within_facts(environment, record)


@every_environment
def test_the_same_task_and_episode_go_the_same_way(environment: Environment) -> None:
    for number, (task, episode) in enumerate(tasks(environment)):
        once, again = (
            play_out(environment, task, episode, carelessly(random.Random(number)))
            for _ in range(2)
        )
        assert once == again


@every_environment
def test_global_randomness_has_no_influence_and_is_not_used(environment: Environment) -> None:
    some = list(tasks(environment, most=4))
    played = []
    for seed in range(2):
        random.seed(seed)
        np.random.seed(seed)
        before = random.getstate(), np.random.get_state()[1].tolist()
        played.append(
            [
                play_out(environment, task, episode, legally(random.Random(number)))
                for number, (task, episode) in enumerate(some)
            ]
        )
        assert (random.getstate(), np.random.get_state()[1].tolist()) == before
    assert played[0] == played[1]


@every_environment
def test_many_plays_at_once_go_as_they_would_alone(environment: Environment) -> None:
    some = list(tasks(environment, most=8))
    sources = [random.Random(number) for number in range(len(some))]
    plays = [environment.begin(task, episode) for task, episode in some]
    said: list[list[str]] = [[play.observation] for play in plays]
    while any(play.legal_actions() for play in plays):
        for play, source, lines in zip(plays, sources, said, strict=True):
            if legal := play.legal_actions():
                lines.append(play.act(source.choice(legal)).observation)
    for number, (task, episode) in enumerate(some):
        alone = play_out(environment, task, episode, legally(random.Random(number)))
        assert said[number] == alone.said()


@every_environment
def test_another_seed_or_episode_brings_other_luck(environment: Environment) -> None:
    member, seat = environment.members("train")[0], environment.seats()[0]
    draws = {
        play_out(
            environment,
            Task(environment.facts.name, member, seed, seat),
            episode,
            legally(random.Random(0)),
        ).draws
        for seed in range(3)
        for episode in range(3)
    }
    assert (len(draws) > 1) == environment.facts.has_chance


@pytest.mark.parametrize("environment", CLOSED.values(), ids=CLOSED)
def test_every_declared_word_is_met_and_is_made_of_letters(environment: Environment) -> None:
    met: set[str] = set()
    for number, (task, episode) in enumerate(tasks(environment, most=400)):
        record = play_out(environment, task, episode, carelessly(random.Random(number)))
        valid = (action for action in record.actions if action not in NONSENSE)
        met.update(" ".join((*valid, *record.said())).split())
    assert met == set(environment.facts.words)
    assert len(met) == len(environment.facts.words)
    assert all(word.isalpha() and word.islower() and word.isascii() for word in met)


@every_environment
def test_the_example_or_the_first_declared_word_is_an_action(
    environment: Environment,
) -> None:
    begun = (environment.begin(task, episode) for task, episode in tasks(environment))
    example = environment.facts.example or environment.facts.words[0]
    assert any(example in play.legal_actions() for play in begun)


@every_environment
def test_splits_are_disjoint_and_seats_exist(environment: Environment) -> None:
    train, heldout = (environment.members(split) for split in SPLITS)
    assert train
    assert heldout
    assert len(set(train) | set(heldout)) == len(train) + len(heldout)
    assert set(environment.seats()) <= set(range(environment.facts.num_seats))
    assert all(environment.family(member) for member in train[:ENOUGH] + heldout[:ENOUGH])


@every_environment
@pytest.mark.parametrize("split", SPLITS)
def test_swaps_are_other_members_of_the_split(environment: Environment, split: Split) -> None:
    members = environment.members(split)
    for member in members[:ENOUGH]:
        swaps = environment.swaps(member, split)
        assert swaps
        assert set(swaps) <= set(members) - {member}


@every_environment
def test_scripts_play_whole_trials_legally_and_in_more_than_one_way(
    environment: Environment,
) -> None:
    played = set()
    for seed in range(20):
        task = Task(environment.facts.name, environment.members("train")[0], 1, 0)
        script = environment.script(random.Random(seed))
        records = [play_out(environment, task, episode, script.choose) for episode in range(3)]
        assert all(outcome.is_valid for record in records for outcome in record.outcomes)
        played.add(tuple(record.actions for record in records))
    assert len(played) > 1


@every_environment
@pytest.mark.parametrize("split", SPLITS)
def test_references_cover_every_episode_within_the_bounds(
    environment: Environment, split: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Bounds hold in each trial, so few of them are enough.
    monkeypatch.setattr(type(environment), "num_reference_trials", 20, raising=False)
    facts = environment.facts
    references = environment.references(split, 3)
    assert references
    for values in references.values():
        assert len(values) == 3
        for value in values:
            assert facts.min_return <= value * facts.units <= facts.max_return


@every_environment
def test_only_declared_actions_are_probes(environment: Environment) -> None:
    assert not any(environment.is_probe(nonsense) for nonsense in NONSENSE)
    probes = {word for word in environment.facts.words if environment.is_probe(word)}
    assert probes == ({"scout"} if environment.facts.name == "scout" else set())
