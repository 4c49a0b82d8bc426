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
    logits = hidden.to(dtype) @ head.to(dtype).T * column(inverse_temperature, dtype)  # [T, V]
    logprobs = logits.log_softmax(-1)
    probs = logprobs.exp()
    return logprobs.gather(-1, tokens[:, None]).squeeze(-1), -(probs * logprobs).sum(-1)


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
