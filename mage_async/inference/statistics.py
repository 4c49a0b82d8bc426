"""What an engine has done since its start, as one frozen record."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Statistics:
    """Totals, unless said otherwise; reading it changes nothing."""

    num_completions: int = 0
    num_prompt_tokens: int = 0
    num_reused_tokens: int = 0
    """Prompt tokens that were not computed again."""
    num_repeated_tokens: int = 0
    """Prompt tokens computed although they had been before."""
    num_extension_faults: int = 0
    """Prompts that did not extend their context."""
    num_generated_tokens: int = 0
    num_forwards: int = 0
    num_rows: int = 0
    """Contexts advanced, summed over forwards."""
    num_computed_tokens: int = 0
    forward_s: float = 0.0
    """Time spent computing."""
    num_loads: int = 0
    """Changes of weights."""
    stall_s: float = 0.0
    """Time in which weights changed and nothing could be drawn."""
    num_evictions: int = 0
    num_contexts: int = 0
    """Contexts that hold keys and values now."""
    num_waiting: int = 0
    """Prompts that wait for room now."""
    cache_bytes: int = 0
    """Memory of keys and values, constant."""

    def counters(self) -> dict[str, float]:
        """Every field by name, for a heartbeat."""
        return {name: getattr(self, name) for name in self.__slots__}
