"""A file for each experiment of LaMer and MAGE, each on one base of what all scripts share, and
ORBIT's on the same base.
"""

import random
from operator import attrgetter
from pathlib import Path

import pytest

from mage_async.assembly import check, check_context_length, environment_of, trial_config_of
from mage_async.config import config_file, presets
from mage_async.config.schema import digest
from mage_async.environments.mix import component_of
from mage_async.errors import ConfigError
from mage_async.inference.chat_files import load_chat
from mage_async.policy.tiny_tokenizer import build_tokenizer, save_tokenizer
from mage_async.trials.scripted_play import random_task
from mage_async.trials.trial_run import TrialRun, TrialStart

FOLDER = Path(__file__).parents[2] / "configs" / "papers"
ORBIT = FOLDER / "orbit.toml"
EVERY = sorted(file for file in FOLDER.glob("*.toml") if file.stem != "qwen3_4b")
FILES = [file for file in EVERY if file != ORBIT]
EXTRAS = {"alfworld"}


def of(file, *changes):
    """The configuration, where what it plays on is installed."""
    config = config_file.load(file, list(changes))
    if config.environment.name in EXTRAS:
        pytest.importorskip(config.environment.name)
    return config


def test_there_is_a_file_for_each_experiment():
    assert [file.stem for file in EVERY] == [
        *("lamer_alfworld", "lamer_minesweeper", "lamer_sokoban", "lamer_webshop"),
        *("mage_alfworld", "mage_kuhn", "mage_sokoban", "mage_tictactoe", "mage_webshop"),
        "orbit",
    ]


@pytest.mark.parametrize("file", EVERY, ids=lambda file: file.stem)
def test_it_is_sound_and_found_by_its_name(file):
    assert config_file.find(f"papers/{file.stem}") == file
    check(of(file))


@pytest.mark.parametrize("file", EVERY, ids=lambda file: file.stem)
def test_its_first_prompt_says_the_rules(file, tmp_path):
    config = of(file)
    environment = environment_of(config)
    save_tokenizer(build_tokenizer(environment.facts.words), tmp_path)
    chat = load_chat(tmp_path)
    rules = trial_config_of(config, environment, chat, config.trial.episodes)
    task = random_task(environment, "train", random.Random(0))
    run = TrialRun(TrialStart(environment, task, 0, rules, chat, name="t"))
    prompt = run.next_prompt()
    said = chat.decode(prompt.tokens.tolist())
    assert component_of(environment, task.member).rules()[:40] in said
    assert prompt.sampling.max_tokens == config.transcript.max_action_tokens
    room = config.engine.max_tokens - len(prompt.tokens)
    assert room > 2 * config.transcript.max_action_tokens


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_it_is_the_published_code_with_its_own_discount_and_penalties(file):
    config = config_file.load(file, [])
    own = {"credit.episode_discount", "advantage.format_penalty"}
    for key, value in presets.PRESETS[f"{file.stem.partition('_')[0]}_code"].items():
        if key not in own:
            name = key.replace("estimator", "kind")
            assert attrgetter(name)(config) == value, key


@pytest.mark.parametrize(
    ("name", "reward_of_a_win", "penalty", "length", "kl"),
    [
        ("mage_kuhn", 5.0, 2.0, 2.0, 0.1),
        ("mage_tictactoe", 10.0, 0.5, 2.0, 0.1),
        ("mage_sokoban", 1.0, 0.5, 1.0, 0.0),
        ("mage_alfworld", 10.0, 0.5, 0.0, 0.0),
        ("lamer_alfworld", 10.0, 0.5, 0.0, 0.0),
        ("lamer_minesweeper", 1.0, 0.5, 0.0, 0.0),
    ],
)
def test_where_the_script_pays_more_all_else_in_units_of_reward_is_as_much_smaller(
    name, reward_of_a_win, penalty, length, kl
):
    """The whole loss is then the script's, divided by one number, which AdamW does not see."""
    config = config_file.load(FOLDER / f"{name}.toml", [])
    rules, learner = config.advantage, config.learner
    found = (rules.format_penalty, rules.length_penalty, learner.kl, learner.entropy)
    assert [value * reward_of_a_win for value in (*found, learner.grad_clip)] == pytest.approx(
        [penalty, length, kl, 0.001, 1.0]
    )


def test_orbit_is_grpo_on_the_wins_of_three_episodes_with_its_scripts_numbers():
    config = config_file.load(ORBIT, [])
    own = {  # a single episode is GRPO's preset; penalties and clips are LaMer's there
        *("trial.episodes", "trial.stop_on_success", "credit.kind", "credit.turn_discount"),
        *("advantage.format_penalty", "learner.correction.clip_high"),
    }
    for key, value in presets.PRESETS["grpo"].items():
        if key not in own:
            assert attrgetter(key.replace("estimator", "kind"))(config) == value, key
    admission, learner = config.admission, config.learner
    assert (config.trial.episode_budget, config.evaluation.episodes) == (3, 3)
    assert config.sampling.temperature == 0.6
    assert (admission.groups_per_step, admission.trials_per_group) == (32, 8)
    assert (learner.learning_rate, learner.final_learning_rate) == (1e-6, 1e-6)
    assert (learner.correction.clip_low, learner.correction.clip_high) == (0.2, 0.28)
    assert (learner.kl, learner.entropy, config.advantage.format_penalty) == (0.0, 0.0, 0.0)
    assert learner.steps == 10 * 5 * 512 // 32


def test_the_room_of_trials_is_measured_where_actions_are_a_pattern():
    """Wordle's guesses, which the model's tokenizer would read."""
    check_context_length(
        config_file.load(ORBIT, ["transcript.thinking=false", "transcript.forced_tags=both"])
    )


def test_orbit_trains_on_five_games_with_its_turns_and_is_tested_on_two_others():
    config = config_file.load(ORBIT, [])
    parts = environment_of(config).parts
    assert [(part.label, part.share, part.environment.facts.max_turns) for part in parts] == [
        ("biased_rps", 1, 5),
        ("minesweeper", 1, 8),
        ("hangman", 1, 10),
        ("wordle", 1, 10),
        ("blackjack_pick", 1, 4),
        ("maze", 0, 9),
        ("mastermind", 0, 3),
    ]
    for part in parts:
        facts = part.environment.facts
        # The budget of turns ends a trial, and no number of episodes does.
        assert config.trial.most_turns(facts.max_turns) <= config.trial.episodes
        assert (facts.min_return, facts.max_return) == (0.0, 1.0)
        assert facts.is_won([1.0])
        assert facts.is_lost([0.0])


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_step_has_as_many_updates_as_the_scripts_samples_make(file):
    config = of(file)
    trials = config.admission.groups_per_step * config.admission.trials_per_group
    turns = environment_of(config).facts.max_turns
    most = trials * (config.trial.episodes * turns + config.trial.episodes - 1) // 64
    assert config.learner.minibatches == most


@pytest.mark.parametrize("file", EVERY, ids=lambda file: file.stem)
def test_what_is_recorded_is_whole_and_has_the_same_digest(file, tmp_path):
    config = config_file.load(file, ["seed=3"])
    copy = tmp_path / "config.toml"
    copy.write_text(config_file.dump(config))
    assert "base =" not in copy.read_text()
    assert digest(config_file.load(copy, [])) == digest(config)


def written(folder, name, text):
    file = folder / name
    file.write_text(text)
    return file


def test_a_file_says_only_what_differs_from_its_base(tmp_path):
    whole = config_file.find(None).read_text()
    written(tmp_path, "whole.toml", whole)
    mine = written(
        tmp_path,
        "mine.toml",
        'base = "whole.toml"\nseed = 5\n[policy]\nlayers = 3\n[engine]\nkind = "sglang"\n'
        "server = { a = 1 }\n",
    )
    config, below = config_file.load(mine, []), config_file.load(tmp_path / "whole.toml", [])
    assert (config.seed, config.policy.layers, config.engine.server) == (5, 3, {"a": 1})
    assert config.policy.heads == below.policy.heads
    assert config.learner == below.learner


def test_options_of_another_environment_do_not_shine_through(tmp_path):
    written(tmp_path, "whole.toml", config_file.find("kuhn").read_text())
    text = (
        'base = "whole.toml"\n[environment]\nname = "tictactoe"\noptions = { simulations = 50 }\n'
    )
    config = config_file.load(written(tmp_path, "mine.toml", text), [])
    assert config.environment.options == {"simulations": 50}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            'base = "nothing.toml"\n',
            r"mine.toml: its base 'nothing.toml' does not exist: .*nothing",
        ),
        (f'base = "{"long" * 100}"\n', r"mine.toml: its base 'longlong.*' does not exist: "),
        ("base = 3\n", r"mine.toml: `base` must be the path of a file, got 3"),
        ('base = "middle.toml"\n', r"its base 'middle.toml' has a base itself, 'whole.toml'"),
        (
            'base = "whole.toml"\n[learner]\nstep = 3\n',
            r"key `learner.step` .*mean `learner.steps`",
        ),
        ('base = "whole.toml"\nlearner = 3\n', r"mine.toml: `learner` must be a table, got 3"),
    ],
)
def test_a_base_that_cannot_be_used_is_said(tmp_path, text, sentence):
    written(tmp_path, "whole.toml", config_file.find(None).read_text())
    written(tmp_path, "middle.toml", 'base = "whole.toml"\n')
    with pytest.raises(ConfigError, match=sentence):
        config_file.load(written(tmp_path, "mine.toml", text), [])
