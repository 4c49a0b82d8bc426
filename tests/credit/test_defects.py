"""What goes wrong in the code of MAGE and LaMer, and does not here: a test a defect.

The numbers are those of the list of defects this project was designed against. Those of credit and
advantage stand in `test_credit_objectives.py` (13), and in `test_advantages.py` and
`test_estimators.py` of `tests/learning` (10, 11, 14); 24, baselines trained as something else, in
`tests/config/test_methods.py`; 5, a prompt that is too long, in `tests/actor/test_actor_faults.py`.
"""

import random
import subprocess
import sys
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from mage_async.assembly import check, trial_config_of
from mage_async.config import config_file
from mage_async.config.schema import Config
from mage_async.credit.turn_table import build_table
from mage_async.environments import catalogue
from mage_async.environments.environment import OPPONENT, Environment
from mage_async.errors import EnvironmentFault
from mage_async.inference.chat_files import load_chat
from mage_async.policy.tiny_tokenizer import build_tokenizer, save_tokenizer
from mage_async.results.score import score
from mage_async.tasks.task_stream import TaskStream, evaluation_tasks
from mage_async.trajectory import Group, Kind, Task, Trial, Turn
from mage_async.trials.action_parser import ActionParser
from mage_async.trials.scripted_play import scripted_trial
from tests.helpers.credits import CREDITS, credit_of

CONFIG = config_file.load(config_file.find(None), [])
NAMES = ("rps", "kuhn", "tictactoe", "minesweeper", "sokoban")
MEMORIES = ("none", "history", "reflection", "history_and_reflection")


@pytest.fixture(scope="module")
def staged(tmp_path_factory):
    """An environment by name, with a chat that knows its words."""
    made = {}
    for name in NAMES:
        environment = catalogue.load(name)
        folder = tmp_path_factory.mktemp(name)
        save_tokenizer(build_tokenizer(environment.facts.words), folder)
        made[name] = environment, load_chat(folder)
    return made


def configured(memory: str) -> Config:
    shape = msgspec.structs.replace(CONFIG.trial, memory=memory)
    return msgspec.structs.replace(CONFIG, trial=shape)


def a_task(environment: Environment, seed: int = 7) -> Task:
    return Task(environment.facts.name, environment.members("train")[0], seed)


def a_trial(staged, name: str, memory: str) -> tuple[Trial, list[str]]:
    """A scripted trial of three episodes, and the text of its contexts."""
    environment, chat = staged[name]
    rules = trial_config_of(configured(memory), environment, chat, 3)
    rules = replace(rules, max_reflection_tokens=400)
    trial = scripted_trial(environment, a_task(environment), 0, rules, chat)
    return trial, [chat.decode(each.tokens.tolist()) for each in trial.segments]


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("name", NAMES)
def test_defects_1_3_4_every_environment_plays_three_episodes_with_every_memory(
    staged, name, memory
):
    trial, contexts = a_trial(staged, name, memory)
    assert trial.num_played() == 3
    reflections = sum(turn.kind is Kind.REFLECT for turn in trial.turns)
    assert reflections == (2 if "reflection" in memory else 0)
    assert len(contexts) == (1 if "history" in memory else 3)


@pytest.mark.parametrize("name", NAMES)
def test_defect_2_every_environment_has_its_returns_by_opponent(staged, name):
    environment, _ = staged[name]
    trial, _ = a_trial(staged, name, "history")
    assert len(score([trial], environment).by_member[trial.task.member]) == 3


def test_defect_6_environments_import_nothing_that_only_some_of_them_need():
    heavy = ("pyspiel", "openai", "matplotlib", "textworld", "torch")
    code = (
        "import sys, mage_async.environments.catalogue as c; c.load('rps'); "
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", NAMES)
def test_defect_7_without_reflections_a_later_episode_still_shows_its_own_state(staged, name):
    environment, chat = staged[name]
    trial, (context,) = a_trial(staged, name, "history")
    last = [turn for turn in trial.turns if turn.episode == 2]
    begun = environment.begin(trial.task, 2)
    told = context[: len(chat.decode(trial.segments[0].tokens[: last[0].start].tolist()))]
    assert told.rstrip().endswith(begun.observation.split("\n")[-1] + "<|assistant|><action>")
    assert all(turn.action in context for turn in trial.turns)


@pytest.mark.parametrize("name", ["sokoban", "minesweeper"])
def test_defect_8_a_restart_leaves_later_tasks_as_they_were(name):
    restarted, fresh = catalogue.load(name), catalogue.load(name)
    for seed in range(3):
        for episode in range(3):
            play = restarted.begin(a_task(restarted, seed), episode)
            play.act(play.legal_actions()[0])
    for seed in range(3, 8):
        task = a_task(fresh, seed)
        assert restarted.begin(task, 0).observation == fresh.begin(task, 0).observation


@pytest.mark.parametrize("name", catalogue.names())
def test_defect_9_what_is_evaluated_on_is_never_trained_on(name):
    environment = catalogue.load(name)
    trained = {TaskStream(environment, seed).task(n).member for seed in range(5) for n in range(60)}
    evaluated = {task.member for task in evaluation_tasks(environment, "heldout", 200, 0)}
    assert not trained & evaluated


def test_defect_12_every_credit_reaches_the_advantage_of_every_estimator():
    turns = tuple(Turn(Kind.ACT, k, 0, 0, k, k + 1, float(k == 2), True, "x") for k in range(3))
    trial = Trial(Task("rps", "a", 1), 0, 3, (), turns)
    returns = {
        name: tuple(
            build_table([Group(0, 0, (trial,))], credit_of(credit, episode_discount=0.5)).returns
        )
        for name, credit in CREDITS.items()
    }
    assert returns["single_episode"] == (0.0, 0.0, 1.0)
    assert returns["cumulative_paper"] == returns["cumulative_code"] == (0.25, 0.5, 1.0)


@pytest.mark.parametrize("name", NAMES)
def test_defect_15_an_opponent_nobody_knows_is_refused(name):
    environment = catalogue.load(name)
    with pytest.raises(EnvironmentFault, match="nobody"):
        environment.begin(Task(name, "nobody", 1), 0)


def test_defect_17_nothing_a_kuhn_agent_reads_names_a_card_it_may_not_see(staged):
    environment, _ = staged["kuhn"]
    for member in environment.members("train"):
        for seed in range(20):
            play = environment.begin(Task("kuhn", member, seed), 0)
            assert sum(play.observation.count(card) for card in ("jack", "queen", "king")) <= 1


def test_defect_16_the_equilibrium_is_also_met_as_it_draws_and_not_only_as_it_is_likeliest():
    kuhn = catalogue.load("kuhn", opponents="mage", hands=1)
    assert {"cfr-greedy", "nash"} <= set(kuhn.members("heldout"))

    def answers(member: str) -> set[str]:
        """What it does with a jack where nobody has bet."""
        begun = (kuhn.begin(Task("kuhn", member, seed, 1), 0) for seed in range(400))
        jacks = (play for play in begun if play.duel.hands[0].cards[OPPONENT] == 0)  # a jack
        return {play.observation.split()[-1] for play in jacks}

    assert answers("nash") == {"check", "bet"}
    assert answers("cfr-greedy") == {"check"}


def test_defect_18_a_turn_earns_all_its_steps_and_ends_where_the_room_is_solved():
    sokoban = catalogue.load("sokoban")
    found = 0
    for seed, member in enumerate(sokoban.members("train")[:12]):
        task = Task("sokoban", member, seed)
        actions, play = [], sokoban.begin(task, 0)
        script = sokoban._player(1.0, 0.0, random.Random(0))
        while play.legal_actions():
            actions.append(script.choose(play))
            play.act(actions[-1])
        *before, last = actions
        if not play.is_solved or len(last.split()) == 3:
            continue
        again = sokoban.begin(task, 0)
        for action in before:
            again.act(action)
        outcome = again.act(f"{last} {last.split()[-1]}")  # one step more would undo nothing
        assert outcome.is_done
        assert again.is_solved
        steps = len(last.split())
        assert outcome.reward == pytest.approx(10.0 + 1.0 - 0.1 * steps)
        found += 1
    assert found


@pytest.mark.parametrize("name", ["minesweeper", "sokoban"])
def test_defect_19_all_trials_of_a_group_begin_on_the_same_board(name):
    random.seed(1), np.random.seed(1)
    first = catalogue.load(name).begin(a_task(catalogue.load(name)), 0).observation
    random.seed(2), np.random.seed(2)
    assert catalogue.load(name).begin(a_task(catalogue.load(name)), 0).observation == first


@pytest.mark.parametrize("name", NAMES)
def test_defect_20_an_anchor_is_the_state_and_not_what_was_said_of_earlier_episodes(name):
    environment = catalogue.load(name)
    task = a_task(environment)
    if environment.begin(task, 0).observation == environment.begin(task, 2).observation:
        assert environment.begin(task, 0).anchor == environment.begin(task, 2).anchor


def test_defect_21_a_later_loss_shows_in_the_share_of_wins():
    environment = catalogue.load("rps")
    turns = tuple(Turn(Kind.ACT, k, 0, 0, 0, 1, r, True, "x") for k, r in enumerate((1.0, -1.0)))
    said = score([Trial(a_task(environment), 0, 2, (), turns)], environment)
    assert (said.won_by_episode, said.won_within) == ([1.0, 0.0], [1.0, 1.0])


def test_defect_22_a_tag_inside_thinking_is_no_action():
    said = "<think><action>rock</action></think><action>paper</action>"
    assert ActionParser("none").parse(Kind.ACT, said) == "paper"


@pytest.mark.parametrize("name", NAMES)
def test_defect_23_an_action_that_is_not_legal_is_invalid(name):
    environment = catalogue.load(name)
    assert not environment.begin(a_task(environment), 0).act("nonsense").is_valid


@pytest.mark.parametrize("name", NAMES)
def test_defect_25_no_environment_draws_from_or_seeds_what_others_draw_from(name):
    random.seed(5), np.random.seed(5)
    before = random.getstate(), np.random.get_state()[1].tolist()
    environment = catalogue.load(name)
    play = environment.begin(a_task(environment), 0)
    play.act(play.legal_actions()[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


def test_the_configurations_these_tests_use_are_valid():
    for memory in MEMORIES:
        check(configured(memory))
