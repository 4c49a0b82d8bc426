"""Looking for words in the text of trials, newest first, a piece at a time."""

import time
from collections.abc import Sequence

from mage_async.errors import RunError
from mage_async.pages.listed import ListedTrial
from mage_async.pages.trial_lists import Found, Search
from mage_async.pages.turns import Decode
from mage_services.view.index.run_reader import RunReader

PIECE_S = 0.15
"""A piece of a search ends after so long; the page says where it goes on."""
MOST_FOUND = 50
AROUND = 60
"""Characters shown on either side."""


def search(
    reader: RunReader, trials: Sequence[ListedTrial], decode: Decode, text: str, behind: int
) -> Search:
    """Trials among `trials[behind:]` that hold `text`, in whichever case."""
    found: list[Found] = []
    missing, number, until = "", behind, time.monotonic() + PIECE_S
    while number < len(trials) and len(found) < MOST_FOUND and time.monotonic() < until:
        trial = trials[number]
        number += 1
        try:
            contexts = reader.load(trial.group, trial.number).segments
        except RunError as error:
            missing = str(error)
            continue
        for segment in contexts:
            said = decode(segment.tokens.tolist())
            if (at := said.lower().find(text.lower())) >= 0:
                found.append(_found(trial, said, at, at + len(text)))
                break
    return Search(found, number - behind, number if number < len(trials) else None, missing)


def _found(trial: ListedTrial, said: str, start: int, stop: int) -> Found:
    before, after = said[max(0, start - AROUND) : start], said[stop : stop + AROUND]
    return Found(trial, before, said[start:stop], after)
