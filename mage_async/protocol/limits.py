"""Size limits of messages and journal records, checked before anything is allocated."""

from dataclasses import dataclass

MAX_REASON_CHARS = 2000
"""Characters of a reason in a message; the sender cuts a longer one."""
MAX_RECORD_BYTES = 2**26
"""Bytes of one journal record, without its prefix."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest message accepted from a peer."""

    max_header_bytes: int = 2**20
    max_tokens: int = 2**18
    """Tokens of one message, over all segments of its trial, or of the trials of both seats."""
    max_allowed: int = 2**20
    """Numbers that describe the allowed sets of one message; see `trial_frames`."""
    max_segments: int = 256
    """Segments of one trial."""
    max_turns: int = 4096
    """Turns of one trial."""
    max_runs: int = 4096
    """Version runs of one trial."""
    max_text_chars: int = 2**15
    """Characters of one action, one reflection, or one anchor (an episode's state as text)."""
    max_alternative_chars: int = 2**10
    """Characters of one alternative to an action."""
    max_info_chars: int = 2**12
    """Characters of one turn's `info`, which an environment may add to its observation."""

    def max_frame_bytes(self) -> int:
        """Return the size of the largest frame: the header, or an array with 4 bytes a number."""
        return max(self.max_header_bytes, self.max_tokens * 4, self.max_allowed * 4)


DEFAULT_LIMITS = Limits()
