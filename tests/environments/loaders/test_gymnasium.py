"""Environments of Gymnasium itself, by `gymnasium:ID`."""

import random
import sys
from importlib import import_module
from typing import Any

import numpy
import pytest

from mage_async.assembly import check_keys
from mage_async.config import config_file
from mage_async.environments import catalogue
from mage_async.errors import ConfigError
from tests.environments.loaders.playing import begin, play, rehearsed

gymnasium = pytest.importorskip("gymnasium")
spaces = gymnasium.spaces
# This module cannot be imported without Gymnasium.
loader = import_module("mage_async.environments.loaders.gymnasium")
reader, writer = loader.reader, loader.writer


TOYS = {
    "Taxi-v4": {},
    "FrozenLake-v1": {},
    "CliffWalking-v1": {},
    "CliffWalkingSlippery-v1": {},
    "Blackjack-v1": {"natural": True},
}


def own_loop(identity: str, seed: int, actions: list[int], **options: Any) -> list[float]:
    """Rewards of Gymnasium's own loop."""
    own, rewards = gymnasium.make(identity, **options), []
    own.reset(seed=seed)
    for action in actions:
        _, reward, terminated, truncated, _ = own.step(action)
        rewards.append(float(reward))
        if terminated or truncated:
            break
    return rewards


@pytest.mark.parametrize("identity", TOYS)
def test_rewards_are_those_of_the_librarys_own_loop(identity: str) -> None:
    environment = catalogue.load(f"gymnasium:{identity}", turns=300, make=TOYS[identity])
    words = begin(environment, "0").legal_actions()
    for seed in range(5):
        source = random.Random(seed)
        actions = [source.randrange(len(words)) for _ in range(300)]
        played = play(environment, str(seed), [words[each] for each in actions])
        assert played.rewards == own_loop(identity, seed, actions, **TOYS[identity])
        assert played.is_done
        assert all(played.is_valid)


def test_a_state_and_an_action_are_words() -> None:
    environment = catalogue.load("gymnasium:Taxi-v4", render=True)
    played = play(environment, "7", ["south", "fly"])
    assert played.said[0].startswith("taxi at row 3, column 0; passenger Yellow; to Green\n+---")
    assert "|[Y]| : |B: |" in played.said[1]
    assert "\x1b" not in played.said[1]
    assert played.said[2].startswith("'fly' cannot be done now; these can: south, north, east")
    assert environment.rules().endswith("one of: south, north, east, west, pickup, dropoff.")


def test_a_random_map_belongs_to_its_task() -> None:
    make = {"desc": "random", "is_slippery": False}
    environment = catalogue.load("gymnasium:FrozenLake-v1", make=make, render=True)
    maps = [play(environment, str(task), []).said[0] for task in (0, 0, 1, 2, 3)]
    assert maps[0] == maps[1]
    assert len(set(maps)) > 2


def test_numbers_have_a_text_form_where_they_are_few() -> None:
    played = play(catalogue.load("gymnasium:MountainCarContinuous-v0"), "1", ["0.5", "2", "fast"])
    assert len(played.said[0].split()) == 2
    assert played.is_valid == [True, False, False]
    assert played.said[2].startswith("'2' is no action of Box(-1.0, 1.0, (1,)")
    cart = catalogue.load("gymnasium:CartPole-v1", actions=["left", "right"])
    assert play(cart, "1", ["right"]).rewards == own_loop("CartPole-v1", 1, [1])


def test_spaces_are_put_into_words_and_actions_are_read() -> None:
    both = spaces.Dict(
        {"at": spaces.Box(-1, 1, (2, 2)), "hand": spaces.Tuple([spaces.Text(9)] * 2)}
    )
    said = writer("own", both)({"at": [[0.5, 0], [1, -0.123456]], "hand": ("ace", "two")})
    assert said == "at: 0.5 0\n1 -0.1235\nhand: ace, two"
    _, read = reader("own", spaces.MultiDiscrete([3, 2]), ())
    assert list(read("2, 1")) == [2, 1]
    assert [read(each) for each in ("3 1", "1", "1.5 1", "two one", "")] == [None] * 5
    assert reader("own", spaces.Text(3, charset="ab"), ())[1]("abba") is None
    _, read = reader("own", spaces.Box(-float("inf"), float("inf"), (1,)), ())
    assert read("3e38") == [numpy.float32(3e38)]
    assert [read(each) for each in ("inf", "-inf", "nan", "1e39", "1e999")] == [None] * 5
    assert reader("own", spaces.Discrete(2, start=5), ())[0] == ("5", "6")


@pytest.mark.parametrize(
    "space", [spaces.Box(0, 255, (84, 84, 3)), spaces.Sequence(spaces.Text(2))]
)
def test_what_has_no_text_form_is_refused(space: Any) -> None:
    with pytest.raises(ConfigError, match=r"'own': its observations, .* have no text form: num"):
        writer("own", space)
    with pytest.raises(ConfigError, match=r"'own': its actions, .* have no text form: a choice"):
        reader("own", space, ())


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("Nope-v0", {}, "'gymnasium:Nope-v0': .*NameNotFound: Environment `Nope` doesn't exist"),
        ("CartPole-v1", {"render": True}, "cannot be drawn as text; set `render = false`"),
        ("Taxi-v4", {"render": "False"}, "gymnasium:Taxi-v4: `render` must be true or false"),
        ("Taxi-v4", {"actions": ["go"]}, "`actions` must be 6 words, got 1"),
        ("Taxi-v4", {"actions": 6}, "`actions` must be a list of texts, got 6"),
        ("Taxi-v4", {"actions": list("aabcde")}, "`actions` must be different words, got"),
        ("Taxi-v4", {"turn": 3}, r"unknown option `turn` \(did you mean `turns`\?\)"),
        ("Taxi-v4", {"turns": 0}, "`turns` must be a whole number from 1"),
        ("Pendulum-v1", {"actions": ["go"]}, "`actions` are words for a Discrete space, not Box"),
        ("", {}, "'gymnasium:': add a name after the colon, such as gymnasium:Taxi-v4"),
    ],
)
def test_a_mistake_is_one_sentence(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        catalogue.load(f"gymnasium:{name}", **options)


def test_a_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(ConfigError, match=r"pip install 'mage_async\[gymnasium\]'"):
        catalogue.load("gymnasium:Taxi-v4")


def test_the_environment_whose_spaces_are_read_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    kind = type(gymnasium.make("Taxi-v4").unwrapped)
    monkeypatch.setattr(kind, "close", lambda env: closed.append(env.spec.id))
    catalogue.load("gymnasium:Taxi-v4")
    assert closed == ["Taxi-v4"]
    with pytest.raises(ConfigError, match="`actions` must be 6 words"):
        catalogue.load("gymnasium:Taxi-v4", actions=["go"])
    assert closed == ["Taxi-v4"] * 2


def test_what_cannot_be_repeated_is_refused_before_anything_starts() -> None:
    assert rehearsed("gymnasium:Taxi-v4")[1].startswith("rehearsal: 4 × reset took")
    name = "gymnasium:tests.environments.loaders.unseeded_gymnasium:Unseeded-v0"
    with pytest.raises(ConfigError, match="task 0 was restarted with the same seed, and reset"):
        rehearsed(name)
    rehearsed(name, "trial.repeats=fresh")


def test_advice_is_about_what_a_librarys_environment_has() -> None:
    said = rehearsed("gymnasium:Taxi-v4", "engine.max_tokens=2000")
    assert said[-1].endswith("raise engine.max_tokens, or lower environment.options.turns")
    tiny = config_file.load(config_file.find(None), ["environment.name=gymnasium:Taxi-v4"])
    told = r'of which policy\.kind = "tiny" is built: set policy\.source to a pretrained model$'
    with pytest.raises(ConfigError, match=told):
        check_keys(tiny)
