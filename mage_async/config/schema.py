"""The configuration of a run: typed and complete. A file says every key, or names another that
does (`mage_async/config/config_file.py`).
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

Count = Annotated[int, Meta(ge=1)]
Natural = Annotated[int, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
NonNegative = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
Key = Literal["group", "member", "seat", "kind", "episode", "index", "anchor"]
Matchmaker = Literal["decks", "fixed", "resampled", "prioritised"]
Keep = Literal["newest", "best", "spread"]
CorrectionKind = Literal[
    "none",
    "ppo",
    "decoupled",
    "tis",
    "icepop",
    "mis_token",
    "mis_sequence",
    "mis_geometric",
    "cispo",
    "gspo",
    "dppo",
    "m2po",
    "decoupled_aged",
    "age_mask",
]
CreditKind = Literal[
    "differential",
    "differential_dense",
    "cumulative_paper",
    "cumulative_code",
    "single_episode",
    "final_only",
]


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table of the file; a key it does not know is an error."""


class Environment(Section):
    """Which environment, by catalogue name or `module:Class`, and its own options."""

    name: str
    options: dict[str, Any]


class TrialShape(Section):
    """What one trial is made of, and what of earlier episodes stays in its context."""

    episodes: Count
    memory: Literal["none", "history", "reflection", "history_and_reflection"]
    """With none every episode is a first one: independent retries."""
    stop_on_success: bool
    """In training, an episode that is won ends its trial, as in LaMer and MAGE. Evaluations always
    play all episodes, so that each has a return of its own.
    """
    strategy: Literal["none", "episode", "turn"]
    """Before an episode's first action, or before every one, the agent writes in a remark what it
    means to do (SGE)."""


class Curriculum(Section):
    """A horizon that grows with the policy version; off where both lists are empty."""

    steps: Count
    """So many steps a stage lasts; the last one stays."""
    turns: list[Count]
    """Most actions of an episode, stage by stage; []: what the environment allows."""
    episodes: list[Count]
    """Of a trial, stage by stage; the last is `trial.episodes`. []: that, always."""


class Transcript(Section):
    """How a trial becomes chat."""

    rules: bool
    """Begin with the rules in words. A real model needs them; the tiny default learns them."""
    forced_tags: Literal["none", "open", "both"]
    """Which `<action>` tags the transcript writes itself instead of letting the policy sample them.
    """
    max_action_tokens: Count
    max_reflection_tokens: Count
    """Of a reflection, and of a strategy."""
    thinking: bool
    """Let a chat template that can (Qwen3's) have the policy think before it answers. Thinking
    counts as part of the completion and stays in its context; an action is looked for outside it.
    """


class TinyModel(Section):
    """Shape of the model built locally when `policy.source` is "tiny"; Qwen3's architecture."""

    hidden_size: Count
    layers: Count
    heads: Count
    kv_heads: Count
    mlp_size: Count
    rope_theta: Positive


class Policy(Section):
    """The agent: "tiny", or a HuggingFace causal LM by directory or hub id."""

    source: str
    dtype: Literal["float32", "bfloat16"]
    tiny: TinyModel


class WarmStart(Section):
    """Behaviour cloning of scripted play, before RL. With 0 steps RL begins from the model."""

    steps: Natural
    episodes: Count
    """Of a scripted trial; more than the training's where single-episode RL is the baseline."""
    trials: Count
    batch_size: Count
    learning_rate: Positive
    template_weight: Share
    """Loss weight of tokens the transcript forces; words of the game and sampled tokens weigh 1."""
    gate: Share
    """Go on until the loss on observations in the last episode is at most this share of the first
    one's; 1.0 is no gate.
    """
    max_steps: Natural
    """Give up the gate after so many steps, with an error."""
    cache: bool
    """Keep the result under the user's cache directory, for later runs of the same warm start."""
    threads: Count
    """Two are a quarter faster on two idle cores, and three times slower than one on busy ones."""


class SamplingRules(Section):
    """How actors draw tokens in training. Log-probs are after temperature, before top-p and top-k
    on every engine, so a loss is of what was drawn with top-p 1 and top-k 0 alone.
    """

    temperature: Positive
    strategy_temperature: Positive
    """Of strategies, where `trial.strategy` asks for them."""
    top_p: Annotated[float, Meta(gt=0, le=1)]
    top_k: Natural


class Engine(Section):
    """What serves the policy inside each actor."""

    kind: Literal["embedded", "sglang"]
    """In this process, on processors; or an SGLang of its own, in a process under the actor."""
    arithmetic: Literal["float32", "exact"]
    """Of the embedded engine. exact: a completion is the same, bit by bit, whatever is computed
    beside it; with the rule `sync` and max_staleness 0 a run is a function of its configuration.
    """
    max_contexts: Count
    max_tokens: Count
    """Longest context, prompt and completion together."""
    cache_rule: Literal["keep", "refresh_at_episode", "isolate"]
    """Whether cached keys of older weights are read on, or recomputed when an episode begins, or
    at every turn. A new context never begins with keys of older weights.
    """
    threads: Count
    in_flight: Literal["in_place", "interrupt"]
    """Turns that new weights come into: go on over the keys they have, or end there and go on as a
    new request, of which the cache rule says what it recomputes.
    """
    turn_deadline_s: Positive
    """A turn that is not drawn by then costs its group; a start of an SGLang is part of it."""
    devices: list[Natural]
    """GPUs of the actors' engines, one each, from the first again where there are more actors; the
    evaluator's is the last. A process sees no other GPU. []: each sees all there are.
    """
    server: dict[str, Any]
    """Arguments for SGLang's server by its own names, over those we choose; {} otherwise."""


class Admission(Section):
    """How many groups are in flight, and how stale they may become."""

    groups_per_step: Count
    trials_per_group: Count
    rule: Literal["sync", "one_step", "count", "window", "strict", "drop", "slots", "unbounded"]
    """What it guarantees says `mage_async/admission/rules.py`."""
    max_staleness: Natural
    """In steps; with the rule `slots` a hard bound per group."""
    max_groups_in_play: Count
    """Granted and not complete; actors' contexts bound them too."""
    over_age_target: Share
    """Play only so many groups at once that the predicted share of tokens over `max_staleness` is
    at most this; 1: as many as there may be. See `mage_async/admission/concurrency.py`.
    """
    lag: Annotated[int, Meta(ge=0, le=8)]
    """Actors play with the weights of so many steps ago: adds to staleness without changing speed.
    For experiments; 0 otherwise.
    """
    grant_deadline_s: Positive
    """A group not finished by then is granted again."""
    max_drops_in_a_row: Count
    """So many groups dropped without one trained end the run, with the reason."""


class Population(Section):
    """Whom the agent meets in training; see `mage_async/tasks/`."""

    matchmaker: Matchmaker
    """The environment's members in shuffled decks; the same one always in the same place of a step,
    as in MAGE; any; or by how much the agent could still gain against them.
    """
    rivals: Share
    """Share of groups that meet a version of the policy instead, in the opponent's seat; 0: none.
    Only the agent's side is trained on.
    """
    every: Natural
    """A version becomes a rival every so many steps; 0: the newest is the only one (self-play)."""
    kept: Count
    """So many rivals at most."""
    keep: Keep
    """Which stay of too many: the newest, the best rated, or some from all times."""


class Credit(Section):
    """Rewards to returns; see `mage_async/credit/returns.py`."""

    kind: CreditKind
    turn_discount: Share
    episode_discount: Share
    information_bonus: NonNegative
    """Reward per nat that a turn gains about who is hidden, in every episode but the last; 0: none.
    Needs an environment with a Bayes filter; see `mage_async/credit/exploration_bonus.py`.
    """


class Advantage(Section):
    """Returns to advantages; see `mage_async/credit/estimators.py`."""

    estimator: Literal["group_mean", "leave_one_out", "gigpo"]
    """Return against the mean of its cell, or of the others in it (RLOO); or GiGPO's two terms."""
    baseline: list[Key]
    """Whom a turn is compared with; for gigpo the cells of its first term."""
    scale: list[Key] | Literal["none"]
    weight: Literal["trial", "sample"]
    epsilon: NonNegative
    anchor_weight: NonNegative
    """Of the comparison with turns taken in the same state."""
    format_penalty: NonNegative
    """For a turn without a valid action or remark, in every episode."""
    length_penalty: NonNegative
    """For a completion as long as its limit; from half of it on, linearly."""
    penalise: Literal["advantage", "return", "score"]
    """Where penalties are taken: from the advantage after all normalisation; from returns (and
    scores) before it; or from gigpo's first term alone, as the reference does."""


class Learner(Section):
    """The optimisation."""

    steps: Natural
    minibatches: Count
    learning_rate: Positive
    final_learning_rate: NonNegative
    warmup_steps: Natural
    correction: CorrectionKind
    """The loss on stale tokens; see `mage_async/learning/corrections/`. Each uses some of the
    constants below.
    """
    clip_low: Share
    clip_high: NonNegative
    dual_clip: NonNegative
    """Bound of the loss where an advantage is negative, in units of it; above 1, or 0 for none."""
    max_weight: Annotated[float, Meta(ge=1)]
    """Importance weights are truncated here, or masked above it."""
    keep_low: Share
    """Tokens, or turns, with a weight outside `keep_low .. keep_high` are masked (icepop,
    mis_geometric).
    """
    keep_high: Annotated[float, Meta(ge=1)]
    max_probability_change: Share
    """Of dppo."""
    max_second_moment: Positive
    """Of m2po: of the log-ratio, in nats squared."""
    age_decay: Share
    """Of decoupled_aged: per step of staleness, what is left of `max_weight - 1`."""
    max_age: Natural
    """Of age_mask: staler tokens are masked, in steps."""
    kl: NonNegative
    """Weight of the divergence from the policy that training began with, k3 per token; 0: none, and
    no second model in memory."""
    entropy: NonNegative
    """What a nat of a sampled action's entropy is worth: at the first step."""
    final_entropy: NonNegative
    """At the last one, linearly."""
    entropy_ceiling: NonNegative
    """In nats: a token of more entropy is given no bonus; 0: every one is. Such a bonus acts at
    once, and what speaks against it as late as the data are old (Skywork-OR1, arXiv 2505.22312,
    stops it by the batch's mean).
    """
    grad_clip: Positive
    beta1: Share
    beta2: Share
    weight_decay: NonNegative
    checkpoint_every: Count
    keep_checkpoints: Count
    device: Annotated[str, Meta(pattern=r"^(cpu|cuda(:\d+)?)$")]
    """"cpu", or a GPU: "cuda:0"."""
    threads: Count


class Evaluation(Section):
    """Curves while training, and the final measure with its controls."""

    every: Natural
    """Steps between points of the curve; 0: none."""
    trials: Count
    final_trials: Count
    episodes: Count


class Transport(Section):
    """Between the learner and its peers."""

    address: str
    """Where the learner is reached: "ipc" (a private socket file), or tcp://HOST:PORT."""
    keys: str
    """Directory of CURVE keys, made by `mage keys new`; "": none, and then HOST is 127.0.0.1."""
    weights: Literal["disk", "tensor", "nccl"]
    """How weights reach the engines: a file a version (any host that sees the run's directory),
    shared memory (one host), or sent from GPU to GPU (one host; by Gloo where there is no GPU).
    """


class Journal(Section):
    """What is kept on disk of grants, trials and steps."""

    max_bytes: Count
    """Above half of it, and on a full disk, segments that a checkpoint has made unnecessary are
    deleted; at it, no trial is taken in until there is space."""
    segment_bytes: Count
    """A segment that has become so long is followed by a new one after the next step."""


class Supervision(Section):
    """How the processes are watched."""

    max_restarts: Natural
    silence_s: Positive
    """A process that says nothing for so long is taken for dead."""


class Config(Section):
    """A whole run."""

    seed: Natural
    environment: Environment
    trial: TrialShape
    curriculum: Curriculum
    transcript: Transcript
    policy: Policy
    warm_start: WarmStart
    sampling: SamplingRules
    engine: Engine
    admission: Admission
    population: Population
    credit: Credit
    advantage: Advantage
    learner: Learner
    evaluation: Evaluation
    transport: Transport
    journal: Journal
    supervision: Supervision


def digest(config: Config) -> str:
    """Eight hex digits that peers compare before they work together."""
    from hashlib import blake2s

    return blake2s(msgspec.json.encode(config, order="sorted"), digest_size=4).hexdigest()
