"""The forward that trains a step's first minibatch tells its log-probs at the step's beginning."""

import pytest
import torch

from mage_async.config import config_file
from mage_async.learning import token_loss
from mage_async.learning.attention import PACKED_ATTENTION
from mage_async.learning.packing import MicroBatch
from mage_async.learning.token_loss import HeadInputs
from mage_async.learning.trainer import Trainer
from tests.helpers.random_models import random_model, sequence

LENGTHS = (40, 31, 40, 22, 40, 13, 37)


class TwiceForward(Trainer):
    """The same, by a forward of its own for every micro-batch."""

    def micro_batches(self, sequences) -> list[MicroBatch]:
        return [self.with_proximal(each) for each in super().micro_batches(sequences)]

    def with_proximal(self, batch: MicroBatch, inputs: HeadInputs | None = None) -> MicroBatch:
        return batch if batch.proximal is not None else super().with_proximal(batch, inputs)


def trained(kind: type[Trainer], *changes: str) -> tuple[dict[str, float], list[torch.Tensor], int]:
    """Metrics and weights after a step, and how many forwards it took."""
    settings = ["learner.entropy=0.05", "learner.learning_rate=0.01", *changes]
    config = config_file.load(config_file.find(None), settings)
    model = random_model("Qwen3").train()
    model.set_attn_implementation(PACKED_ATTENTION)
    seen = []
    model.base_model.norm.register_forward_hook(lambda *_: seen.append(1))
    metrics = kind(model, config).step([sequence(n) for n in LENGTHS])
    return metrics, list(model.parameters()), len(seen)


@pytest.mark.parametrize(
    ("changes", "forwards", "saved"),
    [
        (("learner.minibatches=1",), 1, 1),
        (("learner.minibatches=3",), 5, 1),
        (("learner.minibatches=1", "learner.max_tokens_per_microbatch=80"), 4, 4),
        (("learner.minibatches=2", "learner.activation_checkpointing=true"), 3, 1),
        (("learner.minibatches=2", "learner.correction=mis_sequence"), 3, 1),
    ],
)
@pytest.mark.parametrize("keeps_logits", [True, False])
def test_a_step_is_the_same_to_the_bit_with_fewer_forwards(
    changes: tuple[str, ...],
    forwards: int,
    saved: int,
    keeps_logits: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(token_loss, "keeps_logits", lambda *_: keeps_logits)
    metrics, weights, count = trained(Trainer, *changes)
    as_before, others, most = trained(TwiceForward, *changes)
    assert (count, most) == (forwards, forwards + saved)
    assert metrics == as_before
    assert all(torch.equal(one, other) for one, other in zip(weights, others, strict=True))
