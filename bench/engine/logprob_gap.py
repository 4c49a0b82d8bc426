"""Measure how far learner and engine differ in log-probs if both compute in bfloat16.

    python -m bench.engine.logprob_gap MODEL [--tokens 10000]        4 minutes of one core, 3 GB

`MODEL` is a HuggingFace directory; the benchmark adds LoRA adapters of rank 16 with random values.
Text of this repository's documentation, in sequences of 300 tokens, is scored

- by the learner;
- by the embedded engine, with merged weights;
- by the engine in sequences of half the length, whose matrix products have other shapes;
- by the engine one token at a time, as in sampling.

The program prints, and writes to `bench/baselines/`, the largest and the mean difference in nats.

Learner and engine round to bfloat16 at the same places, but sum in different orders. A difference
of 1e-7 before a rounding may become one of 4e-3 after it. So the engine that computes one token at
a time differs from the engine that computes whole sequences as much as the learner does.
"""

import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from bench.lib.baseline import ROOT, write_baseline
from bench.lib.options import option_parser
from mage_async.config.schema import Lora
from mage_async.inference.arithmetic import Kind
from mage_async.inference.model import Model, PolicyForward, Rows, forward_together
from mage_async.inference.weights import as_weights
from mage_async.learning.forward import head_inputs
from mage_async.learning.lora import adapted_layers, add_adapters, merged_tensors
from mage_async.learning.packing import TokenRow
from mage_async.policy.load import load_policy

LENGTH = 300
"""Tokens of a scored sequence."""
UPDATE = 0.002
"""Standard deviation of the adapters' B matrices, about that of a trained run."""


def sequences(model: Path, num_tokens: int) -> list[np.ndarray]:
    """Return `num_tokens` tokens of the documentation, as sequences of int32 [LENGTH]."""
    pages = sorted((ROOT / "docs").glob("*.md"))
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    ids = np.array(Tokenizer.from_file(str(model / "tokenizer.json")).encode(text).ids, np.int32)
    return [ids[first : first + LENGTH] for first in range(0, num_tokens, LENGTH)]


def learner_of(model: Path, dtype: Kind) -> PreTrainedModel:
    """Return the model with adapters whose B matrices are not zero, so that they change it."""
    policy = load_policy(model, dtype, "cpu")
    add_adapters(policy, Lora(rank=16), 0)
    torch.manual_seed(1)
    for layer in adapted_layers(policy).values():
        for up in layer.lora_B.values():
            torch.nn.init.normal_(up.weight, std=UPDATE)
    return policy


@torch.no_grad()
def by_learner(policy: PreTrainedModel, tokens: Iterable[np.ndarray]) -> torch.Tensor:
    """Return log-probs by the learner's forward: float32, all tokens of each but the first."""
    scored = []
    for each in tokens:
        row = TokenRow.of([each], torch.device("cpu"), predicted=[np.arange(1, len(each))])
        scored.append(head_inputs(policy, row, 1.0).logprobs()[0])
    return torch.cat(scored)


def by_engine(engine: Model, tokens: Iterable[np.ndarray]) -> torch.Tensor:
    """Return log-probs by the engine: float32, all tokens of each sequence but the first."""
    return torch.cat([engine.score(each) for each in tokens])


@torch.inference_mode()
def by_token(engine: Model, tokens: Iterable[np.ndarray]) -> torch.Tensor:
    """Return log-probs by one forward for each token: float32, as `by_engine`."""
    scored = []
    for each in tokens:
        for position in range(len(each) - 1):
            # One row: KV slot 0, the first position, one token. No prefixes are copied ({}), and
            # logits are wanted of row 0.
            rows = Rows(*(np.array([value]) for value in (0, position, 1)))
            token = each[position : position + 1]
            (logits,) = forward_together([PolicyForward(engine, token, rows, {}, np.array([0]))])
            scored.append(torch.log_softmax(logits, 1)[:, int(each[position + 1])])
    return torch.cat(scored)


def gap(one: torch.Tensor, other: torch.Tensor) -> dict[str, float]:
    """Return the largest and the mean absolute difference, in nats."""
    apart = (one - other).abs()
    return {"largest": float(apart.max()), "mean": float(apart.mean())}


def main() -> int:
    """Measure, print and write."""
    parser = option_parser(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=10_000)
    given = parser.parse_args()
    torch.set_num_threads(1)
    whole = sequences(given.model, given.tokens)
    half = [each[: LENGTH // 2] for each in whole]
    # The scores of whole sequences whose tokens are in the first halves too.
    is_in_half = torch.arange(LENGTH - 1).repeat(len(whole)) < LENGTH // 2 - 1
    gaps: dict[str, dict[str, float]] = {}
    scores: dict[Kind, torch.Tensor] = {}
    kinds: tuple[Kind, ...] = ("float32", "bfloat16")
    for kind in kinds:
        policy = learner_of(given.model, kind)
        engine = Model.load(given.model, slots=1, max_tokens=512, arithmetic=kind)
        named = merged_tensors(policy)
        engine.weights = as_weights(named, engine.architecture, "learner", engine.arithmetic)
        scores[kind] = by_engine(engine, whole)
        gaps[f"{kind}: learner to engine"] = gap(by_learner(policy, whole), scores[kind])
        gaps[f"{kind}: engine, half the length"] = gap(
            by_engine(engine, half), scores[kind][is_in_half]
        )
        first_two = whole[:2]
        one_by_one = by_token(engine, first_two)
        gaps[f"{kind}: engine, token by token"] = gap(one_by_one, scores[kind][: len(one_by_one)])
    gaps["engine: bfloat16 to float32"] = gap(scores["bfloat16"], scores["float32"])
    for name, figures in gaps.items():
        print(f"{name:30} largest {figures['largest']:.2e}  mean {figures['mean']:.2e}")
    tokens = len(scores["float32"])
    write_baseline("logprob_gap", {"model": given.model.name, "tokens": tokens, "nats": gaps})
    return 0


if __name__ == "__main__":
    sys.exit(main())
