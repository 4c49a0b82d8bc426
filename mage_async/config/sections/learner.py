"""The optimisation."""

from importlib.util import find_spec
from typing import Annotated, Literal

from msgspec import Meta

from mage_async.config.sections.corrections import AnyCorrection, Decoupled
from mage_async.config.sections.section import Count, Natural, NonNegative, Positive, Section, Share
from mage_async.errors import ConfigError


class Learner(Section):
    """The optimisation, by AdamW."""

    steps: Natural = 200
    """Steps of the run; each makes one policy version."""
    minibatches: Count = 8
    """Optimizer updates a step."""
    learning_rate: Positive = 2e-6
    """Rate after the warm-up."""
    final_learning_rate: NonNegative = 0.0
    """Rate at the last step, linearly."""
    warmup_steps: Natural = 10
    """Steps over which the rate grows from 0."""
    correction: AnyCorrection = Decoupled()
    """The loss on stale tokens; see `mage_async/learning/corrections/`."""
    kl: NonNegative = 0.0
    """Weight of the divergence from the policy that training began with, k3 per token in nats; with
    0 no second model is in memory."""
    entropy: NonNegative = 0.0
    """What a nat of a sampled action's entropy is worth at the first step."""
    final_entropy: NonNegative = 0.0
    """What such a nat is worth at the last step, linearly."""
    entropy_ceiling: NonNegative = 0.0
    """Entropy in nats above which a token is given no bonus; 0 is none. Such a bonus acts at once,
    and what speaks against it as late as the data are old (Skywork-OR1, arXiv 2505.22312, stops it
    by the batch's mean)."""
    tokens_per_pass: Natural = 0
    """Most tokens that go through the model at once; a minibatch of more is trained in several
    passes, whose gradients add up. 0 is no bound; otherwise at least `engine.max_tokens`."""
    shared_opening: bool = False
    """What all sequences of a pass begin with (the chat's first turn, the rules, the first
    observation) goes through the model once, in the warm start too; the gradient is the same."""
    activation_checkpointing: bool = False
    """Keep one activation a layer and compute the others again in the backward pass: a small part
    of the memory for a third more time."""
    float32_masters: bool = False
    """Where the model computes in bfloat16, let the optimizer change a float32 copy of each trained
    weight, and round it into the model: 8 bytes a weight more, and no update is rounded away."""
    optimizer_state: Literal["full", "8bit"] = "full"
    """AdamW's two moments: in the type of what is trained, or in one byte each by torchao (`pip
    install "mage_async[8bit]"`): 2 bytes a trained weight instead of 8 in float32."""
    matmul_precision: Literal["highest", "high", "medium"] = "highest"
    """What products of float32 matrices may round their inputs to, as PyTorch's
    `set_float32_matmul_precision` says it: on a GPU "high" is TF32, of 10 bits of mantissa.
    Products in bfloat16 are as they were."""
    grad_clip: Positive = 1.0
    """Largest norm of the gradient."""
    beta1: Share = 0.9
    """AdamW's decay of the mean."""
    beta2: Share = 0.99
    """AdamW's decay of the second moment."""
    weight_decay: NonNegative = 0.0
    """AdamW's decay of weights."""
    checkpoint_every: Count = 20
    """Steps between checkpoints."""
    keep_checkpoints: Count = 2
    """Checkpoints that stay."""
    device: Annotated[str, Meta(pattern=r"^(cpu|cuda(:\d+)?)$")] = "cpu"
    """"cpu", or a GPU: "cuda:0"."""
    threads: Count = 4
    """Threads of the learner's process; with ranks of each of its processes."""
    ranks: Count = 1
    """Processes of this machine that weights, gradients and the optimizer's state are sharded over
    (`--learner N`). Of a number of GPUs, rank 0 has `device` and each other rank the next one."""


def check_installed(rules: Learner) -> None:
    """Refuse 8-bit moments without their library.

    Raises:
        ConfigError: with the extra.
    """
    if rules.optimizer_state == "8bit" and find_spec("torchao") is None:
        raise ConfigError(
            'learner.optimizer_state = "8bit" needs the package torchao, which is not installed: '
            "pip install 'mage_async[8bit]', or leave the key out"
        )
