"""How far two computations of the same log-probs lie apart in bfloat16.

    python -m bench.engine.bfloat16 MODEL [--tokens 10000]        4 minutes of one core, 3 GB

`MODEL` is a HuggingFace directory, which gets adapters of rank 16 with made-up values. Sequences of
300 tokens of this repository's documents are scored by the learner, by the embedded engine with the
merged weights, by the engine once more in sequences of half the length, so that the matrix products
of equal tokens have another shape, and by the engine a token at a time, as it draws them. Prints,
and writes to `bench/baselines/`, the largest and the mean difference in nats.

Learner and engine round at the same places in bfloat16, but add in another order. A difference of
1e-7 before a rounding may become one of 4e-3 after it, so the engine is as far from itself, when it
computes one token at a time, as the learner is from it.
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
from mage_async.config.policy import Lora
from mage_async.inference.arithmetic import Kind
from mage_async.inference.model import Model, Rows
from mage_async.inference.weights import as_weights
from mage_async.learning.adapters import adapted_layers, merged_tensors
from mage_async.learning.forward import token_logprobs
from mage_async.learning.packing import TokenRow
from mage_async.policy.load import load_policy
from mage_async.policy.lora import add_adapters

LENGTH = 300
UPDATE = 0.002
"""Standard deviation of the adapters' second matrices, about that of a trained run."""


def sequences(model: Path, num_tokens: int) -> list[np.ndarray]:
    """Return sequences of the documents' text: int32 [LENGTH] each."""
    pages = sorted((ROOT / "docs").glob("*.md"))
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    ids = np.array(Tokenizer.from_file(str(model / "tokenizer.json")).encode(text).ids, np.int32)
    return [ids[first : first + LENGTH] for first in range(0, num_tokens, LENGTH)]


def learner_of(model: Path, dtype: Kind) -> PreTrainedModel:
    """Return a policy with adapters that change it."""
    policy = load_policy(model, dtype, "cpu")
    add_adapters(policy, Lora(rank=16), 0)
    torch.manual_seed(1)
    for layer in adapted_layers(policy).values():
        for up in layer.lora_B.values():
            torch.nn.init.normal_(up.weight, std=UPDATE)
    return policy


@torch.no_grad()
def by_learner(policy: PreTrainedModel, tokens: Iterable[np.ndarray]) -> torch.Tensor:
    """Score each sequence by the forward that trains: float32, all tokens after the first."""
    scored = []
    for each in tokens:
        row = TokenRow.of([each], torch.device("cpu"), predicted=[np.arange(1, len(each))])
        scored.append(token_logprobs(policy, row, 1.0)[0])
    return torch.cat(scored)


def by_engine(engine: Model, tokens: Iterable[np.ndarray]) -> torch.Tensor:
    """Score each sequence by the engine: float32, all tokens after the first."""
    return torch.cat([engine.score(each) for each in tokens])


@torch.inference_mode()
def by_token(engine: Model, tokens: Iterable[np.ndarray]) -> torch.Tensor:
    """Score each sequence by one forward for each token: float32, all tokens after the first."""
    scored = []
    for each in tokens:
        for place in range(len(each) - 1):
            rows = Rows(*(np.array([value]) for value in (0, place, 1)))
            logits = engine.forward(each[place : place + 1], rows, {}, np.array([0]))
            scored.append(torch.log_softmax(logits, 1)[:, int(each[place + 1])])
    return torch.cat(scored)


def gap(one: torch.Tensor, other: torch.Tensor) -> dict[str, float]:
    """Return the largest and the mean difference, in nats."""
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
        few = whole[:2]
        one_by_one = by_token(engine, few)
        gaps[f"{kind}: engine, token by token"] = gap(one_by_one, scores[kind][: len(one_by_one)])
    gaps["engine: bfloat16 to float32"] = gap(scores["bfloat16"], scores["float32"])
    for name, figures in gaps.items():
        print(f"{name:30} largest {figures['largest']:.2e}  mean {figures['mean']:.2e}")
    tokens = len(scores["float32"])
    write_baseline("bfloat16", {"model": given.model.name, "tokens": tokens, "nats": gaps})
    return 0


if __name__ == "__main__":
    sys.exit(main())
