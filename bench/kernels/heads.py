"""Measure time, memory and error of the LM head's log-probs: our kernels, others', hardware limits.

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
"""Number of tokens of Qwen's vocabulary."""
# (tokens, width)
SHAPES = ((8192, 1024), (32768, 1024), (16384, 2560), (16384, 4096))
NUM_CHECKED = 256
"""Number of tokens whose log-probs and gradients, and of vocabulary entries whose gradients, are
compared with fp64."""


@dataclass(frozen=True, slots=True)
class Case:
    """Sizes and data of one measurement."""

    num_tokens: int
    width: int
    vocabulary: int
    logits: str
    """"flat": the softmax is nearly uniform; "peaked": most of its mass is on the token, as in a
    trained model."""
    masked: float
    """Share of masked tokens."""

    @classmethod
    def flat(cls, num_tokens: int, width: int, vocabulary: int) -> "Case":
        """Return a case with a nearly uniform softmax and without a mask."""
        return cls(num_tokens, width, vocabulary, "flat", 0.0)

    def name(self) -> str:
        """Return the name in table and baseline."""
        shape = f"T={self.num_tokens} D={self.width} V={self.vocabulary}"
        return f"{shape} {self.logits} masked={self.masked:g}"


class Data(NamedTuple):
    """Hold the inputs of every implementation, and the gradients of its outputs."""

    hidden: Tensor
    head: Tensor
    tokens: Tensor
    mask: Tensor
    host_mask: Tensor
    """`mask` on the CPU, where the packing code of a run makes it."""
    gradients: tuple[Tensor, Tensor]
    """Of log-probs and of entropies, each `[T]`; 0 at masked tokens."""


def make_data(case: Case, device: str, dtype: torch.dtype) -> Data:
    """Make random inputs. The LM head's rows have about unit length, so that adding `pull` times a
    token's row to its hidden state makes its logit about `pull`.
    """
    generator = torch.Generator(device).manual_seed(0)
    normal = partial(torch.randn, generator=generator, device=device)
    head = (normal(case.vocabulary, case.width) / case.width**0.5).to(dtype)
    tokens = torch.randint(case.vocabulary, (case.num_tokens,), generator=generator, device=device)
    pull = 16.0 if case.logits == "peaked" else 0.0
    hidden = (normal(case.num_tokens, case.width) + pull * head[tokens].float()).to(dtype)
    mask = torch.rand(case.num_tokens, generator=generator, device=device) >= case.masked
    slopes = torch.where(mask, normal(2, case.num_tokens), 0.0)
    return Data(hidden, head, tokens, mask, mask.cpu(), (slopes[0], slopes[1]))


def step(implementation: LogprobFn, data: Data) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
    """Run forward and backward; return outputs, and gradients of hidden states and LM head."""
    hidden, head = data.hidden.detach().requires_grad_(), data.head.detach().requires_grad_()
    results = implementation(hidden, head, data.tokens, data.mask)
    # An implementation that computes no entropies returns log-probs alone.
    slopes = [
        slope.to(result.dtype) for slope, result in zip(data.gradients, results, strict=False)
    ]
    torch.autograd.backward(results, slopes)
    return results, hidden.grad, head.grad


def single_pass(data: Data) -> None:
    """Run our single-pass policy loss with an entropy bonus on the same tokens."""
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
    """Measure all implementations on one case; print the table and return the figures."""
    print(case.name())
    data = make_data(case, device, dtype)
    true = Truth(data)
    found: dict[str, Any] = {}
    implementations: dict[str, Callable[[], object]] = {}
    for name, implementation in [
        *ours(data.host_mask, case.vocabulary).items(),
        *other_implementations(device),
    ]:
        if isinstance(implementation, str):
            found[name] = {"absent": implementation}
            continue
        failure, found[name] = checked(implementation, data, true, is_ours=name.startswith("ours"))
        if device == "cuda":
            torch.cuda.empty_cache()  # after one ran out of memory, memory is fragmented
        if failure is None:
            implementations[name] = partial(step, implementation, data)
    implementations["ours, single pass"] = partial(single_pass, data)
    gradient_bytes = (data.hidden.numel() + data.head.numel()) * data.hidden.itemsize
    for name, timing in timings(implementations, device=device, rounds=rounds).items():
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
    """Return our least median time over the others' least, whatever their errors are."""
    times = {name: made["median_ms"] for name, made in found.items() if "median_ms" in made}
    ours = [time for name, time in times.items() if name.startswith("ours")]
    others = [time for name, time in times.items() if not name.startswith("ours")]
    return min(ours) / min(others, default=float("nan"))


def checked(
    implementation: LogprobFn, data: Data, true: "Truth", *, is_ours: bool
) -> tuple[str | None, dict[str, Any]]:
    """Return (None, errors), or the reason that another project's implementation fails here."""
    if is_ours:
        return None, true.errors(*step(implementation, data))
    try:
        return None, true.errors(*step(implementation, data))
    except FAILURES as error:
        reason = f"failed: {type(error).__name__}: {str(error).splitlines()[0]}"
        return reason, {"absent": reason}


def tflop_per_s(case: Case, timing: Timing) -> float:
    """Return the rate as if exactly three GEMMs over the unmasked tokens had been computed."""
    flop = 6 * case.num_tokens * (1 - case.masked) * case.width * case.vocabulary
    return round(flop / timing.median_ms / 1e9, 1)


def note(figures: dict[str, Any]) -> str:
    """Return the last column of the table: rate and errors."""
    parts = [f"{figures['tflop_s']:.4g} TFLOP/s"]
    parts += [f"{key} {figures[key]:.1e}" for key in ("logprob_max", "d_head") if key in figures]
    return ", ".join(parts)


class Truth:
    """Compute some of the results in fp64: log-probs, entropies and hidden states' gradients of a
    sample of tokens, and the LM head's gradients of a sample of vocabulary entries."""

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
        """Return the gradient of the logits, `[rows, V]`.

        Args:
            slope: Incoming gradient of each row's log-prob.
            pull: Incoming gradient of each row's entropy.
            with_entropy: Whether the entropy has a gradient.
        """
        probs = logprobs.exp()
        gradient = -slope[:, None] * probs
        gradient[torch.arange(len(tokens)), tokens] += slope
        if with_entropy:
            entropy = -(probs * logprobs).sum(-1, keepdim=True)
            gradient -= pull[:, None] * probs * (logprobs + entropy)
        return gradient

    def _d_head(self, with_entropy: bool) -> Tensor:
        """Return the gradient of the LM head at the sampled entries, over all tokens."""
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
    """Return the relative error in the Frobenius norm."""
    return float((ours.double() - true).norm() / true.norm())


def ceilings(device: str, rounds: int) -> dict[str, Any]:
    """Measure the rates of one large GEMM and of one large copy, which bound what is possible."""
    size, dtype = (8192, torch.bfloat16) if device == "cuda" else (512, torch.float32)
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    source = torch.empty(size * size * 16, device=device, dtype=dtype)
    target = torch.empty_like(source)
    implementations = {"GEMM": lambda: left @ right, "copy": lambda: target.copy_(source)}
    found = timings(implementations, device=device, rounds=rounds)
    tflop_s = 2 * size**3 / found["GEMM"].median_ms / 1e9
    gb_s = 2 * source.numel() * source.itemsize / found["copy"].median_ms / 1e6
    print(f"ceilings: GEMM {tflop_s:.4g} TFLOP/s, copy {gb_s:.4g} GB/s")
    return {"gemm_tflop_s": round(tflop_s, 3), "copy_gb_s": round(gb_s, 1)}
