"""Attributed trials as plain data, for files that others read."""

from typing import Any

import numpy as np

from mage_async.attribution.turns import AttributedTrial, AttributedTurn, drawn_by
from mage_async.policy_version import oldest
from mage_async.trials.chat_format import ChatFormat
from mage_async.trials.trial_as_dict import trial_as_dict


def row_of(found: AttributedTrial, chat: ChatFormat) -> dict[str, Any]:
    """A trial as a person reads it, whose it is, which step consumed it and what it made of it."""
    version = oldest(run for part in found.trial.segments for run in part.versions)
    row = trial_as_dict(found.trial, chat, version)
    turns = [turn | _made_of(each) for turn, each in zip(row["turns"], found.turns, strict=True)]
    whose = {"grant": found.grant, "trial": found.trial.index, "step": found.step}
    return whose | row | {"turns": turns}


def token_columns(found: AttributedTrial) -> dict[str, list[np.ndarray]]:
    """Every token of a trial, a list a context: ids, log-probs, whether the policy sampled it, its
    version, staleness and advantage; the last three are 0 where it was not sampled or no step
    consumed it.
    """
    segments = found.trial.segments
    columns: dict[str, list[np.ndarray]] = {
        "tokens": [segment.tokens for segment in segments],
        "logprobs": [segment.logprobs for segment in segments],
        "is_sampled": [segment.is_sampled for segment in segments],
        "versions": [np.where(part.is_sampled, drawn_by(part), 0) for part in segments],
        "staleness": [np.zeros(len(part.tokens), np.int32) for part in segments],
        "advantages": [np.zeros(len(part.tokens), np.float32) for part in segments],
    }
    for each in found.turns:
        place = slice(each.turn.start, each.turn.stop)
        if each.staleness is not None:
            columns["staleness"][each.turn.segment][place] = each.staleness
        columns["advantages"][each.turn.segment][place] = each.advantage or 0.0
    return columns


def _made_of(each: AttributedTurn) -> dict[str, Any]:
    has_tokens = each.staleness is not None and len(each.staleness) > 0
    return {
        "return": each.return_to_go,
        "advantage": each.advantage,
        "staleness": int(each.staleness.max()) if has_tokens else None,
        "context": each.turn.segment,
        "start": each.turn.start,
        "stop": each.turn.stop,
    }
