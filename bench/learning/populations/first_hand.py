"""Compute how far a policy's first hand of Kuhn poker is from an equilibrium, exactly.

The first hand of a trial is played before the policy knows its opponent. Its exploitability and its
value, in chips per hand, are OpenSpiel's.

A game of Kuhn poker has twelve information states: a card, a seat, and whether a bet has to be
answered. Probabilities are normalised over the two legal words.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import pyspiel
import torch
from transformers import PreTrainedModel

from mage_async.completion import Completion
from mage_async.environments.games.kuhn import CARDS, FACING, OPEN
from mage_async.learning.attention import Boundaries
from mage_async.policy_version import VersionRun
from mage_async.trajectory import Kind
from mage_async.trials.chat_format import ChatFormat
from mage_async.trials.transcript import Transcript
from mage_async.trials.trial_config import TrialConfig

NASH_VALUE = -1 / 18
"""Value of the first seat if both players play an equilibrium."""
Hand = Mapping[str, float]
"""How a policy plays a hand: its probability of betting, or of calling, by OpenSpiel's name of an
information state: the card's number, then `p` for each pass and `b` for each bet.
"""


def first_hand(model: PreTrainedModel, chat: ChatFormat, rules: TrialConfig) -> Hand:
    """Return how a policy plays the first hand of the first episode."""
    hand: dict[str, float] = {}
    for number, card in enumerate(CARDS):
        # In the prompts, "first" and "second" name the seat; the transcript `checked` goes on after
        # the policy has checked in the first seat, and the opponent has bet.
        opens, answers = f"you first {card}", f"you second {card}"
        checked = _beginning_with(chat, rules, opens)
        hand[f"{number}"] = _chance(model, chat, checked, OPEN)
        checked.receive(_completion(chat, "check"))
        checked.add_message("opp bet", Kind.ACT)
        hand[f"{number}pb"] = _chance(model, chat, checked, FACING)
        after_check = _beginning_with(chat, rules, f"{answers} opp check")
        hand[f"{number}p"] = _chance(model, chat, after_check, OPEN)
        after_bet = _beginning_with(chat, rules, f"{answers} opp bet")
        hand[f"{number}b"] = _chance(model, chat, after_bet, FACING)
    return hand


def exploitability(hand: Hand) -> float:
    """Return the mean value of best responses over both seats, per hand; 0 is an equilibrium."""
    return float(pyspiel.exploitability(pyspiel.load_game("kuhn_poker"), _table(hand)))


def value(hand: Hand) -> float:
    """Return the value of the first seat if both players play like this."""
    state = pyspiel.load_game("kuhn_poker").new_initial_state()
    # -1 is no limit of depth; True looks the policy up by information state.
    return float(pyspiel.expected_returns(state, _table(hand), -1, True)[0])


def average(hands: Sequence[Hand]) -> Hand:
    """Return the policy that chooses one of several policies and plays a whole hand by it.

    In a state that a player reaches by passing, each policy has the weight of its probability to
    pass (Kuhn's theorem).
    """
    mean: dict[str, float] = {}
    for name in hands[0]:
        weights = [1 - hand[name[0]] if name.endswith("pb") else 1.0 for hand in hands]
        total = sum(weights) or 1.0
        pairs = zip(weights, hands, strict=True)
        mean[name] = sum(weight * hand[name] for weight, hand in pairs) / total
    return mean


def _table(hand: Hand) -> pyspiel.TabularPolicy:
    return pyspiel.TabularPolicy({name: [(0, 1 - p), (1, p)] for name, p in hand.items()})


def _beginning_with(chat: ChatFormat, rules: TrialConfig, observation: str) -> Transcript:
    """Return the transcript of a trial whose first observation awaits an action."""
    transcript = Transcript(chat, rules.parser)
    transcript.open(rules.prompts.opening(0, observation, ()), Kind.ACT)
    return transcript


def _chance(
    model: PreTrainedModel, chat: ChatFormat, transcript: Transcript, words: tuple[str, str]
) -> float:
    """Return the probability of the second of two words."""
    ids = torch.from_numpy(transcript.tokens().astype(np.int64))[None]
    with torch.no_grad():
        boundaries = Boundaries.of(torch.tensor([ids.shape[1]]))
        logits = model(ids, boundaries=boundaries).logits[0, -1].float()
    tokens = [chat.encode(f" {word}")[0] for word in words]
    return float(torch.softmax(logits[tokens], 0)[1])


def _completion(chat: ChatFormat, word: str) -> Completion:
    """Return a completion of one word, as if the policy had sampled it."""
    tokens = np.array(chat.encode(f" {word}"), np.int32)
    return Completion(tokens, np.zeros(len(tokens), np.float32), (VersionRun(0, 0, 0),), "stop", 0)
