"""Compute the return of each turn of a trial from the trial's rewards; one class per rule.

Such a rule is called a credit. Its class is also its configuration: the fields are the keys of
`[credit]`. To add a credit, copy a class and give it a `tag`, which is its name.

Notation: r[k,t] is the reward of turn t of episode k, n[k] the number of its turns, R[k] their
undiscounted sum, K the last episode played, d = `turn_discount` and g = `episode_discount`. Every
credit first decides what a turn is *paid*, p[k,t]; its return G[k,t] is the discounted sum of what
is paid from there on. Remarks, such as a reflection, are paid nothing:
`mage_async/credit/turn_table.py` gives each the return of the next action, undiscounted.

Returns of later episodes are discounted in one of two forms. *Chained* (the code of LaMer and
MAGE): the last turn of an episode adds g G[k+1,0], which the discount per turn reduces to
d^(n[k]-1-t) g G[k+1,0] at an earlier turn t.
*Added* (LaMer's paper): every turn of an episode adds g G[k+1,0], however far it is from the
episode's end.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, pairwise
from math import fsum, isfinite
from numbers import Real
from typing import ClassVar

from mage_async.config.section import Share, Variant
from mage_async.errors import ConfigError
from mage_async.user_modules import as_config_error, place_of

Rewards = Sequence[Sequence[float]]
"""Rewards of one trial: `rewards[episode][turn]`."""


@dataclass(frozen=True, slots=True)
class Returns:
    """Hold the returns of one trial's actions."""

    acts: list[list[float]]
    """`acts[episode][turn]`, ragged like the rewards."""
    scores: list[float]
    """`scores[episode]`: undiscounted sum of the amounts that are paid for the episode's own turns.
    """


class Credit(Variant):
    """Compute the return of each turn from the rewards of its trial."""

    turn_discount: Share = 1.0
    """Discount per turn, inside an episode."""

    is_added: ClassVar[bool] = False
    """Whether returns of later episodes are added (see above); if not, they are chained."""

    def paid(self, rewards: Rewards) -> Rewards:
        """Return the amount that is paid for each turn; by default its reward."""
        return rewards

    def across_episodes(self) -> float:
        """Return the discount per episode; by default 0, so that later episodes do not count."""
        return 0.0

    def returns(self, rewards: Rewards) -> Returns:
        """Return the returns of one trial's actions.

        Args:
            rewards: `rewards[episode][turn]` of the actions, of episodes that were played.
        """
        paid = self.paid(rewards)
        acts: list[list[float]] = []
        ahead = 0.0  # return of the first turn of the episode after this one
        for episode in reversed(paid):
            assert episode, "an episode has at least one turn"
            later, own = self.across_episodes() * ahead, list(episode)
            own[-1] += 0.0 if self.is_added else later
            for turn in range(len(own) - 2, -1, -1):
                own[turn] += self.turn_discount * own[turn + 1]
            acts.insert(0, [value + later for value in own] if self.is_added else own)
            ahead = acts[0][0]
        return Returns(acts, [fsum(episode) for episode in paid])

    def checked(self, rewards: Rewards) -> Returns:
        """Return the result of `returns`, and check it if the class is a user's own.

        Raises:
            ConfigError: a user's own class raised, or returned no finite number for a reward.
        """
        if ":" not in self.kind:
            return self.returns(rewards)
        what = f"credit {self.kind!r}"
        with as_config_error(what):
            found = self.returns(rewards)
        is_whole = False
        with suppress(TypeError):  # numbers in place of lists
            is_whole = isinstance(found, Returns) and (
                [len(each) for each in found.acts] == [len(each) for each in rewards]
                and len(found.scores) == len(rewards)
                and all(
                    isinstance(each, Real) and isfinite(each)
                    for each in chain(*found.acts, found.scores)
                )
            )
        if not is_whole:
            raise ConfigError(
                f"{what}: `returns`{place_of(type(self).returns)} returned {found!s:.200} for "
                f"the rewards {rewards!s:.100}: return Returns(acts, scores), with a finite "
                "number in `acts` for each reward, and in `scores` for each episode"
            )
        return found

    def try_out(self, num_episodes: int) -> None:
        """Credit a made-up trial, to find the mistakes of a user's own class before a run.

        Raises:
            ConfigError: as `checked`.
        """
        self.checked([[0.0] * (episode % 3) + [1.0] for episode in range(num_episodes)])


class AcrossEpisodes(Credit):
    """Credit an episode with later ones too; base class."""

    episode_discount: Share = 1.0
    """Discount per episode, between episodes."""

    def across_episodes(self) -> float:
        """Return the discount per episode, between episodes."""
        return self.episode_discount


class Differential(AcrossEpisodes, tag="differential"):
    """Pay the last turn of each episode its improvement on the episode before, as MAGE does."""

    # p[k,n[k]-1] = D[k] = R[k] - R[k-1], with D[0] = R[0]; chained (arXiv 2603.03680, differential
    # reward, as coded). The times of rewards inside an episode have no effect.
    #
    # With d = 1 the trial's objective is sum_k g^k D[k] = g^K R[K] + (1-g) sum_{k<K} g^k R[k]. Only
    # at g = 1 is it the last episode's reward alone. Otherwise three episodes have the weights
    # (1-g), g(1-g) and g^2: at the published g = 0.6 these are 0.40, 0.24 and 0.36, so the first
    # episode weighs more than the last.

    def paid(self, rewards: Rewards) -> Rewards:
        """Pay the last turn of each episode its gain."""
        totals = [fsum(episode) for episode in rewards]
        gains = [after - before for before, after in pairwise([0.0, *totals])]
        pairs = zip(rewards, gains, strict=True)
        return [[0.0] * (len(episode) - 1) + [gain] for episode, gain in pairs]


class DifferentialDense(AcrossEpisodes, tag="differential_dense"):
    """Keep the objective of "differential", with less noise: pay rewards at the turns that earned
    them.
    """

    # `differential` subtracts R[k] from what episode k+1 is paid, discounted once more by g. Here
    # the subtraction is made where the reward is earned: p[k,t] = (1-g) r[k,t] before the last
    # episode, p[K,t] = r[K,t] in it; chained. Then
    #
    #     G[k,t] = sum_{u>=t} d^(u-t) p[k,u] + d^(n[k]-1-t) g G[k+1,0]
    #
    # With d = 1, G[0,0] is the objective of `differential`, and every return is that of
    # `differential` minus a term known before the turn: sum_{u<t} p[k,u] - R[k-1]. So the expected
    # gradient is the same, but the noise is smaller: R[k-1] differs between the trials that share a
    # baseline, which therefore cannot remove it. At g = 1 the turns of earlier episodes get the
    # return of the last episode, and its own turns get their reward-to-go. With d < 1 the two
    # objectives differ: here a reward is discounted from its own turn, in `differential` from the
    # end of its episode.

    def paid(self, rewards: Rewards) -> Rewards:
        """Pay each turn its reward, before the last episode a share of it."""
        share = 1.0 - self.episode_discount
        early = [[share * reward for reward in episode] for episode in rewards[:-1]]
        return [*early, rewards[-1]]


class CumulativePaper(AcrossEpisodes, tag="cumulative_paper"):
    """Compute LaMer's returns as published: the discount of a later episode depends only on how
    many episodes later it is.
    """

    # p[k,t] = r[k,t]; added (arXiv 2512.16848): G[k,t] = G'[k,t] + sum_{m>k} g^(m-k) G'[m,0], where
    # G' is the return-to-go inside an episode.

    is_added: ClassVar[bool] = True


class CumulativeCode(AcrossEpisodes, tag="cumulative_code"):
    """Compute LaMer's returns as coded: later episodes are also discounted for each turn that is
    left in this one.
    """

    # p[k,t] = r[k,t]; chained. With d = 1 the objective is sum_k g^k R[k].


class SingleEpisode(Credit, tag="single_episode"):
    """Credit an episode with its own rewards only, as ordinary RL does (MAGE's ablation)."""


class FinalOnly(AcrossEpisodes, tag="final_only"):
    """Pay the last episode only; earlier ones are credited with the reward that they led to."""

    # p[K,t] = r[K,t] and nothing else; G[K,t] is its return-to-go and G[k,t] = g^(K-k) G[K,0] for
    # k < K: the added form. With g = d = 1 it is `differential_dense`.

    is_added: ClassVar[bool] = True

    def paid(self, rewards: Rewards) -> Rewards:
        """Pay each turn of the last episode its reward."""
        return [*([0.0] * len(episode) for episode in rewards[:-1]), rewards[-1]]
