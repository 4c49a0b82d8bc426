"""A minibatch cut into passes, so that the memory of a step does not grow with the minibatch."""

from collections.abc import Sequence

from mage_async.errors import RunError
from mage_async.learning.packing import Sequenced


def cut(sequences: Sequence[Sequenced], tokens_per_pass: int) -> list[list[Sequenced]]:
    """Whole sequences, in their order, in passes of at most `tokens_per_pass` tokens; 0 is one.

    Raises:
        RunError: a sequence alone has more tokens.
    """
    if not tokens_per_pass:
        return [list(sequences)]
    passes: list[list[Sequenced]] = []
    room = 0
    for sequence in sequences:
        length = len(sequence.tokens)
        if length > tokens_per_pass:
            raise RunError(
                f"a segment of {length} tokens does not fit into learner.tokens_per_pass = "
                f"{tokens_per_pass}: set it to at least engine.max_tokens"
            )
        if length > room:
            passes.append([])
            room = tokens_per_pass
        passes[-1].append(sequence)
        room -= length
    return passes
