"""arXiv 2411.03817: the implicit reward (DPO's loss, step by step) and inverse RL (GAIL's)."""

import math
import random
from collections import Counter

import msgspec
import pytest
import torch

from mage_async.config import config_file
from mage_async.environments.catalogue import load
from mage_async.learning.token_loss import HeadInputs
from mage_async.methods.stepagent import Settings, StepAgent, fitted_log_odds
from mage_async.methods.stepagent_preference import ExpertPairs, gaps
from mage_async.trajectory import Task, Trial

SOURCE = random.Random(5)
LOGITS, FIRST = ([[SOURCE.uniform(-2, 2) for _ in range(4)] for _ in range(3)] for _ in range(2))
"""Of the policy and of the reference: three states, four actions."""
OWN, EXPERT = [0, 2, 1], [3, 0, 2]
BETA, TEMPERATURE = 0.3, 0.8


def log_softmax(row, action):
    scaled = [z / TEMPERATURE for z in row]
    return scaled[action] - math.log(sum(map(math.exp, scaled)))


def test_the_loss_of_a_pair():
    """-log sigmoid(r(s, e) - r(s, a)) with r = beta log(p / ref)."""

    def states(rows):
        head = torch.tensor(rows, dtype=torch.float32).T
        return HeadInputs(torch.eye(3), head, torch.tensor(OWN), 1 / TEMPERATURE)

    experts = torch.tensor(EXPERT)
    pairs = ExpertPairs(experts, torch.ones(3), gaps(states(FIRST), experts))
    found, _ = pairs.loss(states(LOGITS), BETA)

    def reward(state, action):
        ratio = log_softmax(LOGITS[state], action) - log_softmax(FIRST[state], action)
        return BETA * ratio

    expected = sum(
        math.log(1 + math.exp(reward(s, a) - reward(s, e)))
        for s, (a, e) in enumerate(zip(OWN, EXPERT, strict=True))
    )
    assert float(found) == pytest.approx(expected, rel=0, abs=1e-6)


@pytest.mark.parametrize(("experts", "own"), [(7, 2), (1, 5), (3, 3), (9, 0)])
def test_a_steps_reward_is_the_discriminators_log_odds(experts, own):
    """The ridge's one optimum for a step of four features: n (sigmoid(z) - share) + z / 4 = 0."""
    step, n = ("two words", "act"), experts + own
    found = fitted_log_odds({step: experts}, {step: own}, smoothing=1.0)[step]
    low, high = -50.0, 50.0
    for _ in range(200):
        z = (low + high) / 2
        low, high = (low, z) if n / (1 + math.exp(-z)) - experts + z / 4 > 0 else (z, high)
    assert found == pytest.approx(z, rel=0, abs=1e-9)


def test_in_the_experts_states_its_steps_are_those_of_its_own_trials():
    given = ["environment.name=scout", "methods.stepagent.states=expert"]
    config = config_file.load(config_file.find("quickstart"), given, "stepagent_irl")
    settings = msgspec.convert(config.methods["stepagent"], Settings)
    method, environment = StepAgent(settings, config), load("scout")
    task = Task("scout", environment.members("train")[3], 8)
    found = method._expert_steps([Trial(task, 2, 3, (), ())])

    script, steps = environment.best_script(random.Random("8/2/expert")), Counter()
    for episode in range(3):
        play = environment.begin(task, episode)
        while play.legal_actions():
            action = script.choose(play)
            steps[play.anchor, action] += 1
            play.act(action)
    assert found == steps
    assert method.rewards_need_environment


class FreeText:
    """Say yes."""

    words, max_turns = ("yes", "no"), 2

    def reset(self, seed, task):
        return "no"

    def step(self, action):
        return "no", float(action == "yes"), False

    def script(self, source):
        return lambda history: "yes"


def test_an_expert_plays_to_the_end_where_no_actions_are_listed():
    given = [f"environment.name={__name__}:FreeText", "methods.stepagent.states=expert"]
    config = config_file.load(config_file.find("quickstart"), given, "stepagent_irl")
    method = StepAgent(msgspec.convert(config.methods["stepagent"], Settings), config)
    trial = Trial(Task(method.environment.facts.name, "3", 8), 0, 3, (), ())
    assert method._expert_steps([trial]) == {("no", "yes"): 6}
