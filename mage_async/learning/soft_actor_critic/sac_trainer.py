"""A step of soft actor-critic: a batch goes into the replay buffer, updates draw from there."""

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from mage_async.assembly import environment_of
from mage_async.config.schema import Config
from mage_async.config.sections.sac import SoftActorCritic
from mage_async.learning.corrections.surrogate import Surrogate
from mage_async.learning.forward import head_inputs
from mage_async.learning.passes import Pass
from mage_async.learning.soft_actor_critic.critic import Critic
from mage_async.learning.soft_actor_critic.experience import (
    Copy,
    action_tokens,
    experiences,
)
from mage_async.learning.soft_actor_critic.replay_buffer import ReplayBuffer
from mage_async.learning.soft_actor_critic.update import (
    Losses,
    Transitions,
    losses,
    model_inputs,
)
from mage_async.learning.step_metrics import SUMS, TrainedPass, Update, step_metrics
from mage_async.learning.trainer import Trainer
from mage_async.learning.training_sequences import training_sequences
from mage_async.trajectory import Group
from mage_async.trials.chat_format import ChatFormat


class SacTrainer(Trainer):
    """The model under training with Q heads on its last hidden state, and the replay buffer.

    A step takes its batch into the buffer and makes `learner.minibatches` updates, each on trials
    drawn from the whole buffer. The transformer is trained by policy and critic together. Which
    weights drew a trial does not matter to the losses, so there is no correction for staleness.
    """

    def __init__(
        self, model: PreTrainedModel, config: Config, chat: ChatFormat, *, max_staleness: int
    ) -> None:
        super().__init__(
            model,
            config.learner,
            config.sampling.temperature,
            config.seed,
            max_staleness=max_staleness,
        )
        self._environment, self._chat = environment_of(config), chat
        tokens = list(action_tokens(self._environment, chat))
        self._tokens = torch.tensor(tokens, device=model.device)
        width = int(model.config.hidden_size)
        self._critic = Critic(width, len(tokens), seed=config.seed, device=model.device)
        self._buffer = ReplayBuffer()

    def train(self, groups: Sequence[Group], config: Config) -> dict[str, float]:
        """Take a batch into the buffer and train on draws; the version grows by one."""
        rules = config.sac
        assert rules is not None, "the section can be neither added nor left out on --resume"
        new = experiences(groups, config, self._environment, self._chat, rules.hindsight)
        self._buffer.add(new, rules.capacity)
        sequences = training_sequences(groups, config, self.model.device)
        batch = [self.begun(each) for each in self.passes(sequences)]
        self._set_rate()
        draws = [self._draw(rules.batch, number) for number in range(self._rules.minibatches)]
        made = [self._improve(draw, rules) for draw in draws]
        norm = torch.stack([norm for _, norm in made]).mean()
        trained = [TrainedPass(each, _no_sums(self.model.device), _nothing(each)) for each in batch]
        metrics = step_metrics([Update(trained, norm)], self.version, self._max_staleness)
        del metrics["zero_advantage_share"]  # advantages are not what is trained on
        metrics["mean_weight"] = 1.0
        metrics |= _means([found for found, _ in made]) | self._ages(draws)
        metrics["learning_rate"] = float(self.optimizer.param_groups[0]["lr"])
        metrics["replay_trials"] = float(len(self._buffer))
        self.version += 1
        return metrics

    def state(self) -> dict[str, Any]:
        """As a trainer's, with the Q heads and the buffer."""
        return super().state() | {"critic": self._critic.state(), "replay": self._buffer.state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Take back what `state` gave."""
        super().restore(state)
        self._critic.restore(state["critic"])
        self._buffer.restore(state["replay"])

    def _draw(self, count: int, number: int) -> list[Copy]:
        source = random.Random(f"{self._seed}/replay/{self.version}/{number}")
        return self._buffer.draw(count, source)

    def _improve(self, draw: Sequence[Copy], rules: SoftActorCritic) -> tuple[Losses, Tensor]:
        """One optimizer update of policy and critic: its losses, and the gradient's norm."""
        parts, device = [part for copy in draw for part in copy], self.model.device
        given = model_inputs(parts, int(self._tokens[0]), device)
        inputs = head_inputs(self.model, given, self._temperature)
        transitions = Transitions.of(parts, device)
        self.optimizer.zero_grad(set_to_none=True)
        found = losses(inputs, self._tokens, self._critic, transitions, rules.entropy_coefficient)
        found.total().backward()
        norm = self._apply()
        self._critic.update(rules.critic_rate, rules.target_rate)
        return found, norm

    def _ages(self, draws: Sequence[Sequence[Copy]]) -> dict[str, float]:
        """How old the trials of a step's draws are, in steps."""
        ages = [self.version - part.version for draw in draws for copy in draw for part in copy]
        return {"replay_age_mean": sum(ages) / len(ages), "replay_age_max": float(max(ages))}


def _means(found: Sequence[Losses]) -> dict[str, float]:
    """Metrics of a step's updates."""

    def mean(values: list[Tensor]) -> float:
        return float(torch.stack([value.detach() for value in values]).mean())

    return {
        "loss": mean([each.total() for each in found]),
        "actor_loss": mean([each.actor for each in found]),
        "critic_loss": mean([each.critic for each in found]),
        "invalid_nats": mean([each.outside for each in found]),
        "entropy": mean([each.entropy for each in found]),
        "soft_value": mean([each.value for each in found]),
    }


def _no_sums(device: torch.device) -> Tensor:
    """Sums over a batch that no correction looked at."""
    return torch.zeros(len(SUMS), device=device)


def _nothing(each: Pass) -> Surrogate:
    """What a correction did to the tokens of a pass: nothing."""
    zeros = torch.zeros_like(each.behaviour)
    no = zeros.bool()
    return Surrogate(zeros, zeros + 1.0, no, no)
