"""Define the keys of training: admission of groups, population of opponents, optimisation."""

from importlib.util import find_spec
from typing import Annotated, Literal

from msgspec import Meta

from mage_async.config.components import (
    CORRECTIONS,
    MATCHMAKERS,
    AnyCorrection,
    AnyMatchmaker,
)
from mage_async.config.section import Count, Natural, NonNegative, Positive, Section, Share
from mage_async.errors import ConfigError

Keep = Literal["newest", "best", "spread"]


class Admission(Section):
    """How many groups are in flight, and how stale they may become."""

    groups_per_step: Count = 16
    """Groups in the batch of a step."""
    trials_per_group: Count = 8
    """Trials of one task, which are compared with each other."""
    rule: Literal[
        "sync", "one_step", "count", "window", "strict", "drop", "slots", "overtake", "unbounded"
    ] = "slots"
    """Rule by which groups are granted to actors and accepted into a batch;
    `mage_async/admission/policies.py` states the guarantee of each."""
    max_staleness: Natural = 2
    """Bound on the staleness of a group, in steps; the rules "slots" and "overtake" never exceed
    it."""
    replaced_groups: Natural = 0
    """Most groups of a step that are dropped because all their trials earned the same in every
    episode, and are replaced by new ones (dynamic sampling of DAPO, arXiv 2503.14476): compared
    with each other, such trials teach nothing. 0 replaces none."""
    max_groups_in_play: Count = 1024
    """Most groups that are played at a time (granted and not complete); the contexts of the actors'
    engines limit them too."""
    over_age_target: Share = 1.0
    """Largest share of tokens that is predicted to exceed `max_staleness`; fewer groups are granted
    to stay below it (`mage_async/admission/concurrency.py`). 1 is no bound."""
    lag: Annotated[int, Meta(ge=0, le=256)] = 0
    """Steps by which the weights of actors lag behind the newest, which adds staleness without
    changing the speed; for experiments. As many versions are kept."""
    grant_deadline_s: Positive = 600.0
    """Seconds after which an unfinished group is granted again."""


class Population(Section):
    """What the agent meets in training: task variants of the environment, called members, and past
    versions of its own policy as opponents."""

    matchmaker: AnyMatchmaker = MATCHMAKERS.load("decks")()
    """How the member that a group meets is chosen."""
    mixed_groups: bool = False
    """Whether each trial of a group meets a member of its own, drawn at random. For ablations: in
    MAGE all trials of a group meet one opponent."""
    rivals: Share = 0.0
    """Share of groups that meet a past policy, in the opponent's seat, instead of a member; only
    the agent's side is trained on."""
    every: Natural = 0
    """Number of steps between two versions that are kept as past policies; with 0 the only past
    policy is the newest version (self-play)."""
    kept: Count = 8
    """Most past policies at once."""
    keep: Keep = "spread"
    """Which past policies stay if there are more: the newest, the best rated, or some spread over
    the run."""
    rivals_remember: bool = False
    """Whether a past policy remembers the trial's earlier episodes and writes reflections, as the
    agent does; if not, each episode is its first one."""


class Learner(Section):
    """The optimisation, with AdamW."""

    steps: Natural = 200
    """Steps of the run; each makes one policy version."""
    minibatches: Count = 8
    """Optimizer updates per step."""
    learning_rate: Positive = 2e-6
    """Learning rate after the warm-up."""
    final_learning_rate: NonNegative = 0.0
    """Learning rate at the last step, to which it falls linearly."""
    warmup_steps: Natural = 10
    """Steps over which the learning rate grows from 0."""
    correction: AnyCorrection = CORRECTIONS.load("decoupled")()
    """The loss on stale tokens."""
    average: Literal["token", "trial", "turn"] = "token"
    """How the policy loss is averaged. "token": over all tokens of an update. "trial": over the
    tokens of each trial, then over trials (GRPO). "turn": over the tokens of each turn, then over
    the turns of each kind in a trial, then over trials (arXiv 2503.09501). KL term and entropy
    bonus are always means over tokens."""
    kl: NonNegative = 0.0
    """Weight of the KL divergence from the initial policy, estimated by k3 per token in nats;
    with 0 no second model is in memory."""
    entropy: NonNegative = 0.0
    """Weight of the entropy bonus at the first step, per nat of a sampled token's entropy."""
    final_entropy: NonNegative = 0.0
    """Weight of the entropy bonus at the last step, to which it changes linearly."""
    entropy_ceiling: NonNegative = 0.0
    """Entropy in nats above which a token gets no bonus; 0 is no ceiling. With stale data a
    bonus acts at once and the rewards against it later, so entropy can run away (Skywork-OR1,
    arXiv 2505.22312, stops the bonus by the batch's mean)."""
    max_tokens_per_microbatch: Natural = 0
    """Most tokens of one forward pass. A larger minibatch is split into micro-batches whose
    gradients add up. 0 is no bound; otherwise at least `engine.max_tokens`."""
    shared_opening: bool = False
    """Compute the tokens that all sequences of a micro-batch begin with (the chat's first turn:
    rules and first observation) only once, in the warm start too; the gradient is the same."""
    activation_checkpointing: bool = False
    """Keep one activation per layer and recompute the others in the backward pass: a small part of
    the memory for a third more time."""
    float32_masters: bool = False
    """With `policy.dtype = "bfloat16"`, let the optimizer update a float32 copy of each trained
    weight and round it into the model: 8 more bytes per weight, and no update is rounded to
    zero."""
    optimizer_state: Literal["full", "8bit"] = "full"
    """AdamW's two moments, in the type of the trained weights or in one byte each by torchao (`pip
    install "mage_async[8bit]"`): 2 bytes per trained weight instead of 8 in float32."""
    matmul_precision: Literal["highest", "high", "medium"] = "highest"
    """Precision of products of float32 matrices, as in PyTorch's `set_float32_matmul_precision`: on
    a GPU "high" is TF32, with 10 bits of mantissa. Products in bfloat16 do not change."""
    grad_clip: Positive = 1.0
    """Largest norm of the gradient."""
    beta2: Share = 0.99
    """AdamW's decay of the second moment; that of the first is 0.9."""
    weight_decay: NonNegative = 0.0
    """AdamW's weight decay."""
    checkpoint_every: Count = 20
    """Steps between checkpoints."""
    keep_checkpoints: Count = 2
    """Number of checkpoints that are kept."""
    device: Annotated[str, Meta(pattern=r"^(cpu|cuda(:\d+)?)$")] = "cpu"
    """"cpu", or a GPU: "cuda:0"."""
    threads: Count = 4
    """Threads of the learner's process, or of each rank."""
    ranks: Count = 1
    """Processes of this machine over which weights, gradients and optimizer state are sharded
    (`--learner N`). On GPUs, rank 0 has `device` and each further rank the next one."""


def check_installed(learner: Learner) -> None:
    """Refuse 8-bit moments if torchao is not installed.

    Raises:
        ConfigError: with the extra.
    """
    if learner.optimizer_state == "8bit" and find_spec("torchao") is None:
        raise ConfigError(
            'learner.optimizer_state = "8bit" needs the package torchao, which is not installed: '
            "pip install 'mage_async[8bit]', or leave the key out"
        )
