"""Turn trials into rows of tokens, and cut a minibatch into micro-batches.

`training_sequences` turns a batch of groups into sequences with advantages. `split_minibatch`
groups the sequences of a minibatch so that the memory of a step does not grow with the minibatch.
`MicroBatch.of` lays one such group of sequences into a single row of tokens, without padding, on
the learner's device.

A trial is a list of segments, contexts that only grow; a turn is one completion in a segment. A
training sequence is one segment. Some methods have an adviser: it names the action that it would
take instead of the sampled one, an *alternative*, which is not played.

Shapes: `T` tokens of a row, `S` sequences in it, `N` sampled tokens.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from mage_async.completion import with_roles, without_roles
from mage_async.config.schema import Config
from mage_async.credit.turn_table import TurnTable, build_table
from mage_async.errors import DeterministicFailure, RunError
from mage_async.learning.advantages import turn_advantages
from mage_async.learning.corrections import Tokens
from mage_async.methods.method import Methods
from mage_async.policy_version import PROVENANCES, VersionRun
from mage_async.restriction import AllowedSets
from mage_async.trajectory import Group, Kind, SecondRole, Segment, Trial, Turn, role_changes
from mage_kernels import at_tokens

if TYPE_CHECKING:
    from mage_async.learning.attention import Boundaries

# Trials to sequences.


class SampledTokens(NamedTuple):
    """Hold the actor's records of N sampled tokens, of one sequence or of a micro-batch."""

    logprobs: np.ndarray
    """float32 [N]: log-prob in nats under the behaviour policy."""
    policy_versions: np.ndarray
    """int32 [N]: version of the weights that sampled the token."""
    kv_versions: np.ndarray
    """int32 [N]: oldest version among the weights that computed the cached keys and values."""
    episodes: np.ndarray
    """int32 [N]: number of the token's episode in its trial, from 0."""
    kinds: np.ndarray
    """int32 [N]: `Kind` of the token's turn."""
    provenances: np.ndarray
    """int32 [N]: how the versions are known, an index into `PROVENANCES`."""


@dataclass(frozen=True, slots=True, eq=False)
class TrainingSequence:
    """Hold one segment of a trial (a context that only grows) up to its last sampled token, with
    the advantages of its turns.
    """

    tokens: np.ndarray
    """int32 [length]; tokens of the second role as `~token` (`completion.with_roles`)."""
    places: np.ndarray
    """int64 [n]: positions of the sampled tokens in `tokens`, ascending."""
    sampled: SampledTokens
    """The actor's record of these n tokens."""
    turn_lengths: np.ndarray
    """int64 [turns]: sampled tokens of each turn; they sum to n."""
    advantages: Tensor
    """float32 [turns], on the learner's device: by what the loss of each turn's tokens is
    multiplied, the turn's advantage times its weight (`trained_advantages`).
    """
    alternatives: Mapping[int, int] = field(default_factory=dict)
    """The token of an alternative action, by the position of the sampled token that it replaces."""
    allowed: AllowedSets | None = None
    """The sets that the sampled tokens were drawn from; None: all from the whole vocabulary."""
    weights: Tensor | None = None
    """float32 [turns], on the learner's device: the weight of each turn's tokens in the KL term
    (`loss_weights`); None: 1."""


def sequences_of(
    trials: Sequence[Trial],
    advantages: Tensor,
    *,
    weights: Tensor | None = None,
    second_role: SecondRole | None = None,
    kinds: Collection[Kind] = tuple(Kind),
) -> list[TrainingSequence]:
    """Make a training sequence of every segment of the trials, cut after its last trained token.

    A turn without a sampled token (only one action was legal) is left out, and so is a segment
    without a trained turn.

    Args:
        advantages: float32 [turns of all trials], in the order of each trial's `turns`.
        weights: float32, in the same order: the weight of each turn's tokens in the KL term; None:
            1.
        second_role: function that says which turns the second role took; None: there is one role.
        kinds: kinds of turns that are trained on.
    """
    segments: list[_TrainedSegment] = []
    order: list[int] = []  # numbers of the trained turns over all trials, segment by segment
    num_before = 0  # turns of the trials before
    for trial in trials:
        for segment in _trained_segments(trial, second_role, kinds):
            segments.append(segment)
            order += [num_before + number for number in segment.numbers]
        num_before += len(trial.turns)
    index = torch.tensor(order, dtype=torch.long, device=advantages.device)
    counts = [len(segment.turns) for segment in segments]
    pieces = advantages[index].split(counts)
    found = [_sequence(segment, piece) for segment, piece in zip(segments, pieces, strict=True)]
    if weights is None:
        return found
    pieces = weights[index].split(counts)
    return [replace(each, weights=piece) for each, piece in zip(found, pieces, strict=True)]


class _TrainedSegment(NamedTuple):
    """Hold a segment with trained turns, and these turns."""

    segment: Segment
    numbers: list[int]
    """Numbers of the trained turns within the trial."""
    turns: list[Turn]
    """The trained turns."""
    alternatives: dict[int, int]
    """See `TrainingSequence`."""
    changes: tuple[int, ...]
    """The indices at which the role changes."""


def _trained_segments(
    trial: Trial, second_role: SecondRole | None, kinds: Collection[Kind]
) -> Iterator[_TrainedSegment]:
    """Yield the segments of a trial with a trained turn, in order; see `sequences_of`."""
    for place, segment in enumerate(trial.segments):
        own = [each for each in enumerate(trial.turns) if each[1].segment == place]
        trained = [
            (number, turn)
            for number, turn in own
            if turn.kind in kinds and segment.is_sampled[turn.start : turn.stop].any()
        ]
        if not trained:
            continue
        alternatives = {
            advice.place: advice.token
            for advice in trial.alternatives
            # -1: the alternative is equal, or cannot be compared token by token
            if advice.place >= 0 and trial.turns[advice.turn].segment == place
        }
        changes: tuple[int, ...] = ()
        if second_role:
            changes = role_changes((turn for _, turn in own), trial.num_episodes, second_role)
        numbers, turns = [number for number, _ in trained], [turn for _, turn in trained]
        yield _TrainedSegment(segment, numbers, turns, alternatives, changes)


def training_sequences(
    groups: Sequence[Group], config: Config, device: torch.device | str, *, version: int
) -> list[TrainingSequence]:
    """Make the training sequences of a batch.

    Args:
        device: device that computes the advantages.
        version: version of the policy under training.

    Raises:
        DeterministicFailure: no token of the batch can be trained.
    """
    trials = [trial for group in groups for trial in group.trials]
    kinds = trained_kinds(config, version)
    advantages = trained_advantages(trials, credited(groups, config), config, device, kinds)
    weights, average = None, config.learner.average
    if config.learner.kl and average != "token":
        weights = torch.from_numpy(loss_weights(trials, average, kinds)).to(advantages)
    second_role = Methods(config).second_role()
    found = sequences_of(trials, advantages, weights=weights, second_role=second_role, kinds=kinds)
    if not found:
        names = ", ".join(sorted(kind.name.lower() for kind in kinds))
        most = config.transcript.max_action_tokens
        cut = sum(turn.is_cut_at(most) for trial in trials for turn in trial.turns)
        cause = (
            f"{cut} answers were cut at transcript.max_action_tokens = {most}, when they only had "
            "the tokens that the form of an answer prescribes: raise it"
            if cut
            else "check with `mage check` or `mage view` whether every turn has a single legal "
            "action, which is not sampled"
        )
        raise DeterministicFailure(
            f"none of the {len(trials)} trials of a batch has a sampled token in a turn that is "
            f"trained on ({names}), so there is nothing to learn from: {cause}"
        )
    return found


def trained_kinds(config: Config, version: int) -> set[Kind]:
    """Return the kinds of turns that a step trains on."""
    kinds = Methods(config).trained_kinds(version)
    return kinds if config.trial.train_notes else kinds - {Kind.NOTES}


def trained_advantages(
    trials: Sequence[Trial],
    table: TurnTable,
    config: Config,
    device: torch.device | str,
    kinds: Collection[Kind],
) -> Tensor:
    """Return the factor of each turn in the loss: its advantage times its weight in
    `learner.average`, and 0 for turns of kinds that are not trained on; float32 [turns].

    Args:
        trials: trials of a batch, with the turns of `table` in its order.
        device: device that computes the advantages.
        kinds: kinds of turns that the step trains (`trained_kinds`).
    """
    is_trained = np.isin(table.kind, [*kinds])
    # A mean over tokens is one over the tokens of the loss.
    table = replace(table, num_sampled=table.num_sampled * is_trained)
    advantages = batch_advantages(table, config, device)
    if config.learner.average == "token":
        return advantages.where(torch.from_numpy(is_trained).to(advantages.device), 0.0)
    weights = torch.from_numpy(loss_weights(trials, config.learner.average, kinds))
    return advantages * weights.to(advantages)


def loss_weights(
    trials: Sequence[Trial], average: str, kinds: Collection[Kind] = tuple(Kind)
) -> np.ndarray:
    """Return a weight for the tokens of each turn: float64 [turns of all trials].

    With these weights, the mean of the loss over all trained tokens, KL term included, becomes a
    mean over trials, or over turns and then trials. Clips depend on the sign of an advantage alone,
    so the policy loss of a token is proportional to its advantage, which is multiplied by the
    weight. (Under the correction `vcpo` it is not proportional; it refuses these means.)

    Args:
        average: "trial" is a mean over the tokens of each trial, then over trials (GRPO, arXiv
            2402.03300, eq. 3); "turn" a mean over the tokens of each turn, then over the turns of
            each kind in a trial, then over all these kinds and trials (arXiv 2503.09501, whose
            kinds of turns are roles).
        kinds: kinds of turns that are trained on.
    """
    lengths, terms = [], []  # a term of the outer mean is a trial, or its turns of one kind
    for number, trial in enumerate(trials):
        for turn, length in zip(trial.turns, trial.sampled_by_turn(), strict=True):
            lengths.append(length if turn.kind in kinds else 0)
            terms.append((number, turn.kind if average == "turn" else 0))
    tokens = np.array(lengths, np.float64)
    # Number of the term that each turn belongs to.
    term = np.unique(np.array(terms).reshape(-1, 2), axis=0, return_inverse=True)[1].reshape(-1)
    # Within its term a turn counts by its tokens, or once. A turn without a sampled token, as where
    # only one action was legal, has no loss.
    counts = (tokens > 0).astype(np.float64) if average == "turn" else tokens
    totals = np.bincount(term, counts)
    share = counts / np.maximum(totals, 1.0)[term] / max(1, int(np.count_nonzero(totals)))
    weights: np.ndarray = share * tokens.sum() / np.maximum(tokens, 1.0)
    return weights


def credited(groups: Sequence[Group], config: Config) -> TurnTable:
    """Tabulate all turns of a batch with their returns, as the configured credit computes them."""
    methods = Methods(config)
    return build_table(
        groups,
        config.credit,
        exploration_share=methods.early_share(),
        bonuses=methods.turn_rewards([trial for group in groups for trial in group.trials]),
    )


def batch_advantages(table: TurnTable, config: Config, device: torch.device | str) -> torch.Tensor:
    """Compute the advantage of each turn: float32 [turns], on `device`; 0 for notes that are not
    trained on.

    The table must hold the whole batch, because scales are pooled over more than one group.
    """
    values = turn_advantages(table, config.advantage, config.transcript, device)
    if not config.trial.train_notes:
        values[torch.from_numpy(table.kind == Kind.NOTES)] = 0.0
    return values.float()


def has_advantage(group: Group, config: Config) -> bool:
    """Return whether any turn of a group has an advantage other than 0. If all trials earned the
    same, a turn may still have one: for an invalid action, a long completion, or the time of a
    reward.
    """
    # The rest of the batch is not needed: it changes the scale, which does not decide whether an
    # advantage is 0. (The estimator "token_normalised" also subtracts a mean over the batch, which
    # is ignored here, because it is no property of the group.)
    return bool(batch_advantages(credited([group], config), config, "cpu").any())


def _sequence(trained: _TrainedSegment, advantages: Tensor) -> TrainingSequence:
    """Make the training sequence of a segment whose trained turns have the given advantages."""
    segment, turns = trained.segment, trained.turns
    places = np.flatnonzero(segment.is_sampled)
    is_of_turn = np.zeros(len(segment.tokens), bool)
    for turn in turns:
        is_of_turn[turn.start : turn.stop] = True
    is_trained = is_of_turn[places]
    places, allowed = places[is_trained], segment.allowed
    if allowed is not None:
        allowed = replace(allowed, index=allowed.index[is_trained])
    starts = np.searchsorted(places, [turn.start for turn in turns])
    counts = np.searchsorted(places, [turn.stop for turn in turns]) - starts
    policy, kv, provenance = _versions(segment.versions, places)
    sampled = SampledTokens(
        logprobs=segment.logprobs[places],
        policy_versions=policy,
        kv_versions=kv,
        episodes=np.repeat(np.array([turn.episode for turn in turns], np.int32), counts),
        kinds=np.repeat(np.array([turn.kind for turn in turns], np.int32), counts),
        provenances=provenance,
    )
    stop = int(places[-1]) + 1
    changes = [place for place in trained.changes if place < stop]
    return TrainingSequence(
        with_roles(segment.tokens[:stop], changes),
        places,
        sampled,
        counts,
        advantages,
        trained.alternatives,
        allowed,
    )


def _versions(runs: Sequence[VersionRun], places: np.ndarray) -> np.ndarray:
    """Look up policy version, KV version and provenance of n tokens: int32 [3, n]."""
    rows = [(run.policy, run.kv, PROVENANCES.index(run.provenance)) for run in runs]
    starts = np.array([run.start for run in runs])
    return np.array(rows, np.int32)[np.searchsorted(starts, places, "right") - 1].T


# A minibatch to groups of sequences that go through the model together.


class HasTokens(Protocol):
    """Declare the attribute of a sequence that `split_minibatch` needs, its tokens; protocol."""

    @property
    def tokens(self) -> np.ndarray:
        """Integers [T]."""


AnySequence = TypeVar("AnySequence", bound=HasTokens)
"""Type of the sequences that `split_minibatch` takes and returns."""


def split_minibatch(
    sequences: Sequence[AnySequence], max_tokens: int, *, shares_opening: bool = False
) -> list[list[AnySequence]]:
    """Group whole sequences so that each group's row has at most `max_tokens` tokens.

    Args:
        max_tokens: 0 puts all sequences into one group.
        shares_opening: the tokens that all sequences of a group begin with count once, as in
            `TokenRow.of`. Sequences that begin alike are then put together. A sequence that shares
            less than the group does would shorten the opening, and so lengthen the rest of every
            sequence: if the row would grow by more than the new sequence's own tokens, that
            sequence starts the next group. Without `shares_opening` sequences keep their order.

    Raises:
        RunError: a single sequence has more than `max_tokens` tokens.
    """
    if not max_tokens:
        return [list(sequences)] if sequences else []
    if shares_opening:
        sequences = sorted(sequences, key=lambda sequence: sequence.tokens.tolist())
    groups: list[list[AnySequence]] = []
    total = opening = 0  # of the last group: tokens of all its sequences, and those they share
    for sequence in sequences:
        length = len(sequence.tokens)
        if length > max_tokens:
            raise RunError(
                f"a segment of {length} tokens does not fit into "
                f"learner.max_tokens_per_microbatch = {max_tokens}: "
                "set it to at least engine.max_tokens"
            )
        if groups:
            first = groups[-1][0].tokens
            shared = min(opening, common_prefix(first, sequence.tokens)) if shares_opening else 0
            # Lengths of the group's row now, and with this sequence: an opening stands there once.
            now = total - (len(groups[-1]) - 1) * opening
            longer = total + length - len(groups[-1]) * shared
            if longer <= min(max_tokens, now + length):
                groups[-1].append(sequence)
                total, opening = total + length, shared
                continue
        groups.append([sequence])
        total = opening = length
    return groups


def common_prefix(one: np.ndarray, other: np.ndarray) -> int:
    """Count the equal tokens with which two sequences begin, without the last token of either.

    The last token of a sequence is always sampled, so it needs a place of its own in the row.
    """
    most = min(len(one), len(other)) - 1
    differs = one[:most] != other[:most]
    return int(differs.argmax()) if differs.any() else most


# A group of sequences as tensors.


@dataclass(frozen=True, slots=True, eq=False)
class TokenRow:
    """Lay out sequences one after the other in a row of tokens, on a device: the input of one
    forward.

    Sequences that begin alike (the chat's first turn, the rules of the game, the first observation)
    may share that opening. It then stands once, at the beginning of the row, goes through the model
    once, and gets the gradient of all sequences.
    """

    tokens: Tensor
    """int64 [1, T]"""
    positions: Tensor
    """int64 [1, T]: position of each token in its own sequence."""
    boundaries: "Boundaries"
    """Where the sequences lie, for attention."""
    sources: Tensor
    """int64 [N]: index in the row of the token whose hidden state predicts the target."""
    targets: Tensor
    """int64 [N]: tokens whose log-probs are computed."""
    is_second_role: Tensor | None = None
    """bool [T]: True for tokens of the second role; None: no token is the second role's."""
    sharpness: Tensor | None = None
    """float32 [N]: temperature of actions divided by the token's own; None: 1 everywhere. Logits
    are multiplied by it before they are divided by the temperature of actions, so that each token's
    log-prob is at the temperature it was sampled with.
    """
    restricted: "RestrictedTargets | None" = None
    """The targets that were drawn from sets of allowed tokens; None: there are none."""
    shifts: np.ndarray = field(default_factory=lambda: np.zeros(1, np.int64))
    """int64 [S]: for each sequence, index in the row minus position in the sequence, of the tokens
    after the shared opening."""

    @classmethod
    def of(
        cls,
        sequences: Sequence[np.ndarray],
        device: torch.device,
        *,
        predicted: Sequence[np.ndarray] = (),
        shares_opening: bool = False,
    ) -> Self:
        """Lay sequences one after the other, in the given order.

        Args:
            sequences: tokens of each, integers [length]; tokens of the second role as `~token`.
            predicted: positions of the targets in each sequence, int64 [n], all at least 1, because
                the token before predicts a target; without it there are no targets.
            shares_opening: lay the tokens that all sequences begin with once.
        """
        # Its module imports transformers, which takes seconds and prints warnings of torchao, and
        # readers of a journal import this file too.
        from mage_async.learning.attention import Boundaries

        opening = 0
        if shares_opening:
            others = (common_prefix(sequences[0], other) for other in sequences[1:])
            opening = min(others, default=0)
        lengths = np.array([len(tokens) - opening for tokens in sequences], np.int64)
        shifts = np.cumsum(lengths) - lengths
        tokens = np.concatenate((sequences[0][:opening], *(each[opening:] for each in sequences)))
        plain = without_roles(tokens).astype(np.int64)
        index = np.arange(len(tokens))
        predicted = predicted or [np.zeros(0, np.int64)] * len(sequences)
        own_positions = index[opening:] - np.repeat(shifts, lengths)
        positions = np.concatenate((index[:opening], own_positions))
        sources = [
            _index(places - 1, opening, shift)
            for places, shift in zip(predicted, shifts, strict=True)
        ]
        targets = [
            without_roles(each[places]) for each, places in zip(sequences, predicted, strict=True)
        ]

        put = partial(_put, device)
        return cls(
            put(plain)[None],
            put(positions)[None],
            Boundaries.of(put(lengths), opening),
            put(np.concatenate(sources)),
            put(np.concatenate(targets).astype(np.int64)),
            is_second_role=put(tokens < 0) if (tokens < 0).any() else None,
            shifts=shifts,
        )

    def index_of(self, number: int, places: np.ndarray) -> np.ndarray:
        """Return the indices in the row of tokens at `places` of sequence `number`: int64 [n]."""
        return _index(places, self.boundaries.opening, self.shifts[number])

    @property
    def second_role_sampled(self) -> Tensor | None:
        """Which of the targets are the second role's: bool [N]; None: none of them."""
        return None if self.is_second_role is None else self.is_second_role[self.sources]


def _put(device: torch.device, values: np.ndarray) -> Tensor:
    """Return an array as a tensor on a device."""
    return torch.from_numpy(values).to(device)


def _index(places: np.ndarray, opening: int, shift: int) -> np.ndarray:
    """Turn positions in a sequence into indices in the row, where the opening stands once, at the
    beginning, and the tokens after it are shifted: int64 [n].
    """
    return np.where(places < opening, places, places + shift)


@dataclass(frozen=True, slots=True, eq=False)
class RestrictedTargets:
    """Hold, on a device, the targets of a row that were drawn from sets of allowed tokens, and
    these sets as a mask.

    Shapes: `R` such targets, `U` tokens that any of their sets holds.
    """

    index: Tensor
    """int64 [R]: which of the N targets, ascending."""
    free: Tensor
    """bool [N], on the host: the other targets, drawn from the whole vocabulary."""
    columns: Tensor
    """int64 [U]: token ids, ascending."""
    mask: Tensor
    """bool [R, U]: the set of each target."""
    targets: Tensor
    """int64 [R]: index of each target in `columns`."""

    @classmethod
    def of(cls, sequences: Sequence[TrainingSequence], device: torch.device) -> Self | None:
        """Gather the sets of all sampled tokens; `None` if no token was restricted."""
        sets_of = [each.allowed for each in sequences]
        if all(each is None for each in sets_of):
            return None
        columns = np.unique(np.concatenate([each.tokens for each in sets_of if each is not None]))
        masks, targets, is_free = [], [], []
        for sequence, allowed in zip(sequences, sets_of, strict=True):
            if allowed is None:
                is_free.append(np.ones(len(sequence.places), bool))
                continue
            # Below 0 (`FREE`) the token was sampled from the whole vocabulary.
            is_restricted = allowed.index >= 0
            is_free.append(~is_restricted)
            # `sets`: each distinct set of the sequence as a mask over `columns`.
            rows = np.repeat(np.arange(len(allowed.offsets) - 1), np.diff(allowed.offsets))
            sets = np.zeros((len(allowed.offsets) - 1, len(columns)), bool)
            sets[rows, np.searchsorted(columns, allowed.tokens)] = True
            masks.append(sets[allowed.index[is_restricted]])
            drawn = without_roles(sequence.tokens[sequence.places[is_restricted]])
            targets.append(np.searchsorted(columns, drawn))
        free = np.concatenate(is_free)

        put = partial(_put, device)
        return cls(
            put(np.flatnonzero(~free)),
            torch.from_numpy(free),
            put(columns.astype(np.int64)),
            put(np.concatenate(masks)),
            put(np.concatenate(targets)),
        )


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Hold sequences that go through the model at once, with the data of their sampled tokens.

    Tensors lie on the learner's device, arrays on the host.
    """

    row: TokenRow
    sampled: SampledTokens
    turn_lengths: np.ndarray
    """int64 [turns]: sampled tokens of each turn; they sum to N."""
    alternatives: np.ndarray
    """int64 [N]: the token of an adviser's action that differs from the sampled token; -1 where no
    adviser was asked, or its token is the sampled one.
    """
    advantages: Tensor
    """float32 [N]"""
    behaviour: Tensor
    """float32 [N]: log-probs in nats under the policy that sampled the tokens."""
    staleness: Tensor
    """int32 [N]: version at the beginning of the step minus the version that sampled the token."""
    turns: Tensor
    """int64 [N]: number of the token's turn in this micro-batch, from 0 without gaps."""
    sequences: Tensor
    """int64 [N]: number of the token's sequence in this micro-batch."""
    weights: Tensor | None = None
    """float32 [N]: weight of each token in the KL term; None: 1."""
    reference: Tensor | None = None
    """float32 [N]: log-probs in nats under the KL term's reference policy; None without one."""
    prepared: tuple[Any, ...] = ()
    """Result of `prepare` of each loss term of a method."""
    proximal: Tensor | None = None
    """float32 [N]: log-probs in nats under the weights at the beginning of the step; None until a
    forward of these weights has been made.
    """
    entropy_mask: Tensor | None = None
    """float32 [N]: 1 for tokens that get the entropy bonus, else 0; known together with `proximal`.
    """
    progress: float = 0.0
    """Share of the step's updates that come before the update with this micro-batch, in 0..1; used
    to interpolate `proximal` (`learner.proximal`), and 0 if `proximal` is computed.
    """

    @classmethod
    def of(
        cls,
        sequences: Sequence[TrainingSequence],
        device: torch.device,
        *,
        version: int = 0,
        strategy_sharpness: float = 1.0,
        shares_opening: bool = False,
    ) -> Self:
        """Lay sequences in one row and gather the data of their sampled tokens.

        Args:
            version: version of the weights under training.
            strategy_sharpness: temperature of actions divided by that of strategies.
            shares_opening: see `TokenRow.of`.
        """
        tokens, places = [each.tokens for each in sequences], [each.places for each in sequences]
        row = TokenRow.of(tokens, device, predicted=places, shares_opening=shares_opening)
        row = replace(row, restricted=RestrictedTargets.of(sequences, device))
        columns = zip(*(each.sampled for each in sequences), strict=True)
        sampled = SampledTokens(*map(np.concatenate, columns))
        if strategy_sharpness != 1.0:
            sharpness = np.where(sampled.kinds == Kind.STRATEGY, strategy_sharpness, 1.0)
            factors = torch.from_numpy(sharpness.astype(np.float32)).to(device)
            row = replace(row, sharpness=factors)
        turn_lengths = np.concatenate([each.turn_lengths for each in sequences])
        advantages = torch.cat([each.advantages for each in sequences])
        weights = [each.weights for each in sequences if each.weights is not None]
        return cls(
            row,
            sampled,
            turn_lengths,
            np.concatenate([_alternatives(each) for each in sequences]),
            at_tokens(advantages, torch.from_numpy(turn_lengths)).to(device),
            _put(device, sampled.logprobs),
            _put(device, version - sampled.policy_versions),
            _put(device, np.repeat(np.arange(len(turn_lengths)), turn_lengths)),
            _put(device, np.repeat(np.arange(len(sequences)), [len(each) for each in places])),
            weights=at_tokens(torch.cat(weights), torch.from_numpy(turn_lengths)).to(device)
            if weights
            else None,
        )

    @property
    def num_tokens(self) -> int:
        """N: sampled tokens."""
        return len(self.sampled.logprobs)

    def correction_inputs(self) -> Tokens:
        """Return the correction's inputs at the beginning of the step; needs `proximal`.

        At that time the current log-probs, the first input, equal the proximal ones, the second.
        """
        assert self.proximal is not None
        return Tokens(
            self.proximal,
            self.proximal,
            self.behaviour,
            self.advantages,
            self.staleness,
            self.turns,
            self.sequences,
        )


def _alternatives(sequence: TrainingSequence) -> np.ndarray:
    """Spread a sequence's alternatives over its sampled tokens: int64 [n], -1 where none."""
    alternatives = np.full(len(sequence.places), -1, np.int64)
    if sequence.alternatives:
        places = np.fromiter(sequence.alternatives, np.int64)
        known = np.fromiter(sequence.alternatives.values(), np.int64)
        # An alternative may differ at a token that was not sampled, because no other was legal. It
        # is left out: a micro-batch has sampled tokens only.
        index = np.searchsorted(sequence.places, places)
        is_sampled = sequence.places[np.minimum(index, len(alternatives) - 1)] == places
        alternatives[index[is_sampled]] = known[is_sampled]
    return alternatives
