"""A class with `reset` and `step`: the documentation's plays, and mistakes are one sentence."""

import asyncio
import os
import random
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mage_async.assembly import check, environment_of, with_warm_start
from mage_async.config import config_file
from mage_async.config.schema import Config, FromScript, FromWinStay
from mage_async.environments.catalogue import load
from mage_async.environments.environment import Outcome
from mage_async.environments.user_calls import make_pending_calls
from mage_async.environments.user_class import ResetStep
from mage_async.errors import CallFault, ConfigError
from mage_async.trajectory import Task
from mage_services.actor import rehearsal_runner, rollout
from mage_services.actor.rehearsal_runner import rehearse
from mage_services.processes.process import in_time, unless_a_call_hangs

ROOT = Path(__file__).parents[2]
PRETRAINED = ("policy.kind=pretrained", "policy.source=none")


def block(page: str) -> str:
    """The first example of a page."""
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)[0]


Write = Callable[[str], Config]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Config]:
    """Write a module of the user's, and give the configuration that plays a class of it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    # Otherwise a module that is written again within a second, with as many bytes, would have the
    # bytecode of before.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def written(source: str, *assignments: str, name: str = "Own") -> Config:
        monkeypatch.delitem(sys.modules, "own", raising=False)
        (tmp_path / "own.py").write_text(source)
        given = [f"environment.name=own:{name}", *(assignments or PRETRAINED)]
        return config_file.load(config_file.find(None), given)

    return written


def rehearsed(config: Config) -> list[str]:
    """What is said before a run of this configuration starts."""
    check(config)
    said: list[str] = []
    environment = environment_of(config)
    assert isinstance(environment, ResetStep)
    asyncio.run(rehearse(config, config.environment.name, environment, said.append))
    return said


def played(environment: ResetStep, *actions: str, member: str = "0") -> list[Outcome]:
    """The beginning of an episode, then each action."""
    play = environment.begin(Task("own", member, 5), 0)
    make_pending_calls(play)
    found = [Outcome(play.observation, 0.0)]
    for action in actions:
        answered = play.act(action)
        found.append(make_pending_calls(play) or answered)
    return found


@pytest.mark.parametrize("page", ["README.md", "docs/your_environment.md"])
def test_the_first_example_of_a_page_is_an_environment_of_two_methods(
    write: Callable[..., Config], page: str
) -> None:
    source = block(page)
    config = write(source, name="GuessNumber")
    lines = [line for line in source.splitlines() if line.strip()]
    assert len(lines) <= 25
    assert sum(line.lstrip().startswith("def ") for line in lines) == 2
    times, room = rehearsed(config)[1:]
    assert re.match(r"rehearsal: 6 × reset took .* s each, at most .* s; \d+ × step took", times)
    assert "needs about" in room
    environment = environment_of(config)
    assert environment.facts.example == "1"
    begun, near, refused, found = played(environment, "6", "nonsense", "7")
    assert (begun.observation, refused.is_valid) == ("guess", False)
    assert (near.observation, near.reward, near.is_done) == ("higher", 0.0, False)
    assert (found.reward, found.is_done) == (1.0, True)


WHOLE = '''
class Own:
    """Say yes or no; one of them pays."""

    words = ("yes", "no", "hm", "paid", "unpaid")
    max_turns, min_return, max_return, units = 2, 0.0, 2.0, 2

    def members(self, split):
        return ("yes", "no") if split == "train" else ("YES", "NO")

    def family(self, task):
        return task.lower()

    def script(self, source):
        return lambda observation: source.choice(("yes", "no"))

    def references(self, split, num_episodes):
        return {"random": (0.5,) * num_episodes}

    def is_probe(self, action):
        return action == "hm"

    @property
    def legal_actions(self):
        return ("yes", "no")

    def reset(self, seed, task, episode):
        self.task, self.episode = task.lower(), episode
        return "hm", {}

    def step(self, action):
        pays = action == self.task
        return ("paid" if pays else "unpaid"), int(pays), False, False, {"is_valid": True}
'''


def test_a_script_can_see_the_observation_that_ended_an_episode(
    write: Callable[..., Config],
) -> None:
    own = "lambda observation, ended: 'no' if ended == 'paid' else 'yes'"
    source = WHOLE.replace('lambda observation: source.choice(("yes", "no"))', own)
    environment = environment_of(write(source))
    script, chosen = environment.script(random.Random(0)), list[str]()
    for episode in range(2):
        play = environment.begin(Task("own", "yes", 5), episode)
        make_pending_calls(play)
        while not play.is_done:
            chosen.append(script.choose(play))
            play.act(chosen[-1])
            make_pending_calls(play)
    assert chosen == ["yes", "yes", "no", "yes"]


def test_what_a_class_declares_switches_on_what_the_page_says(
    write: Callable[..., Config],
) -> None:
    config = write(WHOLE, "policy.kind=tiny")
    rehearsed(config)
    environment = environment_of(config)
    assert environment.facts.words == ("yes", "no", "hm", "paid", "unpaid", "invalid")
    assert environment.facts.bounds() == (0.0, 2.0)
    assert environment.members("heldout") == ("YES", "NO")
    assert environment.swaps("YES", "heldout") == ("NO",)
    assert environment.family("YES") == "yes"
    assert environment.references("train", 3) == {"random": (0.5, 0.5, 0.5)}
    assert [environment.is_probe(action) for action in ("hm", "yes")] == [True, False]
    assert environment.rules() == "Say yes or no; one of them pays."
    _, refused, last = played(environment, "perhaps", "no", member="no")
    assert refused == Outcome("invalid", 0.0, is_valid=False)
    assert last == Outcome("paid", 1.0, is_done=True)


def method(self: object) -> int:
    return 5


@pytest.mark.parametrize(
    ("part", "value", "sentence"),
    [
        ("max_turns", "five", "`max_turns` must be a whole number from 1, got 'five'"),
        ("max_turns", True, "`max_turns` must be a whole number from 1, got True"),
        ("units", 0, "`units` must be a whole number from 1, got 0"),
        ("units", None, "`units` must be a whole number from 1, got None"),
        ("min_return", "0", "`min_return` must be a number or None, got '0'"),
        ("max_return", method, "`max_return` must be a number or None, got a method"),
        ("wins_above", None, "`wins_above` must be a number, got None"),
        ("loses_below", [0], "`loses_below` must be a number, got [0]"),
        ("win_reward", True, "`win_reward` must be a number or None, got True"),
        ("max_turns", method, "got a method: the class itself is read, so write `max_turns = ...`"),
        ("max_turns", property(method), "`max_turns` must be a whole number from 1, got a method"),
        ("words", method, "`words` must be a tuple of words, got a method"),
    ],
)
def test_a_part_of_another_type_is_refused_when_the_class_is_read(
    part: str, value: object, sentence: str
) -> None:
    class Own:
        def reset(self, seed: int, task: int) -> str:
            return ""

        def step(self, action: str) -> tuple[str, float, bool]:
            return "", 0.0, True

    setattr(Own, part, value)
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        ResetStep(Own, {})


@pytest.mark.parametrize(
    ("removed", "sentence"),
    [
        ("words", 'has no `words`, of which policy.kind = "tiny" is built'),
        ("script", "has no `script` to warm-start on"),
    ],
)
def test_a_tiny_model_needs_words_and_a_warm_start_by_a_script_needs_one(
    write: Callable[..., Config], removed: str, sentence: str
) -> None:
    config = write(WHOLE + f"\n    del {removed}\n", "policy.kind=tiny", "warm_start=script")
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        check(config)


def test_the_tiny_model_begins_with_a_script_or_else_with_what_paid(
    write: Callable[..., Config],
) -> None:
    with_script = with_warm_start(write(WHOLE, "policy.kind=tiny"))
    # With the schema's 150 steps at a rate of 0.002 the clone of a script had learned nothing.
    assert with_script.warm_start == FromScript(steps=200, learning_rate=0.004)
    without = write(WHOLE + "\n    del script\n", "policy.kind=tiny")
    check(without)
    assert with_warm_start(without).warm_start == FromWinStay()


def test_the_values_of_an_automatic_warm_start_are_used_without_a_script_too(
    write: Callable[..., Config],
) -> None:
    same = {"steps": 50, "trials": 20, "batch_size": 8, "learning_rate": 0.1, "episodes": 2}
    gated = {"gate": 0.7, "max_steps": 90}
    given = [f"warm_start.{key}={each}" for key, each in (same | gated).items()]
    keys = ("policy.kind=tiny", *given)
    without = write(WHOLE + "\n    del script\n", *keys)
    assert with_warm_start(without).warm_start == FromWinStay(**same)
    assert with_warm_start(write(WHOLE, *keys)).warm_start == FromScript(**same, **gated)


def test_a_program_has_no_warm_start(write: Callable[..., Config]) -> None:
    program = "def run(task, base_url, api_key):\n    return 0.0\n"
    config = write(program, "environment.name=agent:own:run", "policy.kind=tiny")
    assert with_warm_start(config).warm_start is None


def own(inside: str) -> str:
    """A class with a mistake in it."""
    return f'''
import asyncio, json, math, random, sys, time

class Own:
    """Rules."""

    def reset(self, seed, task):
        return "begin"

    def step(self, action):
        return "on", 0.0, False

{inside}
'''


STEP = "    def step(self, action):\n        return "
RESET = "    def reset(self, seed, task):\n        return "
LEGAL = "    def legal_actions(self):\n        return "
SHARED_SOURCE = (
    "    def reset(self, seed, task): random.seed(task); return 'go'\n"
    + STEP
    + "str(random.random()), 0, False"
)


@pytest.mark.parametrize(
    ("inside", "sentence"),
    [
        (STEP + "1 / 0", ": step('1 2 3') raised ZeroDivisionError: division by zero (/"),
        (STEP + "1 / 0", "/own.py, line 14, in step: return 1 / 0)"),
        (STEP + "json.loads(action + ',')", "/own.py, line 14, in step: return json.loads(act"),
        (
            LEGAL + "[str(self.__dict__.setdefault('n', []).append(1) or len(self.n))]",
            "turn 1: step('1'): legal_actions listed '1' when the action was requested, and ('2',",
        ),
        ("    legal_pattern = '('", "by a legal_pattern that is a regular expression or None, got"),
        (
            "    legal_pattern = __import__('re').compile('yes|no', 2)",
            "re.IGNORECASE): write its flags into the text, such as (?i)",
        ),
        ("    legal_pattern = b'ab'", "expression or None, got b'ab': give it as a text"),
        ("    legal_pattern = 'a+'", "episode 1: reset(): the legal_pattern 'a+' matches actions"),
        ("    legal_pattern = 'a?'", "reset(): the legal_pattern 'a?' matches an empty action"),
        ("    legal_pattern = '(?=a)ab'", "the legal_pattern '(?=a)ab' cannot be read: "),
        (
            LEGAL + "['b 1']\n\n    legal_pattern = '[ab] 1'",
            "reset() is followed by both legal_actions, such as 'b 1', and the legal_pattern '[ab]",
        ),
        (LEGAL + "()", "episode 1, turn 1: Own.legal_actions lists no action, and the episode is"),
        (
            LEGAL + "'left'",
            ", episode 1: reset() must be followed by legal_actions that are a list",
        ),
        (LEGAL + "7", "list of texts or None, got 7"),
        (LEGAL + "('a', '\\ud800')", r"got '\ud800', which has half of a surrogate pair: no token"),
        ("    words = ('\\ud800',)", r"`words` must be words without half of a surrogate pair"),
        ("    legal_actions = map(str, (1, 2))", "got an iterator, which can be read only once"),
        (LEGAL + "(1, 2)", "list of texts or None, got 1 among them"),
        (
            RESET + "'go ' * 3000",
            "reset returns an observation of 3,000 words, so a prompt has at least 3,004 to",
        ),
        (
            STEP + "'on ' * 3000, 0, True",
            "step returns an observation of 3,000 words, so a prompt has at least",
        ),
        (
            "    def step(self, action):\n        raise ValueError('\\n\\n  first\\nsecond')",
            ": step('1 2 3') raised ValueError: first (/",
        ),
        (
            "    def rules(self):\n        raise ValueError('\\n\\n  first\\nsecond')",
            "own.py, line 14: ValueError: first",
        ),
        (STEP + "sys.exit(3)", ": step('1 2 3') raised SystemExit: 3"),
        (STEP + "5, 0.0, False", " must return text as observation, got a value of type int"),
        (STEP + "'on'", " must return observation, reward, terminated[, truncated, info], got"),
        (STEP + "'on', 0.0", " terminated[, truncated, info], got 2 values"),
        (STEP + "'on', math.nan, False", " must return a finite reward, got nan (/"),
        (STEP + "'on', -math.inf, False", " must return a finite reward, got -inf"),
        (STEP + "'on', 10**400, False", " must return a finite reward, got 1000"),
        (STEP + "'on', '1', False", " must return a finite reward, got '1'"),
        (STEP + "'on', [1], False", " must return a finite reward, got a value of type list"),
        (STEP + "'on', 1e300, False", " returned a reward of 1e+300: scale it to at most 1e+15"),
        (STEP + "'on', 1.0, None", " must return True or False as terminated, got None"),
        (STEP + "'x' * 10_000_000, 0, False", " returned 10,000,000 characters of text: at most"),
        (
            STEP + "'on', 0, False, {}",
            "got the four values of old Gym, of which the last is info: p",
        ),
        (STEP + "'on', 0, False, False, 7", " must return a dictionary as info, got 7"),
        (RESET + "None", ", episode 1: reset() must return text as observation, got a value of"),
        ("    def __init__(self):\n        {}['key']", ": reset() raised KeyError: 'key'"),
        ("    def close(self):\n        raise OSError('gone')", ": close() raised OSError: gone"),
        (
            "    def step(self, action):\n        time.sleep(60)",
            "longer than environment.step_dead",
        ),
        (
            "    async def step(self, action):\n        await asyncio.sleep(60)",
            ", turn 1: step('1 2 3') took longer than environment.step_deadline_s = 1.5",
        ),
        ("    async def step(self, action):\n        raise asyncio.CancelledError", "raised Cance"),
        (
            "    def reset(self, seed):\n        return ''",
            "reset(self, seed) of Own must be def reset(self, seed, task) or def reset(self, seed, "
            "task, episode) (/",
        ),
        (
            "    def reset(self, task, episode):\n        return ''",
            "reset(self, task, episode) of Own must be def reset(self, seed, task) or def reset(",
        ),
        (
            "    def reset(self, task, seed):\n        return ''",
            "reset(self, task, seed) of Own must be def reset(self, seed, task) or def reset(self",
        ),
        (
            "    def reset(self, seed, episode, task):\n        return ''",
            "reset(self, seed, episode, task) of Own must be def reset(self, seed, task) or def re",
        ),
        ("    max_turn = 2", "nothing reads Own.max_turn (did you mean `max_turns`?); begin the"),
        ("    legal_action = ('a',)", "Own.legal_action (did you mean `legal_actions`?)"),
        ("    word = ('begin', 'on')", "nothing reads Own.word (did you mean `words`?)"),
        (
            "    def member(self, split):\n        return (split,)",
            "nothing reads Own.member (did you mean `members`?)",
        ),
        (
            "    def reset(self, seed, task):\n        self.anchors = 'a'\n        return ''",
            "nothing reads Own.anchors (did you mean `anchor`?)",
        ),
        (
            "    def step(self):\n        return '', 0.0, True",
            "step(self) of Own must be def step(self, action)",
        ),
        (
            "    def step():\n        return '', 0.0, True",
            "step() of Own must be def step(self, action)",
        ),
        (
            STEP + "'on, off', 0.0, True\n\n    words = ('begin', 'on', 'off')",
            ") says 'on,' in 'on, off', which is not among its `words`",
        ),
        (
            STEP + "'on not yet yet', 0.0, True\n\n    words = ('begin', 'on', 'off')",
            ") says 'not' in 'on not yet yet', which is not among its `words` (nor is 'yet'): the ",
        ),
        (
            STEP + "'no sign', 0.0, True\n\n    words = ('on', 'off')",
            "reset says 'begin' in 'begin', which is not among its `words` (nor are 'no', 'sign'): "
            "the tiny model reads only these. Add them, with a space",
        ),
        ("    rules = ''", "does not say its rules: write a docstring, or `rules`"),
        ("    words = 'yes no'", "`words` must be a tuple of words, got 'yes no'"),
        (
            "    words = ('a, b',)",
            "`words` must be words without spaces, got 'a, b': list 'a,' and 'b'",
        ),
        ("    max_turns = 0", "`max_turns` must be a whole number from 1, got 0"),
        ("    min_return = 1", "facts.min_return and max_return must be two numbers, the second"),
        ("    min_return = max_return = 0", "max_return must be two numbers, the second above"),
        (
            "    def members(self, split):\n        return [1, 2] if split == 'train' else []",
            "members('heldout') must be at least two names: the control `swapped` hides another",
        ),
        (
            "    members = lambda self, split: {'train': [1, 2], 'test': [3, 4]}[split]",
            "members('heldout'): ",
        ),
        (
            "    def members(self, split):\n        return (f'{split} alone',)",
            "members('train') must be at least two names: the control `swapped` hides another",
        ),
        ("    def members(self, split):\n        return (1, 2)", "'1' cannot be trained on and he"),
        (
            "    members = lambda self, split: ('a', 'b') if split == 'train' else None",
            "members('heldout') must be a list of tasks, got None",
        ),
        ("    members = lambda self, split: 'ab'", "('train') must be a list of tasks, got 'ab'"),
        (
            "    swaps = lambda self, task, split: () if task == 1279 else (task ^ 1,)",
            "swaps('1279', 'heldout') must be a tuple of other members of the split, got ()",
        ),
        (
            "    script = lambda self, source: lambda _: 7\n    legal_actions = ('1', '7')",
            "environment 'own:Own': script(source)('begin') must be text, got 7",
        ),
        (
            "    script = lambda self, source: lambda _: '9'\n    legal_actions = ('1', '7')",
            "('begin') must be an action that can be taken now ('1', '7'), got '9'",
        ),
        (
            "    script = lambda self, source: lambda _: 'a'\n    legal_pattern = '[0-9]'",
            "must be an action that can be taken now ([0-9]), got 'a'",
        ),
        (
            "    script = lambda self, source: lambda _: ' '",
            "must be an action that can be taken now (any text), got ''",
        ),
        (
            "    script = lambda self, source: '1'",
            "script(source) must be a function from the last observation to the next action, or",
        ),
        (
            "    def members(self):\n        return ('a', 'b')",
            "members(self) of Own must be def members(self, split)",
        ),
        (
            "    def swaps(self, split, task):\n        return (1, 2)",
            "swaps(self, split, task) of Own must be def swaps(self, task, split)",
        ),
        ("    def script(self):\n        return str", " of Own must be def script(self, source)"),
        ("    def references(self):\n        return {}", "def references(self, split, num_ep"),
        (
            "    references = lambda self, *_: {}['x']",
            "environment 'own:Own': references('train', 3): /",
        ),
        (
            "    family = lambda self, task: {0: 'a'}[task]",
            "environment 'own:Own': family('1'): /",
        ),
        (
            "    references = lambda self, *_: {'bayes': (None, 0.5, '1')}",
            "references('train', 3)['bayes'] must be 3 numbers, one per episode, got (None, 0.5,",
        ),
        (
            "    references = lambda self, *_: {'random': 0.5}",
            "references('train', 3)['random'] must be 3 numbers, one per episode, got 0.5",
        ),
        (
            "    references = lambda self, *_: None",
            "references('train', 3) must be a dictionary, got None",
        ),
        (
            "    is_probe = lambda self, action: {'a': True}[action]",
            "environment 'own:Own': is_probe(''): /",
        ),
        (
            "    is_probe = lambda self, action: not action or int(action) > 5",
            "is_probe('a'): /",
        ),
        (
            RESET + "str(random.random())",
            "task 0 was restarted with the same seed, and reset gave",
        ),
        (
            STEP + "str(random.random()), 0, False",
            "was restarted with the same seed, and step('1 2 3') gave",
        ),
        (
            SHARED_SOURCE,
            "task 0 was restarted with the same seed while another task was played, and step(",
        ),
    ],
)
def test_a_mistake_is_one_sentence_before_anything_starts(
    write: Callable[..., Config], inside: str, sentence: str
) -> None:
    deadline = ["environment.step_deadline_s=1.5"] if "longer than" in sentence else []
    config = write(own(inside), *PRETRAINED, *deadline)
    with pytest.raises(ConfigError, match=re.escape(sentence)) as caught:
        rehearsed(config)
    assert str(caught.value).startswith(("environment 'own", "own: '1'"))
    assert "\n" not in str(caught.value)


ONE_SESSION = """
    is_open = False

    def reset(self, seed, task):
        if Own.is_open:
            raise CapacityReached("one session")
        Own.is_open = True
        return "go"

    def close(self):
        Own.is_open = False

class CapacityReached(Exception):
    pass
"""


def test_objects_that_disturb_one_another_are_found_with_several_worker_processes(
    write: Callable[..., Config],
) -> None:
    config = write(own(SHARED_SOURCE), *PRETRAINED, "environment.workers=2")
    with pytest.raises(ConfigError, match="while another task was played, and step"):
        rehearsed(config)


def test_a_server_of_one_session_is_rehearsed_where_the_configuration_waits_for_room(
    write: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout, "RETRY_PAUSE_S", 0.0)
    for key in ("most_open=1", "wait_for_room_s=60"):
        assert rehearsed(write(own(ONE_SESSION), *PRETRAINED, f"environment.{key}"))
    with pytest.raises(ConfigError, match=r"one session.*; a run opens .* environment\.most_open"):
        rehearsed(write(own(ONE_SESSION), *PRETRAINED))


def test_a_rehearsal_is_played_again_a_few_times_alone(
    write: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout, "RETRY_PAUSE_S", 0.0)
    # never the same sentence
    step = "        raise RuntimeError(f'no answer at {__import__(\"time\").perf_counter_ns()}')"
    config, said = write(own(f"    def step(self, action):\n{step}"), *PRETRAINED), list[str]()
    with pytest.raises(ConfigError, match=r"'own:Own': after 4 tries: .* raised RuntimeError"):
        asyncio.run(rehearse(config, "own:Own", environment_of(config), said.append))
    assert said[1].endswith("; the trial is played again")


@pytest.mark.parametrize("choice", ["None", "{}[last]"])
def test_an_object_is_closed_if_its_script_fails(
    write: Callable[..., Config], choice: str, tmp_path: Path
) -> None:
    script = f"    script = lambda self, source: lambda last: {choice}"
    close = f"    def close(self):\n        open({str(tmp_path / 'closed')!r}, 'w').close()"
    config = write(own(f"{script}\n{close}"), *PRETRAINED)
    with pytest.raises(ConfigError):
        asyncio.run(rehearse(config, "own:Own", environment_of(config), print))
    assert (tmp_path / "closed").is_file()


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        (
            "import sys\nsys.exit('set MY_KEY')",
            "own.py, line 2 ended the program while 'own' was imported (SystemExit: set MY_KEY): "
            'put that line under `if __name__ == "__main__":`',
        ),
        ("import argparse\nargparse.ArgumentParser().parse_args(['x'])", "own.py, line 2 ended"),
        (own("    def rules(self):\n        sys.exit(5)"), "own.py, line 14: SystemExit: 5"),
    ],
)
def test_a_module_that_ends_the_program_is_named(
    write: Callable[..., Config], source: str, sentence: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        rehearsed(write(source))


def test_a_misspelt_part_of_a_base_class_is_found_in_the_class_that_would_replace_it(
    write: Callable[..., Config],
) -> None:
    text = own("    max_turns = 2\n\nclass Longer(Own):\n    max_turnz = 3")
    with pytest.raises(ConfigError, match=r"Longer\.max_turnz \(did you mean `max_turns`\?\)"):
        rehearsed(write(text, *PRETRAINED, "environment.name=own:Longer"))


def test_a_set_has_the_same_order_in_every_process(write: Callable[..., Config]) -> None:
    train, heldout = "abcdefgh", "ijklmnop"
    sets = (
        f"    legal_actions = {{*{train!r}}}\n"
        "    def members(self, split):\n"
        f"        return {{*{train!r}}} if split == 'train' else {{*{heldout!r}}}\n"
    )
    environment = environment_of(write(own(sets)))
    assert isinstance(environment, ResetStep)
    assert environment.members("train") == tuple(train)
    play = environment.begin(Task("own", "a", 5), 0)
    make_pending_calls(play)
    assert play.legal_actions() == tuple(train)


def test_an_action_that_is_listed_twice_is_legal_once(write: Callable[..., Config]) -> None:
    environment = environment_of(write(own("    legal_actions = ('b', 'a', 'b')\n")))
    play = environment.begin(Task("own", "0", 5), 0)
    make_pending_calls(play)
    assert play.legal_actions() == ("b", "a")


def test_a_part_that_is_none_counts_as_absent_and_numbers_of_numpy_as_numbers(
    write: Callable[..., Config],
) -> None:
    nothing = "references = members = family = swaps = is_probe = script = rules = belief = None"
    environment = environment_of(write(own(f"    {nothing}")))
    assert environment.references("train", 3) == {}
    assert environment.members("heldout")[0] == "1024"
    assert (environment.family("0"), environment.is_probe("a")) == ("task", False)
    known = "    references = lambda self, *_: {'random': __import__('numpy').zeros(3, 'float32')}"
    values = environment_of(write(own(known))).references("train", 3)["random"]
    assert [type(each) for each in values] == [float] * 3


@pytest.mark.parametrize(
    "inside",
    [
        "    word = 'on'\n" + STEP + "self.word, 0.0, False",
        "    def rule(self):\n        return 7\n" + STEP + "str(self.rule()), 0.0, False",
        "    word = 'on'\n    words = ('begin', 'on')",
        "    name = 'own'\n    names = ('one', 'two')\n    world = game = clone = 1\n",
        "    member = 1\n\ndef tasks():\n    return Own.member",
        STEP + "[self.unit for _ in '1'][0], 0.0, False\n    unit = 'on'",
        "    @property\n    def script_of(self):\n        return self.swap\n    swap = 2",
        "    _max_turn = 3",
        "    legal_action = 'a'\n    def reset(self, seed, task):\n"
        "        self.legal_actions = ['a']\n        return ''",
        "    pass\n\nclass Library:\n    units = 2\n\nLibrary.__module__ = 'library'\n\n"
        "class Own(Own, Library):\n    unit = 3",
    ],
)
def test_an_attribute_of_the_class_s_own_is_not_taken_for_a_misspelt_part(
    write: Callable[..., Config], inside: str
) -> None:
    check(write(own(inside)))


def test_the_longest_trial_is_counted_in_the_words_of_the_tiny_model(
    write: Callable[..., Config],
) -> None:
    inside = (
        "    words = ('go', 'begin', 'on')\n    max_turns = 8\n\n"
        + LEGAL
        + "('go', 'go on')\n"
        + STEP
        + "'on on', 0.0, False\n"
    )
    tiny = ("policy.kind=tiny", "warm_start=none", "trial.episodes=3")
    small = (*tiny, "engine.max_tokens=160")
    room = rehearsed(write(own(inside), *small))[-1]
    # "episode 1 begin", then turns: 2 words of an action, 2 of an answer, 2 roles and 2 tags.
    needed = 3 * (3 + 8 * (2 + 2 + 4))
    assert f"needs about {needed} tokens of engine.max_tokens = 160: episodes share" in room
    assert "dropped" not in room
    roomy = rehearsed(write(own(inside), *tiny, f"engine.max_tokens={needed}"))[-1]
    assert roomy.endswith(f"engine.max_tokens = {needed}")


@pytest.mark.parametrize(
    ("memory", "strategy", "num_episodes", "num_remarks"),
    [
        ("none", "turn", 1, 8),
        ("history", "episode", 3, 3),
        ("history", "turn", 3, 24),
        ("history_and_reflection", "episode", 3, 5),
        # The last context begins with two, and none follows its episode.
        ("reflection", "none", 1, 2),
    ],
)
def test_the_longest_trial_has_room_for_strategies_and_reflections(
    write: Callable[..., Config], memory: str, strategy: str, num_episodes: int, num_remarks: int
) -> None:
    inside = f"    max_turns = 8\n\n{LEGAL}('go', 'go on')\n{STEP}'on', 0.0, False\n"
    keys = [*PRETRAINED, "transcript.max_reflection_tokens=100"]

    def needed(*more: str) -> int:
        room = rehearsed(write(own(inside), *keys, *more))[-1]
        return int(re.findall(r"needs about ([\d,]+)", room)[0].replace(",", ""))

    memories = {1: "none", 3: "history"}
    without = needed(f"trial.memory={memories[num_episodes]}")
    found = needed(f"trial.memory={memory}", f"trial.strategy={strategy}")
    assert found - without == num_remarks * (100 + rehearsal_runner.TEMPLATE_TOKENS)


def test_a_subclass_without_a_docstring_has_the_rules_of_its_base(
    write: Callable[..., Config],
) -> None:
    config = write(own("") + "\n\nclass Harder(Own):\n    max_turns = 2\n", name="Harder")
    assert environment_of(config).rules() == "Rules."


def test_what_begins_afresh_is_played_where_the_configuration_says_so(
    write: Callable[..., Config],
) -> None:
    fresh = own(RESET + "str(random.random())")
    rehearsed(write(fresh, *PRETRAINED, "trial.repeats=fresh"))


def test_tasks_and_seeds_of_train_and_held_out_are_disjoint(
    write: Callable[..., Config],
) -> None:
    environment = environment_of(write(own(RESET + "f'{seed} {task + 1}'")))
    assert not set(environment.members("train")) & set(environment.members("heldout"))
    (train,), (heldout,) = (played(environment, member=each) for each in ("7", "1024"))
    seeds = [int(each.observation.split()[0]) for each in (train, heldout)]
    assert [seed % 2 for seed in seeds] == [0, 1]
    assert train.observation.split()[1] == "8"


@pytest.mark.parametrize(
    ("listed", "sentence"),
    [
        ("[3, '3', 4]", r"members\('train'\) lists 3 and '3', which have the same text"),
        (
            "[object(), 4]",
            r"members\('train'\) lists <object object at 0x.*>, whose text has its address in",
        ),
        ("[[max], [print.__call__]]", r"lists \[<method-wrapper .*, whose text has its address in"),
    ],
)
def test_two_tasks_with_one_text_or_a_task_without_text_are_refused(
    write: Callable[..., Config], listed: str, sentence: str
) -> None:
    tasks = f"    def members(self, split):\n        return {listed} if split == 'train' else [5]\n"
    with pytest.raises(ConfigError, match=sentence):
        check(write(own(tasks)))


@pytest.mark.parametrize(
    ("task", "has"), [("", "0"), ("x" * 201, "201"), ("\ud83d", r"half of a surrogate pair")]
)
def test_a_task_whose_name_fits_into_no_message_is_refused(
    write: Callable[..., Config], task: str, has: str
) -> None:
    tasks = f"['a', {task!r}] if split == 'train' else [5, 6]"
    own_tasks = f"    def members(self, split):\n        return {tasks}\n"
    with pytest.raises(ConfigError, match=f"1 to 200 characters of Unicode, .* has {has}: "):
        check(write(own(own_tasks)))


def test_a_task_that_is_trained_on_is_not_held_out_too(write: Callable[..., Config]) -> None:
    # a number and its text have one name
    own_tasks = (
        "    def members(self, split):\n        return [3, 4] if split == 'train' else ['4', '5']\n"
    )
    with pytest.raises(ConfigError, match="own: '4' cannot be trained on and held out"):
        check(write(own(own_tasks)))


def test_an_answer_that_holds_no_action_uses_up_a_turn_and_reaches_no_step(
    write: Callable[..., Config],
) -> None:
    environment = environment_of(write(own("    max_turns = 2\n" + STEP + "1 / 0")))
    _, first, last = played(environment, "", "")
    assert first.observation.startswith("No action was found")
    assert [each.is_valid for each in (first, last)] == [False, False]
    assert [each.is_done for each in (first, last)] == [False, True]


def test_an_empty_list_of_actions_is_a_fault_before_the_last_turn_alone(
    write: Callable[..., Config],
) -> None:
    emptied = (
        "    max_turns = 3\n    num_left = 2\n\n" + LEGAL + "('go', 'on', 'by')[:self.num_left]\n"
    )
    step = STEP.replace("return", "self.num_left -= 1; return") + "'on', 0.0, False\n"
    environment = environment_of(write(own(emptied + step)))
    with pytest.raises(CallFault, match=r"own, .* episode 1, turn 3: Own.legal_actions lists no"):
        played(environment, "go", "go", "go")
    longer = own(emptied.replace("num_left = 2", "num_left = 3") + step)
    assert played(environment_of(write(longer)), "go", "go", "go")[-1].is_done


@pytest.mark.parametrize(
    ("action", "fault"),
    [
        *((each, f"the legal action {each!r} cannot be written") for each in ("<think>", " go")),
        ("a</action>b", "the legal action 'a</action>b' cannot be written"),
        ("on up", "legal_actions says 'up' in 'on up', which is not among its `words`"),
    ],
)
def test_an_action_that_the_tiny_model_cannot_write_is_refused_by_name(
    write: Callable[..., Config], action: str, fault: str
) -> None:
    config = write(
        own(LEGAL + f"('go', {action!r})\n\n    words = ('go', 'begin', 'on')\n"),
        "policy.kind=tiny",
        "warm_start=none",
    )
    with pytest.raises(ConfigError, match=f"environment 'own:Own': .*{fault}"):
        rehearsed(config)


def test_numbers_are_words_and_actions_of_the_tiny_model(write: Callable[..., Config]) -> None:
    numbers = tuple(map(str, range(20)))
    inside = f"    words = (*{numbers}, 'begin', 'on')\n\n" + LEGAL + f"{numbers}\n"
    rehearsed(write(own(inside), "policy.kind=tiny", "warm_start=none"))


def test_a_coroutine_that_does_not_wait_can_be_played_without_an_event_loop(
    write: Callable[..., Config],
) -> None:
    quick = own("    async def step(self, action):\n        return 'quick', 1.0, True")
    assert played(environment_of(write(quick)), "a")[1] == Outcome("quick", 1.0, is_done=True)
    slow = own("    async def step(self, action):\n        await asyncio.sleep(1)")
    with pytest.raises(CallFault, match="waits, which only actors and evaluators can do"):
        played(environment_of(write(slow)), "a")


def test_coroutines_of_a_class_are_played_on_one_event_loop_before_a_run_and_in_it(
    write: Callable[..., Config],
) -> None:
    step = (
        "        await asyncio.sleep(0.01)\n        self.loops.add(asyncio.get_running_loop())\n"
        "        return 'waited', 1.0, True"
    )
    config = write(own(f"    loops = set()\n\n    async def step(self, action):\n{step}"))
    environment = environment_of(config)
    assert isinstance(environment, ResetStep)
    rehearsed(config)
    outcome = unless_a_call_hangs(lambda: played(environment, "a")[1], 30.0, pytest.fail)
    assert outcome == Outcome("waited", 1.0, is_done=True)
    ((trial, _),) = in_time((played(environment, "a") for _ in range(1)), 30.0)
    assert trial[1] == outcome
    assert len(environment.kind.loops) == 1


@pytest.mark.parametrize("raised", ["asyncio.CancelledError", "KeyboardInterrupt"])
def test_a_coroutine_that_raises_no_exception_of_the_usual_kind_is_a_fault_before_a_run_too(
    write: Callable[..., Config], raised: str
) -> None:
    step = f"    async def step(self, action):\n        raise {raised}"
    environment = environment_of(write(own(step)))
    with pytest.raises(CallFault, match=rf"step\('a'\) raised {raised.rpartition('.')[2]}"):
        unless_a_call_hangs(lambda: played(environment, "a"), 30.0, pytest.fail)
    with pytest.raises(CallFault, match="raised"):
        next(in_time((played(environment, "a") for _ in range(1)), 30.0))


def test_a_forked_process_plays_coroutines_on_an_event_loop_of_its_own(
    write: Callable[..., Config],
) -> None:
    step = "        await asyncio.sleep(0)\n        return 'on', 1.0, True"
    environment = environment_of(write(own(f"    async def step(self, action):\n{step}")))

    def play() -> Outcome:
        return unless_a_call_hangs(lambda: played(environment, "a")[1], 30.0, pytest.fail)

    outcome = play()
    if (child := os.fork()) == 0:
        signal.alarm(30)  # ends a child that waits for the loop of its parent
        os._exit(0 if play() == outcome else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_class_has_wins_where_it_says_which_episodes_are_won(
    write: Callable[..., Config],
) -> None:
    assert not environment_of(write(own(""))).facts.has_wins
    assert environment_of(write(own("    wins_above = 0.0\n"))).facts.has_wins


def test_a_class_with_neither_protocol_is_told_both(
    write: Callable[..., Config],
) -> None:
    write("class Own:\n    def play(self): ...\n")
    with pytest.raises(ConfigError, match=r"or write `reset\(seed, task\)` and `step\(action\)`"):
        load("own:Own")


@pytest.mark.parametrize(("has", "lacks"), [("reset", "step"), ("step", "reset")])
def test_a_class_with_one_of_two_methods_is_told_the_other_one(
    write: Callable[..., Config], has: str, lacks: str
) -> None:
    write(f"class Own:\n    def {has}(self): ...\n    def {lacks}s(self): ...\n")
    tools = ", or mark its tools with `@tool`" if lacks == "step" else ""
    told = (
        rf"has `{has}` but no `{lacks}` \(did you mean `{lacks}s`\?\): write .*"
        rf"step\(action\)`{tools} \(.*/own.py, line 1\)"
    )
    with pytest.raises(ConfigError, match=told):
        load("own:Own")


LATE = """
class Own:
    \"\"\"Rules.\"\"\"

    closed = []

    def reset(self, seed, task):
        return "begun"

    def step(self, action):
        return "on", 0.0, False

    def close(self):
        self.closed.append(self)
"""


def test_an_object_that_was_closed_before_reset_returned_is_closed_once(
    write: Callable[..., Config],
) -> None:
    environment = environment_of(write(LATE))
    assert isinstance(environment, ResetStep)
    play = environment.begin(Task("own", "0", 5), 0)
    reset = play.next_call()
    closing = play.closing()
    assert reset is not None
    assert closing is not None
    closing.now()
    assert environment.kind.closed == []
    reset.now()
    assert len(environment.kind.closed) == 1
    assert play.closing() is None


def test_worker_processes_for_what_is_no_small_class_are_refused() -> None:
    config = config_file.load(config_file.find(None), ["environment.workers=2"])
    with pytest.raises(ConfigError, match=r"environment\.workers plays classes with `reset` and"):
        check(config)


DRAGGING = """
import time

class Own:
    \"\"\"Rules.\"\"\"

    def reset(self, seed, task):
        return "begun"

    def step(self, action):
        time.sleep(0.03)
        return "on", 0.0, False
"""


def test_a_rehearsal_that_takes_long_says_how_far_it_is(
    write: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rehearsal_runner, "QUIET_S", 0.1)
    said = rehearsed(write(DRAGGING))
    assert said[0] == "rehearsal: playing own:Own twice with the same seeds"
    news = [line for line in said if "calls made" in line]
    assert len(news) > 3
    assert re.match(r"rehearsal: \d+ calls made; (step|reset) has taken \d+ s so far", news[0])


def test_a_reward_may_be_a_truth_of_numpy_and_an_anchor_half_a_character(
    write: Callable[..., Config],
) -> None:
    numpy = "    max_turns = 2\n" + STEP + "'on', *map(__import__('numpy').bool_, (True, False))"
    environment = environment_of(write(own(numpy + "\n    anchor = '\\udcff' * 2")))
    assert [each.reward for each in played(environment, "a", "b")[1:]] == [1.0, 1.0]
    assert isinstance(environment, ResetStep)
    play = environment.begin(Task("own", "0", 5), 0)
    make_pending_calls(play)
    assert play.anchor == "??"  # as halves of characters are written in all messages
