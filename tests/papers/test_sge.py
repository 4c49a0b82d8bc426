"""arXiv 2603.02045: two temperatures, and reflection on strategies of earlier trials."""

import math
import random

import msgspec
import numpy as np
import pytest
import torch

from mage_async.config import config_file
from mage_async.errors import ConfigError
from mage_async.learning.forward import head_inputs
from mage_async.learning.packing import MicroBatch, SampledTokens, TrainingSequence
from mage_async.methods.sge import Settings, Sge, strategies_of
from mage_async.trajectory import Group, Kind, Task, Trial, Turn
from tests.helpers.random_models import smallest_qwen3

ACTION, STRATEGY = 0.8, 1.5


def test_strategies_and_actions_have_the_softmax_of_their_own_temperature():
    """log p_T(y) = z_y / T - log sum of exp(z / T), T by the kind of the token."""
    from transformers import Qwen3ForCausalLM

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(smallest_qwen3())
    kinds = np.array([Kind.STRATEGY] * 2 + [Kind.ACT] * 3, np.int32)
    zeros = [np.zeros(5, np.int32) for _ in range(5)]
    sampled = SampledTokens(np.zeros(5, np.float32), *zeros)._replace(kinds=kinds)
    tokens, places = np.arange(3, 13, dtype=np.int32), np.array([2, 3, 6, 7, 8])
    part = TrainingSequence(tokens, places, sampled, np.array([2, 3]), torch.zeros(2), {})
    batch = MicroBatch.of([part], torch.device("cpu"), strategy_sharpness=ACTION / STRATEGY)
    with torch.no_grad():
        found = head_inputs(model, batch.row, ACTION).logprobs()[0].tolist()
        states = head_inputs(model, MicroBatch.of([part], torch.device("cpu")).row, 1.0)
        logits = (states.hidden @ states.head.T).tolist()
    for own, row, token, kind in zip(found, logits, tokens[places], kinds, strict=True):
        scaled = [z / (STRATEGY if kind == Kind.STRATEGY else ACTION) for z in row]
        most = max(scaled)
        expected = scaled[token] - most - math.log(sum(math.exp(z - most) for z in scaled))
        assert own == pytest.approx(expected, rel=0, abs=1e-5)  # float32 logits


def test_a_temperature_is_not_rounded_to_the_type_of_a_model_in_bfloat16():
    from transformers import Qwen3ForCausalLM

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(smallest_qwen3()).to(torch.bfloat16)
    with torch.no_grad():  # the logits of a trained model: standard deviation 2.6
        model.get_output_embeddings().weight.mul_(40.0)
    kinds = np.array([Kind.STRATEGY] * 4, np.int32)
    zeros = [np.zeros(4, np.int32) for _ in range(5)]
    sampled = SampledTokens(np.zeros(4, np.float32), *zeros)._replace(kinds=kinds)
    tokens, places = np.arange(3, 13, dtype=np.int32), np.array([2, 3, 6, 7])
    part = TrainingSequence(tokens, places, sampled, np.array([4]), torch.zeros(1), {})
    batch = MicroBatch.of([part], torch.device("cpu"), strategy_sharpness=1 / 1.5)
    with torch.no_grad():
        found = head_inputs(model, batch.row, 1.0).logprobs()[0]
        states = head_inputs(model, MicroBatch.of([part], torch.device("cpu")).row, 1.0)
    logits = states.hidden.float() @ states.head.float().T
    assert logits.std() > 1.0
    expected = (logits / 1.5).log_softmax(1).gather(1, states.targets[:, None])[:, 0]
    assert found.tolist() == pytest.approx(expected.tolist(), rel=0, abs=1e-5)


def method_of(*settings):
    given = ["admission.trials_per_group=4", *settings]
    config = config_file.load(config_file.find("quickstart"), given, "sge")
    method = Sge(msgspec.convert(config.methods["sge"], Settings), config)
    method.begin(None, 0)  # as `Methods` does
    return method


def trial_of(index, *episodes, member="m"):
    """From (strategy, rewards of the actions after it) of each episode."""
    turns = []
    for episode, (strategy, rewards) in enumerate(episodes):
        for number, reward in enumerate(rewards):
            said = strategy if number == 0 else f"later {number}"
            turns.append(Turn(Kind.STRATEGY, episode, number, 0, 0, 1, 0.0, True, said))
            turns.append(Turn(Kind.ACT, episode, number, 0, 1, 2, reward, True, "a"))
    return Trial(Task("rps", member, 1), index, len(episodes), (), tuple(turns))


def test_a_trial_reflects_on_the_best_and_the_worst_strategy_of_its_task():
    method, source = method_of("transcript.rules=true"), random.Random(2)
    task = Task("rps", "m", 9)
    assert method.guidance(0, task) is None
    paid = [[[source.uniform(-1, 1) for _ in range(2)] for _ in range(3)] for _ in range(4)]
    trials = tuple(
        trial_of(n, *((f"plan {n}.{k}", each) for k, each in enumerate(own)))
        for n, own in enumerate(paid)
    )
    method.learn([Group(0, 0, trials)])
    totals = {f"plan {n}.{k}": sum(paid[n][k]) for n in range(4) for k in range(3)}
    order = sorted(totals, key=totals.__getitem__)
    guidance = method.guidance(1, task)
    assert guidance.decisions == (("paid", order[-1]), ("failed", order[0]))
    assert order[-1] in guidance.text
    assert guidance.num_guided == 2
    assert guidance.version == 1
    assert method.guidance(1, Task("rps", "other", 9)) is None
    assert dict((s, r) for r, s in strategies_of(trials[0])) == pytest.approx(
        {name: total for name, total in totals.items() if name.startswith("plan 0")}
    )


def test_what_it_read_is_bounded_and_outlives_a_restart():
    method = method_of("methods.sge.max_bytes=300", "transcript.rules=true")
    method.learn([Group(0, 0, (trial_of(0, ("x" * 900, [1.0])), trial_of(1, ("y" * 900, [0.0]))))])
    other = method_of("methods.sge.max_bytes=300", "transcript.rules=true")
    other.begin(method.state(), 1)
    guidance = other.guidance(3, Task("rps", "m", 4))
    assert guidance == method.guidance(3, Task("rps", "m", 4))
    assert len(guidance.text.encode()) <= 300
    assert other.state() == method.state()


def test_equal_returns_have_no_worst_strategy():
    method = method_of()
    method.learn([Group(0, 0, (trial_of(0, ("x", [1.0])), trial_of(1, ("y", [1.0]))))])
    assert method.guidance(3, Task("rps", "m", 4)).text == "y "


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("trial.strategy=none", r'trial\.strategy = "none" writes none'),
        ("population.mixed_groups=true", r"set population\.mixed_groups = false"),
    ],
)
def test_keys_with_which_no_trial_would_be_guided_are_refused(change, why):
    method_of("methods.sge.reflected=0.5").check()
    with pytest.raises(ConfigError, match=why):
        method_of(change).check()
