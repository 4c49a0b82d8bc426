"""The head: time, memory and error of ours beside the anchors, with the ceilings of the same run.

Shapes: `T` tokens, `V` vocabulary, `D` hidden.
"""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from bench.kernels.implementations import FAILURES, LogprobFn, other_implementations, ours
from bench.kernels.timing import Timing, timings
from mage_kernels import Surrogate, TokenData, linear_policy_loss

if TYPE_CHECKING:
    from collections.abc import Callable

VOCABULARY = 151_936
SHAPES = ((8192, 1024), (32768, 1024), (16384, 2560), (16384, 4096))
NUM_CHECKED = 256
"""Rows whose log-probs and dX, and columns whose dW, are held against fp64."""


@dataclass(frozen=True, slots=True)
class Case:
    """One measured situation."""

    num_tokens: int
    width: int
    vocabulary: int
    logits: str
    """"flat": near-uniform softmax; "peaked": most of it on the token, as in a trained model"""
    masked: float

    @classmethod
    def flat(cls, num_tokens: int, width: int, vocabulary: int) -> "Case":
        """The plainest, without a mask."""
        return cls(num_tokens, width, vocabulary, "flat", 0.0)

    def name(self) -> str:
        """A key in the baseline."""
        shape = f"T={self.num_tokens} D={self.width} V={self.vocabulary}"
        return f"{shape} {self.logits} masked={self.masked:g}"


class Data(NamedTuple):
    """What every way is given."""

    hidden: Tensor
    head: Tensor
    tokens: Tensor
    mask: Tensor
    host_mask: Tensor
    gradients: tuple[Tensor, Tensor]
    """For log-prob and entropy, 0 at masked tokens."""


def make_data(case: Case, device: str, dtype: torch.dtype) -> Data:
    """Head rows of about unit length, so that the token's logit is the size of its pull."""
    generator = torch.Generator(device).manual_seed(0)
    normal = partial(torch.randn, generator=generator, device=device)
    head = (normal(case.vocabulary, case.width) / case.width**0.5).to(dtype)
    tokens = torch.randint(case.vocabulary, (case.num_tokens,), generator=generator, device=device)
    pull = 16.0 if case.logits == "peaked" else 0.0
    hidden = (normal(case.num_tokens, case.width) + pull * head[tokens].float()).to(dtype)
    mask = torch.rand(case.num_tokens, generator=generator, device=device) >= case.masked
    slopes = torch.where(mask, normal(2, case.num_tokens), 0.0)
    return Data(hidden, head, tokens, mask, mask.cpu(), (slopes[0], slopes[1]))


def step(way: LogprobFn, data: Data) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
    """Forward and backward of one way; its results and gradients."""
    hidden, head = data.hidden.detach().requires_grad_(), data.head.detach().requires_grad_()
    results = way(hidden, head, data.tokens, data.mask)
    slopes = [
        slope.to(result.dtype) for slope, result in zip(data.gradients, results, strict=False)
    ]
    torch.autograd.backward(results, slopes)
    return results, hidden.grad, head.grad


def single_pass(data: Data) -> None:
    """Our policy loss on the same tokens, with an entropy bonus."""
    hidden, head = data.hidden.detach().requires_grad_(), data.head.detach().requires_grad_()
    behaviour = torch.zeros_like(data.gradients[0])
    linear_policy_loss(
        hidden,
        head,
        data.tokens,
        TokenData(data.gradients[0], behaviour, entropy_rates=torch.full_like(behaviour, 0.01)),
        Surrogate(),
        float(max(1, data.host_mask.sum())),
        mask=data.host_mask,
    ).loss.backward()


def measure(case: Case, *, device: str, rounds: int, dtype: torch.dtype) -> dict[str, Any]:
    """All ways on one case: print the table, give the figures."""
    print(case.name())
    data = make_data(case, device, dtype)
    true = Truth(data)
    found: dict[str, Any] = {}
    ways: dict[str, Callable[[], object]] = {}
    for name, way in [
        *ours(data.host_mask, case.vocabulary).items(),
        *other_implementations(device),
    ]:
        if isinstance(way, str):
            found[name] = {"absent": way}
            continue
        failure, found[name] = checked(way, data, true, is_ours=name.startswith("ours"))
        if device == "cuda":
            torch.cuda.empty_cache()  # a way that ran out of memory leaves it in pieces
        if failure is None:
            ways[name] = partial(step, way, data)
    ways["ours, single pass"] = partial(single_pass, data)
    gradient_bytes = (data.hidden.numel() + data.head.numel()) * data.hidden.itemsize
    for name, timing in timings(ways, device=device, rounds=rounds).items():
        found[name] = found.get(name, {}) | timing.figures()
        found[name]["tflop_s"] = tflop_per_s(case, timing)
        if timing.peak_bytes is not None:
            found[name]["extra_bytes"] = timing.peak_bytes - gradient_bytes
        print(timing.line(name, note(found[name])))
    for name, figures in found.items():
        if "absent" in figures:
            print(f"  {name:34} {figures['absent']}")
    print(f"  the best of ours over the best of the others: {best_over_best(found):.2f}")
    return found


def best_over_best(found: dict[str, Any]) -> float:
    """Median times; an anchor counts whatever its error is."""
    times = {name: made["median_ms"] for name, made in found.items() if "median_ms" in made}
    ours = [time for name, time in times.items() if name.startswith("ours")]
    others = [time for name, time in times.items() if not name.startswith("ours")]
    return min(ours) / min(others, default=float("nan"))


def checked(
    way: LogprobFn, data: Data, true: "Truth", *, is_ours: bool
) -> tuple[str | None, dict[str, Any]]:
    """Errors of one way; or why another project's cannot run here."""
    if is_ours:
        return None, true.errors(*step(way, data))
    try:
        return None, true.errors(*step(way, data))
    except FAILURES as error:
        reason = f"failed: {type(error).__name__}: {str(error).splitlines()[0]}"
        return reason, {"absent": reason}


def tflop_per_s(case: Case, timing: Timing) -> float:
    """By three GEMMs over the tokens that count, whatever a way really computes."""
    flop = 6 * case.num_tokens * (1 - case.masked) * case.width * case.vocabulary
    return round(flop / timing.median_ms / 1e9, 1)


def note(figures: dict[str, Any]) -> str:
    """Errors and rate, for the table."""
    parts = [f"{figures['tflop_s']:.4g} TFLOP/s"]
    parts += [f"{key} {figures[key]:.1e}" for key in ("logprob_max", "d_head") if key in figures]
    return ", ".join(parts)


class Truth:
    """fp64 on a sample: some rows for log-probs, entropies and dX, some columns for dW."""

    def __init__(self, data: Data) -> None:
        self.data = data
        counted = data.mask.nonzero().squeeze(1)
        self.rows = counted[:: max(1, len(counted) // NUM_CHECKED)]
        self.columns = torch.arange(
            0, len(data.head), max(1, len(data.head) // NUM_CHECKED), device=data.head.device
        )
        hidden, head = data.hidden[self.rows].double(), data.head.double()
        logprobs = (hidden @ head.T).log_softmax(-1)
        self.entropy = -(logprobs.exp() * logprobs).sum(-1)
        tokens, slopes = data.tokens[self.rows], [g[self.rows] for g in data.gradients]
        self.logprob = logprobs.gather(1, tokens[:, None]).squeeze(1)
        self.d_hidden = {
            with_entropy: self._gradient(logprobs, tokens, *slopes, with_entropy) @ head
            for with_entropy in (False, True)
        }
        self.d_head = {flag: self._d_head(flag) for flag in (False, True)}

    @staticmethod
    def _gradient(
        logprobs: Tensor, tokens: Tensor, slope: Tensor, pull: Tensor, with_entropy: bool
    ) -> Tensor:
        probs = logprobs.exp()
        gradient = -slope[:, None] * probs
        gradient[torch.arange(len(tokens)), tokens] += slope
        if with_entropy:
            entropy = -(probs * logprobs).sum(-1, keepdim=True)
            gradient -= pull[:, None] * probs * (logprobs + entropy)
        return gradient

    def _d_head(self, with_entropy: bool) -> Tensor:
        total = torch.zeros(len(self.columns), self.data.hidden.shape[1]).double()
        total = total.to(self.data.head.device)
        head = self.data.head.double()
        for rows in torch.arange(len(self.data.hidden)).split(512):
            hidden = self.data.hidden[rows].double()
            slopes = [gradient[rows] for gradient in self.data.gradients]
            logprobs = (hidden @ head.T).log_softmax(-1)
            gradient = self._gradient(logprobs, self.data.tokens[rows], *slopes, with_entropy)
            total += gradient[:, self.columns].T @ hidden
        return total

    def errors(
        self, results: tuple[Tensor, ...], d_hidden: Tensor, d_head: Tensor
    ) -> dict[str, float]:
        """Errors: absolute for log-prob and entropy, relative Frobenius for gradients."""
        error = results[0].detach()[self.rows].double() - self.logprob
        has_entropy = len(results) > 1
        found = {
            "logprob_max": float(error.abs().max()),
            "logprob_rms": float(error.square().mean().sqrt()),
            "logprob_mean": float(error.mean()),
            "d_hidden": relative(d_hidden[self.rows], self.d_hidden[has_entropy]),
            "d_head": relative(d_head[self.columns], self.d_head[has_entropy]),
        }
        if has_entropy:
            wrong = results[1].detach()[self.rows].double() - self.entropy
            found["entropy_max"] = float(wrong.abs().max())
        return found


def relative(ours: Tensor, true: Tensor) -> float:
    """Relative Frobenius error."""
    return float((ours.double() - true).norm() / true.norm())


def ceilings(device: str, rounds: int) -> dict[str, Any]:
    """What the machine gives at best: one large GEMM, one large copy."""
    size, dtype = (8192, torch.bfloat16) if device == "cuda" else (512, torch.float32)
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    source = torch.empty(size * size * 16, device=device, dtype=dtype)
    target = torch.empty_like(source)
    ways = {"GEMM": lambda: left @ right, "copy": lambda: target.copy_(source)}
    found = timings(ways, device=device, rounds=rounds)
    tflop_s = 2 * size**3 / found["GEMM"].median_ms / 1e9
    gb_s = 2 * source.numel() * source.itemsize / found["copy"].median_ms / 1e6
    print(f"ceilings: GEMM {tflop_s:.4g} TFLOP/s, copy {gb_s:.4g} GB/s")
    return {"gemm_tflop_s": round(tflop_s, 3), "copy_gb_s": round(gb_s, 1)}
