"""A trainer whose model is sharded over ranks: the same step as one process, to rounding.

Rank 0 deals every minibatch to the ranks and says how many passes each has to make; a rank with
fewer lends its weights to the others by passes without a gradient. The loss of a token is divided
by the tokens of the whole step, gradients are summed, and the norm is that over all ranks.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, cast

import numpy as np
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from transformers import PreTrainedModel

from mage_async.config.schema import Learner
from mage_async.config.sections.corrections import M2po
from mage_async.learning.corrections.catalogue import correction
from mage_async.learning.forward import Row, hidden_states
from mage_async.learning.layout import Layout
from mage_async.learning.optimizer import KEY
from mage_async.learning.packing import Sequenced
from mage_async.learning.passes import Pass
from mage_async.learning.ranks.orders import Forward, Gather, GatherState, Order, Ranks, Step
from mage_async.learning.ranks.reports import read_report, report_of, size_of
from mage_async.learning.ranks.second_moment import largest_set_of_all
from mage_async.learning.ranks.sharding import (
    shard,
    sharded_as,
    sharded_moments,
    whole,
    whole_moments,
)
from mage_async.learning.ranks.shares import dealt, packed, unpacked
from mage_async.learning.step_metrics import Update, mismatch, step_metrics
from mage_async.learning.token_loss import LossPass, TwoSteps
from mage_async.learning.trainer import Trainer


@dataclass(frozen=True, slots=True)
class Work:
    """What one rank does in a step."""

    shares: list[list[Sequenced]]
    """Of each minibatch."""
    num_passes: list[int]
    """Which every rank makes of it."""
    scale: float

    def order(self) -> Step:
        """The same, for a follower."""
        return Step([packed(share) for share in self.shares], self.num_passes, self.scale)


class RankedTrainer(Trainer):
    """One rank's part of a trainer. Rank 0 has the methods of any trainer and tells the others,
    which `follow`.
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
        self._whole = copy.deepcopy(model) if ranks.number == 0 else None
        self._is_gathered = True
        """Whether rank 0's whole model has the weights of this version."""
        shard(model, init_device_mesh(ranks.device_type, (ranks.count,)))
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
        self._grow()
        return metrics

    def parity(self, sequences: Sequence[Sequenced]) -> dict[str, float]:
        """As a trainer's; rank 0 computes all of it."""
        passes = self.passes(sequences)
        self._ranks.tell_all(Forward(len(passes)))
        metrics = mismatch([self.begun(each) for each in passes], self.version)
        self._sharded.reshard()
        return metrics

    def whole(self) -> PreTrainedModel:
        """A model of rank 0's that no rank trains, with the weights of this version."""
        assert self._whole is not None, "only rank 0 has a whole model"
        if not self._is_gathered:
            self._ranks.tell_all(Gather())
            self._gather()
        return self._whole

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps beside the weights: as of one process."""
        self._ranks.tell_all(GatherState())
        kept = super().state()
        kept["optimizer"] = whole_moments(kept["optimizer"])
        if KEY in kept:
            kept[KEY] = [whole(each).cpu() for each in kept[KEY]]
        return kept

    def restore(self, state: dict[str, Any]) -> None:
        """Take back what `state` gave, be it of another number of ranks; every rank is given it."""
        own = state | {"optimizer": sharded_moments(state["optimizer"], self.masters.trained)}
        masters = self.masters.tensors()
        if len(state.get(KEY, [])) == len(masters) > 0:
            pairs = zip(state[KEY], masters, strict=True)
            own[KEY] = [sharded_as(value, like) for value, like in pairs]
        super().restore(own)

    def follow(self, order: Order) -> None:
        """Do, as a follower, what rank 0 does at the same time."""
        match order:
            case Step():
                self._follow_step(order)
            case Forward():
                self._lend(order.num_passes)
                self._sharded.reshard()
            case Gather():
                self._gather()
            case GatherState():
                self.state()

    def passes(self, sequences: Sequence[Sequenced]) -> list[Pass]:
        """A rank's share of a minibatch, which may be nothing."""
        return super().passes(sequences) if sequences else []

    def _loss_pass(self, rules: Learner) -> LossPass:
        if not isinstance(rules.correction, M2po):
            return super()._loss_pass(rules)
        return TwoSteps(partial(correction(rules.correction), largest=largest_set_of_all), rules.kl)

    @property
    def _sharded(self) -> FSDPModule:
        return cast("FSDPModule", self.model)

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

    def _follow_step(self, order: Step) -> None:
        shares = [unpacked(each, self.model.device) for each in order.shares]
        updates = self._train(Work(shares, order.num_passes, order.scale))
        report = report_of([each for update in updates for each in update.passes])
        if len(report):
            distributed.send(report, 0)
        self._grow()

    def _train(self, work: Work) -> list[Update]:
        """This rank's part of a step."""
        first, *others = [self.passes(share) for share in work.shares]
        counts = work.num_passes
        begun = [self._begun(*each) for each in zip(others, counts[1:], strict=True)]
        self._set_rate()
        minibatches = zip([first, *begun], counts, strict=True)
        return [self._share_update(passes, count, work.scale) for passes, count in minibatches]

    def _begun(self, passes: Sequence[Pass], num_passes: int) -> list[Pass]:
        begun = [self.begun(each) for each in passes]
        self._lend(num_passes - len(passes))
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

    @torch.no_grad()
    def _lend(self, num_passes: int) -> None:
        """Take part in forwards of other ranks."""
        for _ in range(num_passes):
            hidden_states(self.model, self._short_row())

    def _nothing(self) -> torch.Tensor:
        """A loss of 0 whose backward reaches every weight."""
        states = hidden_states(self.model, self._short_row())
        head = self.model.get_output_embeddings().weight
        if isinstance(self._rules.correction, M2po):
            largest_set_of_all(torch.zeros(0, device=states.device), 0.0)
        return 0.0 * (states.float().sum() + head.float().sum())

    def _short_row(self) -> Row:
        layout = Layout.of([np.zeros(1, np.int32)], shares_opening=False)
        return Row.of(layout, self.model.device)

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

    @torch.no_grad()
    def _gather(self) -> None:
        """Write all weights into rank 0's model, a tensor at a time, by all ranks together."""
        named = {} if self._whole is None else dict(self._whole.named_parameters())
        for name, weight in self.model.named_parameters():
            values = whole(weight.detach())
            if named:
                named[name].copy_(values)
        self._is_gathered = True

    def _grow(self) -> None:
        self.version += 1
        self._is_gathered = False
