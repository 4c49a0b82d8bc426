"""A trainer whose model is sharded over ranks: the same step as one process, to rounding.

Rank 0 deals every minibatch to the ranks and says how many passes each has to make; a rank with
fewer lends its weights to the others by passes without a gradient. The loss of a token is divided
by the tokens of the whole step, gradients are summed, and the norm is that over all ranks.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from transformers import PreTrainedModel

from mage_async.config.schema import Learner
from mage_async.config.sections.corrections import M2po
from mage_async.learning.corrections.catalogue import correction
from mage_async.learning.optimizer import KEY
from mage_async.learning.packing import Sequenced
from mage_async.learning.passes import Pass
from mage_async.learning.ranks.lending import lend, nothing
from mage_async.learning.ranks.orders import Forward, Ranks, Step
from mage_async.learning.ranks.reports import read_report, report_of, size_of
from mage_async.learning.ranks.second_moment import largest_set_of_all
from mage_async.learning.ranks.sharding import shard, sharded_as, sharded_moments, whole
from mage_async.learning.ranks.shares import dealt, unpacked
from mage_async.learning.ranks.work import Work
from mage_async.learning.step_metrics import Update, step_metrics
from mage_async.learning.token_loss import LossPass, TwoSteps
from mage_async.learning.trainer import Trainer

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


class RankedTrainer(Trainer):
    """One rank's part of a trainer. Rank 0 has the methods of any trainer and tells the others,
    which `follow_step` and `lend`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        rules: Learner,
        temperature: float,
        seed: int,
        *,
        ranks: Ranks,
        max_staleness: int,
        strategy_temperature: float | None = None,
    ) -> None:
        """Shard a model, which every rank has loaded from the same files onto the host."""
        self._ranks = ranks
        self._mesh = init_device_mesh(ranks.device_type, (ranks.count,))
        shard(model, self._mesh)
        super().__init__(
            model,
            rules,
            temperature,
            seed,
            max_staleness=max_staleness,
            strategy_temperature=strategy_temperature,
        )

    def describe(self) -> str:
        """The model in a few words."""
        return f"{super().describe()}; sharded over {self._ranks.count} ranks"

    def step(self, sequences: Sequence[Sequenced]) -> dict[str, float]:
        """Train on a batch, with all ranks; the version grows by one. Returns metrics by name."""
        own, *others = self._dealt(sequences)
        self._ranks.tell([each.order() for each in others])
        laid = [[self._laid_out(share) for share in work.shares] for work in others]
        updates = self._train(own)
        for number, passes in enumerate(laid, start=1):
            updates = self._joined(updates, number, passes)
        metrics = step_metrics(updates, self.version, self._max_staleness)
        metrics["learning_rate"] = float(self.optimizer.param_groups[0]["lr"])
        self.version += 1
        return metrics

    def refer_to(self, model: PreTrainedModel) -> None:
        """As a trainer's; the model, which lies on the host of every rank, is sharded too."""
        shard(model, self._mesh)
        self.reference = model

    @contextmanager
    def read(self, num_forwards: int) -> Iterator[PreTrainedModel]:
        """As a trainer's, of rank 0 alone: the others lend it their weights."""
        self._ranks.tell_all(Forward(num_forwards))
        yield self.model
        _reshard(self.model)

    def restore(self, state: dict[str, Any]) -> None:
        """Take back what `state` gave, be it of another number of ranks; every rank is given it."""
        own = state | {"optimizer": sharded_moments(state["optimizer"], self.masters.trained)}
        masters = self.masters.tensors()
        if len(state.get(KEY, [])) == len(masters) > 0:
            pairs = zip(state[KEY], masters, strict=True)
            own[KEY] = [sharded_as(value, like) for value, like in pairs]
        super().restore(own)

    def lend(self, num_forwards: int) -> None:
        """Do, as a follower, what rank 0 does while it reads the model."""
        lend(self.model, num_forwards)
        _reshard(self.model)

    def follow_step(self, order: Step) -> None:
        """Do, as a follower, what rank 0 does in its step."""
        shares = [unpacked(each, self.model.device) for each in order.shares]
        updates = self._train(Work(shares, order.num_passes, order.scale))
        report = report_of([each for update in updates for each in update.passes])
        if len(report):
            distributed.send(report, 0)
        self.version += 1

    def _loss_pass(self, rules: Learner) -> LossPass:
        if not isinstance(rules.correction, M2po):
            return super()._loss_pass(rules)
        return TwoSteps(partial(correction(rules.correction), largest=largest_set_of_all), rules.kl)

    def _dealt(self, sequences: Sequence[Sequenced]) -> list[Work]:
        """What every rank does in a step."""
        chunks, count = self._chunks(sequences), self._ranks.count
        shares = [dealt(chunk, count) for chunk in chunks]
        num_passes = [max(len(self._cuts(share)) for share in each) for each in shares]
        scale = len(chunks) / max(1, sum(len(each.places) for each in sequences))
        return [Work([each[n] for each in shares], num_passes, scale) for n in range(count)]

    def _laid_out(self, share: Sequence[Sequenced]) -> list[Pass]:
        """The passes that another rank makes of its share."""
        return [self._laid(each) for each in self._cuts(share)] if share else []

    def _train(self, work: Work) -> list[Update]:
        """This rank's part of a step."""
        counts = work.num_passes
        first, *others = self._opened(work)
        begun = [self._begun(*each) for each in zip(others, counts[1:], strict=True)]
        self._set_rate()
        minibatches = zip([first, *begun], counts, strict=True)
        return [self._share_update(passes, count, work.scale) for passes, count in minibatches]

    def _opened(self, work: Work) -> list[list[Pass]]:
        """This rank's passes of each minibatch, which may be none, with what a reference policy
        says of them.
        """
        opened = [self.passes(share) if share else [] for share in work.shares]
        if self.reference is not None and self._rules.kl:
            lend(self.reference, sum(work.num_passes) - sum(map(len, opened)))
            _reshard(self.reference)
        return opened

    def _begun(self, passes: Sequence[Pass], num_passes: int) -> list[Pass]:
        begun = [self.begun(each) for each in passes]
        lend(self.model, num_passes - len(passes))
        return begun

    def _share_update(self, passes: Sequence[Pass], num_passes: int, scale: float) -> Update:
        """One optimizer update, of which this rank makes some passes."""
        self.optimizer.zero_grad(set_to_none=True)
        trained = [self._backward(each, scale) for each in passes]
        for _ in range(num_passes - len(passes)):
            self._nothing().backward()
        return Update(trained, self._apply())

    def _clip(self) -> torch.Tensor:
        """Over all ranks."""
        weights = self.masters.trained
        norm = whole(get_total_norm([each.grad for each in weights if each.grad is not None]))
        clip_grads_with_norm_(weights, self._rules.grad_clip, norm)
        return norm

    def _nothing(self) -> torch.Tensor:
        """A pass for the others' sake."""
        loss = nothing(self.model)
        if isinstance(self._rules.correction, M2po):
            largest_set_of_all(torch.zeros(0, device=loss.device), 0.0)
        return loss

    def _joined(
        self, updates: Sequence[Update], number: int, laid: Sequence[Sequence[Pass]]
    ) -> list[Update]:
        """Updates with what another rank did in them."""
        passes = list(chain.from_iterable(laid))
        report = torch.empty(size_of(passes), device=self.model.device)
        if len(report):
            distributed.recv(report, number)
        theirs = iter(read_report(report, passes))
        return [
            Update([*update.passes, *(next(theirs) for _ in own)], update.grad_norm)
            for update, own in zip(updates, laid, strict=True)
        ]


def _reshard(model: PreTrainedModel) -> None:
    """Let go of what a forward has left whole."""
    cast("FSDPModule", model).reshard()
