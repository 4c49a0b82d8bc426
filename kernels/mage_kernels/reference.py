"""The specification, in plain PyTorch: what every kernel here must compute.

Written to be read and trusted, not to be fast. Given fp64 it computes in fp64, else in fp32, and
the whole `[T, V]` matrix of logits exists. Differentiable by autograd.

Shapes: `T` tokens, `V` vocabulary, `D` hidden, `N` turns, `M` trials.
"""

import torch
from torch import Tensor

from mage_kernels.surrogate import Surrogate, TokenData, TokenTerms, token_terms


def computing_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 stays fp64; everything else is computed in fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def column(inverse_temperature: float | Tensor, dtype: torch.dtype) -> float | Tensor:
    """One number, or `[T, 1]`: what a `[T, V]` matrix is multiplied with."""
    if isinstance(inverse_temperature, Tensor) and inverse_temperature.ndim:
        return inverse_temperature.to(dtype)[:, None]
    return inverse_temperature


def linear_logprob(
    hidden: Tensor, head: Tensor, tokens: Tensor, inverse_temperature: float | Tensor = 1.0
) -> tuple[Tensor, Tensor]:
    """Log-prob of each token and entropy of the distribution it was drawn from, in nats.

    The distribution is `softmax(inverse_temperature * hidden @ head.T)`; `inverse_temperature` is
    one number or `[T]`.

    Args:
        hidden: `[T, D]`.
        head: `[V, D]`.
        tokens: `[T]`, int64.

    Returns:
        log-prob `[T]` and entropy `[T]`, fp32, or fp64 for fp64 inputs.
    """
    dtype = computing_dtype(hidden.dtype)
    logits = hidden.to(dtype) @ head.to(dtype).T  # [T, V]
    return token_logprob_and_entropy(logits, tokens, inverse_temperature)


def token_logprob_and_entropy(
    logits: Tensor, tokens: Tensor, inverse_temperature: float | Tensor = 1.0
) -> tuple[Tensor, Tensor]:
    """The same from logits `[T, V]` that exist already; one of -inf is never drawn."""
    dtype = computing_dtype(logits.dtype)
    logits = logits.to(dtype) * column(inverse_temperature, dtype)
    logprobs = logits.log_softmax(-1)  # [T, V]
    probs = logprobs.exp()
    finite = torch.where(probs > 0, logprobs, 0.0)  # 0 log 0 is 0
    return logprobs.gather(-1, tokens[:, None]).squeeze(-1), -(probs * finite).sum(-1)


def shard_partials(
    hidden: Tensor,
    shard: Tensor,
    tokens: Tensor,
    first_row: int,
    inverse_temperature: float | Tensor = 1.0,
) -> Tensor:
    """What a rank with some rows of the head contributes to log-prob and entropy of each token.

    Args:
        hidden: `[T, D]`, the same on all ranks.
        shard: `[S, D]`: rows `first_row .. first_row + S` of the head.
        tokens: `[T]`, int64, counted over the whole vocabulary.

    Returns:
        `[4, T]`: the largest logit `m`, `sum exp(l - m)`, `sum exp(l - m) l`, and the token's own
        logit where it lies in the shard, else 0.
    """
    dtype = computing_dtype(hidden.dtype)
    logits = hidden.to(dtype) @ shard.to(dtype).T * column(inverse_temperature, dtype)
    largest = logits.amax(-1)
    weights = (logits - largest[:, None]).exp()
    here = (tokens >= first_row) & (tokens < first_row + len(shard))
    own = logits.gather(-1, (tokens - first_row).where(here, 0)[:, None]).squeeze(-1)
    sums = weights.sum(-1), (weights * logits).sum(-1)
    return torch.stack([largest, *sums, own.where(here, 0.0)])


def combined_partials(partials: Tensor) -> Tensor:
    """Partials of several shards `[shards, 4, T]` as those of one: `[4, T]`.

    In whatever order and grouping, to rounding: so trees of ranks, or tiles of a kernel, may.
    """
    largest, total, weighted, own = partials.unbind(1)
    top = largest.amax(0)
    decay = (largest - top).exp()
    return torch.stack([top, (total * decay).sum(0), (weighted * decay).sum(0), own.sum(0)])


def logprob_and_entropy(whole: Tensor) -> tuple[Tensor, Tensor]:
    """Log-prob and entropy `[T]`, in nats, from the combined partials of all shards `[4, T]`."""
    largest, total, weighted, own = whole
    normaliser = largest + total.log()
    return own - normaliser, normaliser - weighted / total


def shard_gradients(
    hidden: Tensor,
    shard: Tensor,
    tokens: Tensor,
    first_row: int,
    whole: Tensor,
    d_logprob: Tensor,
    d_entropy: Tensor,
    inverse_temperature: float | Tensor = 1.0,
) -> tuple[Tensor, Tensor]:
    """A rank's part of dX `[T, D]`, to be summed over ranks, and its own dW `[S, D]`.

    Args:
        whole: `[4, T]`, the combined partials of all shards.
        d_logprob, d_entropy: `[T]`, gradients of the loss.
    """
    dtype = computing_dtype(hidden.dtype)
    scale = column(inverse_temperature, dtype)
    logits = hidden.to(dtype) @ shard.to(dtype).T * scale
    _, entropy = logprob_and_entropy(whole)
    logprobs = logits - (whole[0] + whole[1].log())[:, None]
    probs = logprobs.exp()
    gradient = -probs * (d_logprob[:, None] + d_entropy[:, None] * (logprobs + entropy[:, None]))
    row = torch.arange(first_row, first_row + len(shard), device=tokens.device)
    gradient = (gradient + d_logprob[:, None] * (tokens[:, None] == row)) * scale
    return gradient @ shard.to(dtype), gradient.T @ hidden.to(dtype)


def linear_policy_loss(
    hidden: Tensor,
    head: Tensor,
    tokens: Tensor,
    data: TokenData,
    loss: Surrogate,
    inverse_temperature: float | Tensor = 1.0,
) -> TokenTerms:
    """Terms of every token's policy loss; the loss proper is `terms.loss.sum() / normaliser`."""
    logprob, entropy = linear_logprob(hidden, head, tokens, inverse_temperature)
    return token_terms(logprob, entropy, data, loss)


def returns_to_go(
    rewards: Tensor,
    trials: Tensor,
    episodes: Tensor,
    is_reflection: Tensor,
    *,
    turn_discount: float,
    episode_discount: float,
) -> Tensor:
    """Discounted sum of rewards from each turn to the end of its trial, `[N]`.

    Between two acting turns of one episode the return decays by `turn_discount`, from one episode
    to the next once by `episode_discount`. A reflection earns nothing itself: it gets the return of
    the next acting turn, undiscounted.

    Args:
        rewards: `[N]`, one per turn; the turns of a trial are contiguous and in order of play.
        trials: `[N]`, which trial a turn belongs to; any numbers, equal where the trial is.
        episodes: `[N]`, the episode of each turn.
        is_reflection: `[N]`, bool.
    """
    returns = torch.zeros_like(rewards, dtype=computing_dtype(rewards.dtype))
    running, trial, episode = 0.0, None, None
    for n in reversed(range(len(rewards))):
        if trials[n] != trial:
            running, trial, episode = 0.0, trials[n], None
        if not is_reflection[n]:
            discount = turn_discount if episodes[n] == episode else episode_discount
            running, episode = rewards[n].to(returns.dtype) + discount * running, episodes[n]
        returns[n] = running
    return returns


def compared_within_keys(
    returns: Tensor,
    keys: Tensor,
    *,
    divide_by_std: bool,
    keep_singletons: bool,
    epsilon: float = 1e-6,
) -> Tensor:
    """Each turn's return against those of its key, `[N]`.

    Mean and, where asked, unbiased standard deviation in two passes. Equal returns give exactly 0.
    A key with one turn gives 0, or with `keep_singletons` the return itself (verl: over `1 +
    epsilon` where divided by std).
    """
    advantages = torch.zeros_like(returns)
    for key in keys.unique():
        members = keys == key
        values = returns[members]
        if len(values) == 1 and keep_singletons:
            advantages[members] = values / (1 + epsilon) if divide_by_std else values
        elif values.min() < values.max():
            deviations = values - values.mean()
            scale = deviations.square().sum().div(len(values) - 1).sqrt() + epsilon
            advantages[members] = deviations / scale if divide_by_std else deviations
    return advantages


def expanded_to_tokens(
    advantages: Tensor, starts: Tensor, stops: Tensor, num_tokens: int
) -> Tensor:
    """Turn n's advantage at tokens `starts[n]:stops[n]`, 0 elsewhere: fp32 `[num_tokens]`."""
    tokens = torch.zeros(num_tokens, dtype=advantages.dtype, device=advantages.device)
    for advantage, start, stop in zip(advantages, starts, stops, strict=True):
        tokens[start:stop] = advantage
    return tokens
