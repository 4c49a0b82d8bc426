"""The plan of a run: what its processes hold, what a step computes, and whether that fits."""

from collections import Counter
from dataclasses import dataclass

from mage_async.config.schema import Config
from mage_async.errors import ConfigError
from mage_async.plan.devices import GB, Device, check_dtype
from mage_async.plan.loads import CPU, Load, loads_of
from mage_async.plan.made_up import Batch
from mage_async.plan.shapes import shape_of
from mage_async.plan.update import Update, update_of


@dataclass(frozen=True, slots=True)
class Plan:
    """What a configuration needs of a device."""

    config: Config
    device: Device
    batch: Batch
    update: Update
    loads: list[Load]
    num_weights: int = 0
    """Numbers of the model without adapters."""

    def flops(self) -> float:
        """Operations of a step of the learner."""
        return self.update.flops * self.batch.num_segments * self.batch.tokens

    def step_s(self, tflops: float = 0.0) -> float:
        """Seconds a step takes at least.

        Args:
            tflops: 10^12 operations a second that were measured; 0: the most that the vendor says.

        Returns:
            0.0 where no rate is known.
        """
        rate = tflops or self.tflops()
        return self.flops() / (rate * 1e12) if rate else 0.0

    def tflops(self) -> float:
        """10^12 operations a second in the learner's type, at most; 0.0 where it is not known."""
        is_rounded = self.config.learner.matmul_precision != "highest"
        return self.device.tflops(self.config.policy.dtype, is_rounded=is_rounded)

    def needed(self) -> dict[str, int]:
        """Bytes by place."""
        sums: Counter[str] = Counter()
        for load in self.loads:
            sums[load.place] += load.parts.total()
        return dict(sums)

    def spare(self) -> float:
        """Share of the fullest memory that is left; below 0 it does not fit."""
        return 1 - max(self.needed().values()) / self.device.memory_bytes

    def check(self) -> None:
        """Refuse what does not fit.

        Raises:
            ConfigError: with the place, its largest part, and the key to change.
        """
        needed = self.needed()
        place = max(needed, key=lambda name: needed[name])
        if needed[place] <= self.device.memory_bytes:
            return
        raise ConfigError(
            f"{place} would need {needed[place] / GB:.3g} GB and has "
            f"{self.device.memory_bytes / GB:.3g}: {self._largest(place)}"
        )

    def _largest(self, place: str) -> str:
        """The part that takes most and has a key, in words."""
        parts = [
            (size, part, load)
            for load in self.loads
            if load.place == place
            for part, size in load.parts.items()
        ]
        for size, part, load in sorted(parts, key=lambda each: -each[0]):
            if advice := self._advice(part, load):
                return f"{part} of the {load.process} are {size / GB:.3g} GB of it; {advice}"
        return "take a larger GPU or a smaller policy"

    def _advice(self, part: str, load: Load) -> str:
        """The key that makes a part smaller; empty where there is none."""
        rules, policy = self.config.learner, self.config.policy
        is_engine, budget = load.process != "learner", self.config.engine.max_tokens
        if part == "keys and values" and is_engine:
            is_own = self.config.engine.kind == "embedded"
            return f"lower engine.{'max_contexts' if is_own else 'server.max_total_tokens'}"
        if is_engine:
            return ""
        if part in ("activations", "head"):
            if not rules.activation_checkpointing and part == "activations":
                return "set learner.activation_checkpointing = true"
            if not rules.tokens_per_pass or rules.tokens_per_pass > budget:
                return f"set learner.tokens_per_pass = {budget}"
            return f"lower engine.max_tokens = {budget} and learner.tokens_per_pass with it"
        if part in ("optimizer", "gradients", "reference policy") and policy.lora is None:
            has_8_bits = part != "optimizer" or rules.optimizer_state == "8bit"
            other = "" if has_8_bits else ', or learner.optimizer_state = "8bit"'
            return f"set policy.lora.rank = 16{other}"
        if part in ("weights", "publication") and policy.dtype == "float32" and load.place != CPU:
            return 'set policy.dtype = "bfloat16"'
        return ""


def plan_of(config: Config, device: Device, num_actors: int, *, context_tokens: int = 0) -> Plan:
    """The plan of a configuration.

    Args:
        device: the memory of each GPU that it names, or of this machine.
        context_tokens: of a context; 0: as many as the engine takes.

    Raises:
        PolicyError: the policy's shape is not known, or it cannot be trained as configured.
        ConfigError: the device has no arithmetic for its type, or no context has so many tokens.
    """
    longest = config.engine.max_tokens
    if context_tokens and not 2 <= context_tokens <= longest:
        raise ConfigError(
            f"a context has from 2 to engine.max_tokens = {longest} tokens, got {context_tokens}"
        )
    if config.learner.device != "cpu":
        check_dtype(config.policy.dtype, device, "policy.dtype")
    shape, batch = shape_of(config), Batch.of(config, context_tokens)
    update = update_of(config, shape, batch)
    loads = loads_of(config, shape, update, device, num_actors)
    return Plan(config, device, batch, update, loads, shape.num_weights)
