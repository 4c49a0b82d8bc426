"""The agent: a pretrained model or a tiny one built here, and the warm start before RL."""

from typing import Literal

from msgspec import field

from mage_async.config.sections.section import Count, Natural, Positive, Section, Share, Variant
from mage_async.errors import ConfigError

LINEAR_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Of a layer of the Llama family."""


class Lora(Section):
    """Low-rank adapters that are trained instead of the model's own weights (Hu et al. 2021,
    arXiv 2106.09685): a small part of the optimizer's memory and of a checkpoint."""

    rank: Count = 16
    """Rank of an adapter."""
    alpha: Positive = 32.0
    """An adapter's product is added with this weight, over its rank."""
    targets: list[str] = field(default_factory=lambda: [*LINEAR_LAYERS])
    """Linear layers that get an adapter, by the last part of their name."""


class Policy(Variant):
    """The agent's weights."""

    lora: Lora | None = None

    separate_exploration: bool = False
    """Episodes before the last are played by an explorer and the last by an exploiter, each a
    low-rank adapter of its own (MetaCURE, `docs/methods/metacure.md`); needs `policy.lora`."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type in which the learner trains; at rates of 1e-6 bfloat16 rounds updates away."""


class Tiny(Policy, tag="tiny"):
    """A model of Qwen3's architecture with random weights, built for the environment's words."""

    hidden_size: Count = 64
    """Width of the residual stream; a multiple of `heads`."""
    layers: Count = 2
    """Transformer blocks."""
    heads: Count = 4
    """Attention heads; a multiple of `kv_heads`."""
    kv_heads: Count = 2
    """Heads of keys and values."""
    mlp_size: Count = 128
    """Width of the MLP."""
    rope_theta: Positive = 100.0
    """Base of the rotary embedding."""


class Pretrained(Policy, tag="pretrained"):
    """A HuggingFace causal LM."""

    source: str = "Qwen/Qwen3-0.6B"
    """Directory of the model, or its id on the hub."""


class WarmStart(Section):
    """Behaviour cloning of scripted play, before RL; without this section RL begins at once."""

    steps: Natural = 150
    """Steps of cloning, over which the rate falls to a tenth, before the gate is looked at; 0 is
    the same as no section."""
    episodes: Count = 3
    """Episodes of a scripted trial; more than the training's where single-episode RL is the
    baseline."""
    trials: Count = 3000
    """Scripted trials that are cloned."""
    batch_size: Count = 64
    """Trials a step."""
    learning_rate: Positive = 0.002
    """AdamW's rate while cloning."""
    template_weight: Share = 0.1
    """Loss weight of tokens the transcript forces; words of the game and sampled tokens weigh 1."""
    gate: Share = 0.8
    """Go on until the loss on observations in the last episode is at most this share of the first
    one's; 1.0 is no gate."""
    max_steps: Natural = 400
    """Steps after which an unmet gate is an error; those beyond `steps` go on at a tenth of the
    rate."""
    cache: bool = True
    """Keep the result under the user's cache directory, for later runs of the same warm start."""
    threads: Count = 1
    """Threads of the cloning: two are a quarter faster on two idle cores, and three times slower
    than one on busy ones."""


def check(policy: Policy) -> None:
    """Refuse a tiny model whose widths do not divide.

    Raises:
        ConfigError: with the keys and what was got.
    """
    if not isinstance(policy, Tiny):
        return
    if policy.heads % policy.kv_heads or policy.hidden_size % policy.heads:
        raise ConfigError(
            "policy: hidden_size must be a multiple of heads, and heads of kv_heads; "
            f"got {policy.hidden_size}, {policy.heads}, {policy.kv_heads}"
        )
