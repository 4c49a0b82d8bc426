"""What serves the policy inside each actor."""

from typing import Any, Literal

from msgspec import field

from mage_async.config.sections.section import Count, Natural, Positive, Variant


class Engine(Variant):
    """An inference engine of an actor, or of the evaluator."""

    max_contexts: Count = 32
    """Contexts at once; at least a group's trials."""
    max_tokens: Count = 8192
    """Longest context in tokens, prompt and completion together."""
    cache_rule: Literal["keep", "refresh_at_episode", "isolate"] = "refresh_at_episode"
    """Whether cached keys of older weights are read on, or recomputed when an episode begins, or
    at every turn; a new context never begins with keys of older weights."""
    threads: Count = 4
    """Threads of the engine's process."""
    in_flight: Literal["in_place", "interrupt"] = "in_place"
    """What a turn does that new weights come into: go on over the keys it has, or end there and go
    on as a new request, of which the cache rule says what is recomputed."""
    turn_deadline_s: Positive = 300.0
    """Seconds after which a turn that is not drawn costs its group; a start of an SGLang is part of
    a turn."""
    devices: list[Natural] = field(default_factory=list)
    """GPUs of the actors' engines, one each (or `gpus_per_actor`), from the first again where there
    are more actors; the evaluator's are the last, a process sees no other GPU, and with [] each
    sees all there are."""

    @property
    def num_gpus(self) -> int:
        """GPUs that an engine on GPUs shares its model over."""
        return 1

    def devices_of(self, number: int) -> tuple[int, ...]:
        """GPUs of the actor of this number, or of the evaluator where it is -1; () for all."""
        starts = range(0, len(self.devices), self.num_gpus)
        groups = [tuple(self.devices[start : start + self.num_gpus]) for start in starts]
        return groups[number % len(groups)] if groups else ()


class Embedded(Engine, tag="embedded"):
    """Our own engine inside the actor's process, on CPU cores."""

    arithmetic: Literal["float32", "bfloat16", "exact"] = "float32"
    """How the engine multiplies. With "bfloat16" the layers' matrices have 16 bits: twice the speed
    on processors with AVX512-BF16 or AMX, slower on others; the head stays float32. With "exact" a
    completion is the same, bit by bit, whatever is computed beside it; with the rule `sync` and
    max_staleness 0 a run is a function of its configuration."""


class Sglang(Engine, tag="sglang"):
    """An SGLang in a process under the actor."""

    gpus_per_actor: Count = 1
    """GPUs that an engine shares its model over (tensor parallelism); its heads, its key-value
    heads and the width of its MLP must divide by it."""

    server: dict[str, Any] = field(default_factory=dict)
    """Arguments for SGLang's server by its own names, over those we choose; for determinism
    { enable_deterministic_inference = true }."""

    @property
    def num_gpus(self) -> int:
        """GPUs that an engine on GPUs shares its model over."""
        return self.gpus_per_actor
