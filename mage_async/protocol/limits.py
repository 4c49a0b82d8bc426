"""Limit the sizes of messages and journal records, which are checked before anything is
allocated.
"""

from dataclasses import dataclass

MAX_REASON_CHARS = 2000
"""Largest number of characters of a reason in a message; the sender cuts a longer one."""
MAX_RECORD_BYTES = 2**26
"""Largest number of bytes of one journal record, without its prefix."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Describe the largest message that is accepted from a peer."""

    max_header_bytes: int = 2**20
    max_tokens: int = 2**18
    """Number of tokens of one message, over all segments of its trial, or of the trials of both
    seats.
    """
    max_allowed: int = 2**20
    """Number of integers that describe the allowed sets of one message; see `trial_frames`."""
    max_segments: int = 256
    """Number of segments of one trial."""
    max_turns: int = 4096
    """Number of turns of one trial."""
    max_runs: int = 4096
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
        """Return the size of the largest frame: the header, or an array with 4 bytes a number."""
        return max(self.max_header_bytes, self.max_tokens * 4, self.max_allowed * 4)


DEFAULT_LIMITS = Limits()
