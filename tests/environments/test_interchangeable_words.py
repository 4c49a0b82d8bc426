"""Words of a class that are exchanged in training: the agent reads others, the class its own."""

import random
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mage_async.environments.agent import AgentProgram, AgentTasks
from mage_async.environments.interchangeable_words import Exchange, fault_of
from mage_async.environments.rehearsal import rehearsal
from mage_async.environments.user_calls import make_pending_calls
from mage_async.environments.user_class import ResetStep
from mage_async.errors import CallFault, ConfigError
from mage_async.trajectory import Task

CUPS, COLOURS = ("one", "two", "three"), ("red", "green")


class Cups:
    """A ball lies under one of three cups."""

    legal_actions = CUPS
    words = (*CUPS, *COLOURS, "ball", "found", "wrong")
    interchangeable = [CUPS, COLOURS]  # noqa: RUF012 - as a user writes it
    max_turns = 2

    def members(self, split):
        return CUPS[:2] if split == "train" else CUPS[2:]

    def script(self, source):
        """Take a cup of whose name the observation reminds, in the words of the class."""
        return lambda observation, ended: CUPS[COLOURS.index(observation.split()[0])]

    def belief(self, split):
        return lambda histories: {repr(histories): 1.0}

    def reset(self, seed, task, episode):
        self.paying = task
        return "red ball"

    def step(self, action):
        assert action in CUPS
        return (
            f"green {'found' if action == self.paying else 'wrong'}",
            action == self.paying,
            False,
        )


def begun(environment: ResetStep, seed: int, member: str = "one", episode: int = 0):
    play = environment.begin(Task("cups", member, seed), episode)
    make_pending_calls(play)
    return play


def test_the_agent_reads_exchanged_words_and_the_class_its_own() -> None:
    environment = ResetStep(Cups, {})
    paying, colours = set[str](), set[str]()
    for seed in range(20):
        paid = set[str]()
        for episode, cup in enumerate(CUPS):
            play = begun(environment, seed, episode=episode)
            assert play.legal_actions() == CUPS, "their order does not tell the class's words"
            first = play.observation.split()
            play.act(cup)
            outcome = make_pending_calls(play)
            assert outcome is not None
            second = outcome.observation.split()
            assert {first[0], second[0]} == {*COLOURS}
            assert (first[1], second[1]) == ("ball", "found" if outcome.reward else "wrong")
            colours.add(first[0])
            paid |= {cup} if outcome.reward else set()
        # The same cup pays in all episodes of a trial, and in all trials of its group.
        assert len(paid) == 1
        paying |= paid
    # Of a task that hides the first cup, any name can be the hidden one.
    assert (paying, colours) == ({*CUPS}, {*COLOURS})


def test_held_out_tasks_keep_their_words() -> None:
    environment = ResetStep(Cups, {})
    for seed in range(20):
        play = begun(environment, seed, "three")
        play.act("three")
        outcome = make_pending_calls(play)
        assert outcome is not None
        assert (play.observation, outcome.observation) == ("red ball", "green found")
        assert (outcome.reward, play.legal_actions()) == (1.0, CUPS)


def test_scripts_and_filters_read_and_write_the_words_of_the_class() -> None:
    environment = ResetStep(Cups, {})
    belief = environment.belief("train")
    assert belief is not None
    for seed in range(20):
        play, script = begun(environment, seed), environment.script(random.Random(0))
        assert script is not None
        for cup, said in (("one", "green found"), ("two", "green wrong")):
            play.act(script.choose(play))
            make_pending_calls(play)
            assert play.own_history()[-1] == (cup, said)
        assert belief([play]) == {repr([[("one", "green found"), ("two", "green wrong")]]): 1.0}


def test_errors_name_the_words_of_the_class() -> None:
    class Broken(Cups):
        """Cups of which one breaks."""

        def step(self, action):
            if action == "two":
                raise KeyError(action)
            return super().step(action)

    environment = ResetStep(Broken, {})
    for seed in range(9):
        play = begun(environment, seed)
        assert play.exchange is not None
        play.act(play.exchange.to_shown("two"))
        with pytest.raises(CallFault, match=r"turn 1: step\('two'\) raised KeyError: 'two'"):
            make_pending_calls(play)


def test_a_script_that_chooses_no_legal_action_is_refused_in_the_words_of_the_class() -> None:
    class Silent(Cups):
        """Cups of a script without an answer."""

        def script(self, source):
            return lambda observation, ended: None

    class Wrong(Cups):
        """Cups of a script that takes a colour."""

        def script(self, source):
            return lambda observation, ended: "green" if observation == "red ball" else "two"

    def checked(kind: type) -> None:
        environment = ResetStep(kind, {})
        checks = rehearsal("cups", environment, compares=True, takes_turns=False, now=lambda: 0.0)
        call = next(checks)
        while True:
            call = checks.send(call.now())

    with pytest.raises(ConfigError, match=r"script\(source\)\('red ball'\) must be text, got None"):
        checked(Silent)
    with pytest.raises(ConfigError, match=r"\('red ball'\) must be an action .*, got 'green'"):
        checked(Wrong)


def test_an_action_that_is_listed_in_exchanged_words_alone_comes_after_the_others() -> None:
    class Half(Cups):
        """Cups of which two can be opened."""

        legal_actions = ("two", "one")

    environment, listed = ResetStep(Half, {}), set[tuple[str, ...]]()
    for seed in range(30):
        listed.add(tuple(begun(environment, seed).legal_actions()))
    assert listed == {("two", "one"), ("two", "three"), ("one", "three")}


@given(st.integers(0, 2**31), st.text(alphabet="abcd -.1é", max_size=40))
def test_an_exchange_is_undone_by_the_other_direction(seed: int, text: str) -> None:
    sets = (("a", "b", "c-d"), ("é", "1"))
    assert not fault_of(sets, ())
    exchange = Exchange(sets, seed)
    assert exchange.to_own(exchange.to_shown(text)) == text
    assert exchange.to_shown(exchange.to_own(text)) == text


def test_only_whole_words_are_exchanged() -> None:
    texts = {
        Exchange((("red", "tan"),), seed).to_shown("red, redo (tan) é-red") for seed in range(9)
    }
    assert texts == {"red, redo (tan) é-red", "tan, redo (red) é-tan"}


@pytest.mark.parametrize(
    ("declared", "sentence"),
    [
        ("one", r"must be a list of sets of words, as in \[\(.*, got 'one'"),
        (CUPS, "got the set 'one'"),
        ([("one",)], "got the set"),
        ([("one", "two three")], "'two three' is not one word"),
        ([("one", 2)], "2 is not one word"),
        ([("one", "two"), ("two", "three")], "list each word once, got 'two' twice"),
        ([("one", "four")], "must list words of `words`, got 'four', which is not among them"),
    ],
)
def test_words_that_cannot_be_exchanged_are_refused(declared: object, sentence: str) -> None:
    kind = type("Wrong", (Cups,), {"interchangeable": declared, "__doc__": "Cups."})
    with pytest.raises(ConfigError, match=r"`interchangeable` .*" + sentence):
        ResetStep(kind, {})


def test_a_method_and_words_of_a_program_are_refused() -> None:
    kind = type("Wrong", (Cups,), {"interchangeable": lambda self: [CUPS], "__doc__": "Cups."})
    with pytest.raises(ConfigError, match="a method: the class itself is read, so write `interch"):
        ResetStep(kind, {})

    class Program(AgentProgram):
        interchangeable = (CUPS,)

        async def run(self, task, episode, seed, base_url, api_key):
            return 0.0

    with pytest.raises(ConfigError, match=r"a program has no `step`: leave them out, .*, line"):
        AgentTasks(Program, {})


def test_a_word_of_a_word_is_refused() -> None:
    sets = [("red", "blue"), ("red-hot", "cold")]
    assert fault_of(sets, ()) == "must not list 'red' beside 'red-hot', in which it is a word too"
    assert not fault_of([("red", "blue"), ("reddish", "pale-blueish")], ())


def test_words_of_a_pattern_are_not_exchanged() -> None:
    kind = type("Patterned", (Cups,), {"legal_pattern": "one|two", "__doc__": "Cups."})
    with pytest.raises(ConfigError, match=re.escape("cannot be exchanged in a `legal_pattern`")):
        ResetStep(kind, {})
    without = type("Without", (Cups,), {"interchangeable": None, "__doc__": "Cups."})
    assert begun(ResetStep(without, {}), 1).observation == "red ball"


def test_the_declaration_of_the_page_is_one_that_a_class_may_have() -> None:
    page = Path(__file__).parents[2] / "docs" / "your_environment.md"
    (block,) = re.findall(r"```python\n(interchangeable = .*?)```", page.read_text(), re.DOTALL)
    declared: dict[str, Any] = {}
    exec(block, declared)
    words = [word for each in declared["interchangeable"] for word in each]
    assert not fault_of(declared["interchangeable"], words)
    shown = Exchange(tuple(map(tuple, declared["interchangeable"])), 1).to_shown(" ".join(words))
    assert sorted(shown.split()) == sorted(words)
