"""The trainer that a configuration asks for."""

from transformers import PreTrainedModel

from mage_async.config.schema import Config
from mage_async.errors import RunError
from mage_async.learning.ranks.orders import Ranks
from mage_async.learning.soft_actor_critic.sac_trainer import SacTrainer
from mage_async.learning.trainer import Trainer
from mage_async.trials.chat_format import ChatFormat


def trainer_of(
    config: Config,
    model: PreTrainedModel,
    chat: ChatFormat,
    *,
    max_staleness: int,
    ranks: Ranks | None = None,
) -> Trainer:
    """A trainer at the beginning of a run: by soft actor-critic where there is a section `sac`.

    Args:
        ranks: this process among those that the model is sharded over; None: it is alone.

    Raises:
        RunError: the configuration asks for ranks, and there are none here.
    """
    if ranks is None and config.learner.ranks > 1:
        raise RunError(
            f"learner.ranks = {config.learner.ranks} needs the processes of `mage train`: set it "
            "to 1 here"
        )
    if ranks is not None:
        return _ranked(config, model, ranks, max_staleness)
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


def _ranked(config: Config, model: PreTrainedModel, ranks: Ranks, max_staleness: int) -> Trainer:
    from mage_async.learning.ranks.ranked_trainer import RankedTrainer  # takes a second

    return RankedTrainer(
        model,
        config.learner,
        config.sampling.temperature,
        config.seed,
        ranks=ranks,
        max_staleness=max_staleness,
        strategy_temperature=config.sampling.strategy_temperature,
    )
