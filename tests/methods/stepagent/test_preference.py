"""StepAgent's implicit reward against enumeration, and in a step of the trainer."""

import copy
import itertools
from dataclasses import replace

import msgspec
import numpy as np
import torch
from torch.nn import functional
from transformers import Qwen3ForCausalLM

from mage_async.config.schema import Config, Learner
from mage_async.learning.forward import head_inputs
from mage_async.learning.packing import MicroBatch, SampledTokens, TrainingSequence
from mage_async.learning.token_loss import HeadInputs
from mage_async.learning.trainer import Trainer
from mage_async.methods.stepagent import Settings
from mage_async.methods.stepagent_preference import ExpertPairs, gaps, likeliest
from mage_async.restriction import AllowedSets
from mage_async.results.metrics import check_names
from mage_async.trajectory import Kind
from tests.helpers.random_models import smallest_qwen3

BETA = 0.5


def table(seed: int) -> torch.Tensor:
    """Distributions over four actions in three states: [3, 4]."""
    source = torch.Generator().manual_seed(seed)
    return torch.randn(3, 4, generator=source).softmax(-1)


def inputs(logits: torch.Tensor, states: torch.Tensor, actions: torch.Tensor) -> HeadInputs:
    """A policy that is a table: the hidden state says which row, the head is the table."""
    return HeadInputs(functional.one_hot(states, 3).float(), logits.T, actions, 1.0)


def test_the_best_implicit_reward_is_the_log_ratio_of_expert_and_policy() -> None:
    """Every pair of an expert's and a policy's action, weighed by how probable it is: where the
    loss is least, beta log(p / ref) is log(p_E / p_old) up to a constant of the state.
    """
    expert, policy, reference = table(0), table(1), table(2)
    pairs = torch.tensor(list(itertools.product(range(3), range(4), range(4))))
    states, wanted, own = pairs.T
    weights = expert[states, wanted] * policy[states, own]
    known = gaps(inputs(reference.log(), states, own), wanted)
    enumerated = ExpertPairs(wanted, weights, known)
    logits = torch.zeros(3, 4, requires_grad=True)
    solver = torch.optim.LBFGS([logits], max_iter=500, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        solver.zero_grad()
        loss, _ = enumerated.loss(inputs(logits, states, own), BETA)
        loss.backward()
        return loss

    solver.step(closure)
    rewards = BETA * (logits.detach().log_softmax(-1) - reference.log())
    ratios = expert.log() - policy.log()
    apart = rewards - ratios
    assert torch.allclose(apart, apart.mean(-1, keepdim=True).expand(3, 4), atol=1e-3)


def test_a_gap_is_that_of_two_log_probs_of_one_softmax() -> None:
    logits = 3 * torch.randn(3, 4, generator=torch.Generator().manual_seed(3))
    states, own, wanted = torch.tensor([[0, 1, 2], [0, 2, 1], [3, 2, 0]])
    hot = HeadInputs(functional.one_hot(states, 3).float(), logits.T, own, 0.5)
    logprobs = (logits / 2).log_softmax(-1)
    assert torch.allclose(gaps(hot, wanted), logprobs[states, wanted] - logprobs[states, own])


def model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(smallest_qwen3())


def sequence(experts: dict[int, int]) -> TrainingSequence:
    """Ten tokens; two turns of two and of three sampled ones, all of advantage 0."""
    tokens = np.arange(3, 13, dtype=np.int32)
    zeros = [np.zeros(5, np.int32) for _ in range(5)]
    sampled = SampledTokens(np.full(5, -3.0, np.float32), *zeros)
    places, lengths = np.array([2, 3, 6, 7, 8]), np.array([2, 3])
    return TrainingSequence(tokens, places, sampled, lengths, torch.zeros(2), experts)


def trainer(expert: Settings | None, **options: float) -> Trainer:
    rules = Learner(minibatches=1, warmup_steps=1, grad_clip=1e9, **options)
    tables = {"stepagent": msgspec.to_builtins(expert)} if expert else {}
    made = Trainer(model(), Config(learner=rules, methods=tables))
    made.reference = copy.deepcopy(made.model).requires_grad_(False)
    return made


def test_a_pair_has_the_gradient_of_dpo_as_often_as_its_turn_has_tokens() -> None:
    rules = Settings("implicit", weight=2.0, beta=BETA)
    taught, part = trainer(rules), sequence({7: 30})
    (each,) = taught.micro_batches([part])
    taught.update([each], 0.2)
    found = [weight.grad.clone() for weight in taught.model.parameters()]
    policy = model()
    states = head_inputs(policy, MicroBatch.of([part], torch.device("cpu")).row, 1.0)
    logprobs = (states.hidden @ states.head.T).log_softmax(-1)[3]
    margin = BETA * (logprobs[30] - logprobs[int(part.tokens[7])])
    (0.2 * 2.0 * 3 * -functional.logsigmoid(margin - margin.detach())).backward()
    norm = torch.nn.utils.get_total_norm([weight.grad for weight in policy.parameters()])
    assert norm > 0.01
    for own, weight in zip(found, policy.parameters(), strict=True):
        assert torch.allclose(own, weight.grad, atol=1e-6)


def test_a_step_prefers_the_expert_and_says_so() -> None:
    rules = Settings("implicit", weight=5.0, beta=BETA)
    taught = trainer(rules, learning_rate=0.01)
    first = taught.step([sequence({7: 30})])
    later = taught.step([sequence({7: 30})])
    check_names(first)
    assert first["expert_loss"] == np.float32(np.log(2))
    assert first["expert_preferred_share"] == 0.0
    assert later["expert_loss"] < first["expert_loss"]
    assert later["expert_preferred_share"] == 1.0


def test_without_the_method_what_an_expert_would_have_said_changes_nothing() -> None:
    weights = []
    for experts, rules in (({7: 30}, None), ({}, None)):
        part = sequence(experts)
        part.advantages[:] = torch.tensor([1.0, -0.5])
        taught = trainer(rules)
        metrics = taught.step([part])
        assert "expert_loss" not in metrics
        weights.append([weight.detach() for weight in taught.model.parameters()])
    for others in weights[1:]:
        assert all(torch.equal(a, b) for a, b in zip(weights[0], others, strict=True))


def test_a_policy_as_the_expert_is_followed_where_its_likeliest_token_first_differs() -> None:
    expert = model()
    with torch.no_grad():
        for weight in expert.parameters():
            weight.add_(0.3 * torch.randn_like(weight))
    taught, part = trainer(Settings("implicit", beta=BETA)), sequence({})
    taught.frozen_policy = expert
    part.sampled.kinds[:2] = Kind.REFLECT
    (each,) = taught.micro_batches([part])
    states = head_inputs(expert, each.row, 1.0)
    best = (states.hidden @ states.head.T).argmax(-1).tolist()
    own = part.tokens[part.places].tolist()
    found = [(n, best[n]) for n in range(2, 5) if best[n] != own[n]]
    assert found
    place, token = found[0]
    assert each.prepared
    assert each.prepared[0].weights.tolist() == [3.0 * (n == place) for n in range(5)]
    assert each.prepared[0].experts[place] == token


def test_a_policy_as_the_expert_prefers_a_token_that_could_have_been_drawn() -> None:
    part = sequence({})
    own = part.tokens[part.places].tolist()
    sets = [sorted({token, 3 + place, 30}) for place, token in enumerate(own)]
    part = replace(part, allowed=AllowedSets.of([np.array(each, np.int32) for each in sets]))
    states = head_inputs(model(), MicroBatch.of([part], torch.device("cpu")).row, 1.0)
    # Each token is a turn of its own, so each has its place for an expert's token.
    found = likeliest(states, part.sampled.kinds, np.ones(5, np.int64)).tolist()
    logits = (states.hidden @ states.head.T).tolist()
    best = [max(each, key=row.__getitem__) for each, row in zip(sets, logits, strict=True)]
    assert found == [b if b != o else -1 for b, o in zip(best, own, strict=True)]
    assert max(found) >= 0


def test_a_cycle_ends_with_the_policy_as_the_reference_and_a_checkpoint_holds_it() -> None:
    rules = Settings("implicit", beta=BETA, cycle=2)
    taught, began = trainer(rules, learning_rate=0.01), model()
    weights = [began.state_dict()]
    for cycle_start in (0, 2, 2):
        taught.step([sequence({7: 30})])
        weights.append({name: each.clone() for name, each in taught.model.state_dict().items()})
        assert same(taught.reference, weights[cycle_start])
    resumed = Trainer(model(), taught.config)
    resumed.restore(copy.deepcopy(taught.state()))
    resumed.refer_to(model())
    assert same(resumed.reference, weights[2])


def same(policy: Qwen3ForCausalLM, weights: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(each, weights[name]) for name, each in policy.state_dict().items())
