"""Limit the size of the messages that a peer may send, and of the trials in them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Describe the largest message that is accepted from a peer.

    Sizes are checked before anything is allocated.

    A trial over a limit is dropped with its group after it was played. So the limits lie far above
    the sizes of trials that can be trained: otherwise the loss of long trials would favour short
    ones. The largest message, 57 MiB, fits into one record of the journal (64 MiB); its decoding
    takes 30 ms.
    """

    max_header_bytes: int = 2**23
    max_tokens: int = 2**22
    """Number of tokens of one message, over all segments of its trial, or of the trials of both
    seats.
    """
    max_allowed: int = 2**22
    """Number of integers that describe the allowed sets of one message: `allowed` in
    `trial_arrays.py`."""
    max_segments: int = 2**14
    """Number of segments of one trial."""
    max_turns: int = 2**16
    """Number of turns of one trial."""
    max_runs: int = 2**16
    """Number of version runs of one trial."""
    max_text_chars: int = 2**15
    """Number of characters of one action, one reflection, or one anchor (an episode's state as
    text).
    """
    max_alternative_chars: int = 2**10
    """Number of characters of one alternative to an action."""
    max_info_chars: int = 2**12
    """Number of characters of one turn's `info`, which an environment may add to its
    observation.
    """

    def max_frame_bytes(self) -> int:
        """Return the size of the largest frame: the header, or an array with 4 bytes per number."""
        return max(self.max_header_bytes, self.max_tokens * 4, self.max_allowed * 4)


DEFAULT_LIMITS = Limits()
