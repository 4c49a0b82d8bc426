"""The trainer that a configuration asks for."""

from transformers import PreTrainedModel

from mage_async.config.schema import Config
from mage_async.learning.soft_actor_critic.sac_trainer import SacTrainer
from mage_async.learning.trainer import Trainer
from mage_async.trials.chat_format import ChatFormat


def trainer_of(
    config: Config, model: PreTrainedModel, chat: ChatFormat, *, max_staleness: int
) -> Trainer:
    """A trainer at the beginning of a run: by soft actor-critic where there is a section `sac`."""
    if config.sac is not None:
        return SacTrainer(model, config, chat, max_staleness=max_staleness)
    return Trainer(
        model,
        config.learner,
        config.sampling.temperature,
        config.seed,
        max_staleness=max_staleness,
        strategy_temperature=config.sampling.strategy_temperature,
        expert=config.expert,
    )
