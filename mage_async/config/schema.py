"""Define the configuration of a run: all sections in one struct.

The defaults suit a pretrained model on GPUs; `mage_async/config/defaults.py` has those of a tiny
policy, and of a pretrained one on CPU cores, where they differ.
"""

from hashlib import blake2s
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta, field

from mage_async.config.components import (
    CORRECTIONS,
    CREDITS,
    ESTIMATORS,
    MATCHMAKERS,
    TRACKERS,
    WEIGHT_TRANSPORTS,
    AnyAdvantage,
    AnyCorrection,
    AnyCredit,
    AnyMatchmaker,
    AnyTracker,
    AnyWeightTransport,
)
from mage_async.config.section import Count, Natural, NonNegative, Positive, Section, Share, Variant
from mage_async.config.tables import MethodTables
from mage_async.errors import ConfigError, PolicyError
from mage_async.user_modules import address_of


class Environment(Section):
    """The environment and its own options."""

    name: str = "rps"
    """Name in the catalogue, `module:Class` of your own, or `gymnasium:Taxi-v4` and the like. From
    Python it may also be the class itself."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the environment."""
    ladder: str = ""
    """Curriculum: the name of one of the environment's ladders, such as "boxes". A ladder lists
    values of an option from easy to hard, its rungs. Training begins with the easiest rung and ends
    with `options`; evaluations play all rungs. "" trains on `options` alone."""
    rung_steps: Count = 10
    """Number of steps that each rung of the curriculum lasts, before groups of the next rung are
    granted; the last rung lasts until the end."""
    step_deadline_s: Positive = 60.0
    """Timeout in seconds of one call of an environment: of `reset`, `step` or `close` of a class
    with `reset` and `step`, or of `begin` or `act` of another class of your own, of TextWorld or of
    ALFWorld. If the agent is a program: timeout of an episode, without the time in which the
    program waits for the policy. A call that times out counts as failed."""
    retries: Natural = 8
    """How often a trial is played again, with the same task and seed but new environment objects,
    after a call of its environment has failed, or its engine has lost a turn or missed
    `engine.turn_deadline_s`. The first retry comes at once, later ones after 1, 2, 4 … seconds, at
    most 30. If the last retry fails too, or the first retry raises the same error of the class,
    such as a `ValueError`, in the same line again, the trial's group is dropped; in an evaluation
    the trial ends where it failed. With 0 every failure drops a group, so tasks that fail often are
    trained on less."""
    workers: Natural = 0
    """Worker processes of each actor that run the code of a class with `reset` and `step`. If a
    worker dies, the calls of its episodes fail, but the actor goes on. With 0 the class runs in the
    actor's own process."""
    most_open: Natural = 0
    """Largest number of environment objects that an actor has open at once (objects of a class with
    `reset` and `step`, or objects that `begin` of another class of your own returns), for a server
    that limits its sessions. Further episodes wait before they begin. 0 is no bound."""
    idle_s: NonNegative = 0.0
    """Seconds without a call after which an environment object is closed; a later call then fails.
    0 closes none, however long a turn takes."""
    wait_for_room_s: NonNegative = 0.0
    """Seconds for which a `reset` that raises `CapacityReached` is tried again, every second and
    whenever another object was closed. After these seconds the call fails."""

    def __post_init__(self) -> None:
        # Other processes load the class by its address. The struct is frozen, hence `force_`.
        if isinstance(self.name, type):
            msgspec.structs.force_setattr(self, "name", address_of(self.name))


class ContextBounds(NamedTuple):
    """Hold the largest numbers of actions and of remarks (strategies, reflections) in a context."""

    num_actions: int
    """Actions that the agent writes in the context."""
    num_remarks_written: int
    """Remarks that the agent writes in the context."""
    num_remarks_held: int
    """All remarks in the context: those written in it, and the reflections on earlier episodes with
    which it begins."""


class TrialShape(Section):
    """The episodes and turns of a trial, and the part of earlier episodes that stays in the
    context.
    """

    episodes: Count = 3
    """Episodes of a trial in training."""
    memory: Literal[
        "none", "history", "reflection", "history_and_reflection", "notes", "truncation"
    ] = "history"
    """The part of earlier episodes that an episode's context holds; with "none" episodes are
    independent retries. With "notes" the history stays until it would outgrow `room`, which may be
    in the middle of an episode: then the agent writes notes, and a new context begins with them in
    place of the history. With "truncation" the oldest turns are left out then instead."""
    room: Natural = 0
    """Longest context, in tokens, with `memory = "notes"` or "truncation"; 0 is
    `engine.max_tokens`."""
    train_notes: bool = True
    """Whether the tokens of notes are trained on, with the return of the action that follows them;
    if not, their advantage is 0, and only the other turns are trained on."""
    repeats: Literal["same", "fresh"] = "same"
    """Whether the episodes of a trial begin alike in an environment of your own. "same": they do,
    and a rehearsal checks it before the run starts. "fresh": they may differ, and the rehearsal
    does not compare them."""
    stop_on_success: bool = False
    """Whether an episode that is won ends its trial in training, as in LaMer and MAGE. Evaluations
    always play all episodes, so that each has a return of its own."""
    episode_budget: Natural = 0
    """Budget of turns for a whole trial, counted in episodes of full length, as in ORBIT: with 2, a
    trial has as many turns as two longest episodes, and an agent that wins early plays more
    episodes, up to `episodes`, which must be larger. In metrics by episode, the last played episode
    stands for those that were not played. 0 is no budget."""
    strategy: Literal["none", "episode", "turn"] = "none"
    """Before which actions the agent writes a remark on what it intends to do: "episode", before
    the first one of each episode; "turn", before each one."""

    def most_turns(self, max_turns: int) -> int:
        """Return the largest number of actions of a trial; an episode has at most `max_turns`."""
        return (self.episode_budget or self.episodes) * max_turns

    def most_completions(self, max_turns: int) -> int:
        """Return the largest number of actions, strategies and reflections of a trial; an episode
        has at most `max_turns` actions.
        """
        actions = self.most_turns(max_turns)
        strategies = {"none": 0, "episode": self.episodes, "turn": actions}[self.strategy]
        return actions + strategies + (self.episodes - 1 if self.reflects else 0)

    def context_bounds(self, max_turns: int) -> ContextBounds:
        """Return the bounds of a context that notes never replace.

        Args:
            max_turns: Largest number of actions of an episode.
        """
        episodes = self.episodes if self.keeps_history else 1
        actions = self.most_turns(max_turns) if self.keeps_history else max_turns
        strategies = {"none": 0, "episode": episodes, "turn": actions}[self.strategy]
        # No reflection follows the last episode.
        reflections = self.episodes - 1 if self.reflects else 0
        written = strategies + min(episodes, reflections)
        return ContextBounds(actions, written, strategies + reflections)

    @property
    def reflects(self) -> bool:
        """Whether the agent writes a reflection between episodes."""
        return "reflection" in self.memory

    @property
    def keeps_history(self) -> bool:
        """Whether earlier episodes stay in the context, as far as they fit into it."""
        return self.memory not in ("none", "reflection")

    @property
    def compaction(self) -> Literal["none", "notes", "truncation"]:
        """How a context that would outgrow `room` is shortened."""
        return self.memory if self.memory in ("notes", "truncation") else "none"


class Transcript(Section):
    """How a trial is written as a chat."""

    rules: bool = True
    """Write rules and requests as sentences, which a pretrained model reads. With false there are
    no rules, and requests are single words, whose meaning the tiny model learns by training."""
    forced_tags: Literal["none", "open", "both"] = "none"
    """Which `<action>` tags the transcript writes itself instead of letting the policy sample them.
    """
    max_action_tokens: Count = 64
    """Longest action, in tokens."""
    max_reflection_tokens: Count = 192
    """Longest reflection, longest strategy and longest notes, in tokens."""
    thinking: bool = False
    """Let the policy think before it answers, if the chat template supports it, as Qwen3's does.
    The thoughts are part of the completion and stay in its context; actions in them are ignored."""


class SamplingConfig(Section):
    """How actors sample tokens in training.

    Engines report log-probs after temperature and before top-p and top-k, so the importance ratio
    is exact only with top_p = 1 and top_k = 0.
    """

    temperature: Positive = 1.0
    """Temperature of all tokens except those of strategies."""
    restricted: bool = True
    """Sample an action from the legal ones alone, where the environment lists them or declares a
    pattern of them, and the transcript writes the opening tag (`transcript.forced_tags`).
    Log-probs, entropy and the ratio are then those of this restricted distribution."""
    strategy_temperature: Positive = 1.0
    """Temperature of strategies, if `trial.strategy` is on."""
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Probability mass that is sampled from; 1 is all tokens."""
    top_k: Natural = 0
    """Number of likeliest tokens that are sampled from; 0 is all tokens."""


class Engine(Variant):
    """The inference engine of an actor, or of the evaluator."""

    max_contexts: Count = 32
    """Contexts that are served concurrently; at least `admission.trials_per_group`."""
    max_tokens: Count = 8192
    """Longest context in tokens, prompt and completion together."""
    cache_rule: Literal["keep", "refresh_at_episode", "isolate"] = "refresh_at_episode"
    """What happens to a context's KV cache when weights change: it is kept, recomputed when an
    episode begins, or recomputed at every turn. A new context never begins with a cache of older
    weights."""
    threads: Count = 4
    """Threads of the engine's process."""
    in_flight: Literal["in_place", "interrupt"] = "in_place"
    """What happens to a turn in progress when new weights arrive. "in_place": it goes on with the
    KV cache that older weights have computed. "interrupt": it ends and goes on as a new request,
    for which `cache_rule` decides what is recomputed."""
    turn_deadline_s: Positive = 300.0
    """Seconds after which an incomplete turn has failed, and its trial is played again. The time in
    which an SGLang server starts is part of the turn."""
    devices: list[Natural] = field(default_factory=list)
    """GPUs of the actors' engines, one for each actor (or `gpus_per_actor`). With more actors than
    GPUs, assignment begins again at the first GPU. The evaluator gets the last one. GPUs are
    counted from 0 among those that CUDA_VISIBLE_DEVICES shows to the run, as in `learner.device`. A
    process sees only its own GPUs; with [] it sees all GPUs of the run."""

    @property
    def num_gpus(self) -> int:
        """Number of GPUs over which one engine shards its model."""
        return 1

    def devices_of(self, number: int) -> tuple[int, ...]:
        """Return the GPUs of an actor by its number, or of the evaluator for -1; () for all."""
        starts = range(0, len(self.devices), self.num_gpus)
        groups = [tuple(self.devices[start : start + self.num_gpus]) for start in starts]
        return groups[number % len(groups)] if groups else ()


class Embedded(Engine, tag="embedded"):
    """Our own engine inside the actor's process, on CPU cores."""

    arithmetic: Literal["float32", "bfloat16", "exact"] = "float32"
    """Arithmetic of the engine. With "bfloat16" the layers' matrices have 16 bits, which is
    twice as fast on processors with AVX512-BF16 or AMX and slower on others; the LM head stays
    float32. With "exact" a completion has the same bits whatever else is in the batch, so that
    with `admission.rule = "sync"` and `max_staleness = 0` a run is a function of its
    configuration."""


class Sglang(Engine, tag="sglang"):
    """An SGLang server in a child process of the actor."""

    gpus_per_actor: Count = 1
    """GPUs over which an engine shards its model (tensor parallelism); the model's heads, key-value
    heads and MLP width must be multiples of it."""

    server: dict[str, Any] = field(default_factory=dict)
    """Arguments of SGLang's server by its own names, which override ours; for determinism
    { enable_deterministic_inference = true }."""

    @property
    def num_gpus(self) -> int:
        """Number of GPUs over which one engine shards its model."""
        return self.gpus_per_actor


LINEAR_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Names of the linear layers in a transformer block of the Llama family."""


class Lora(Section):
    """Low-rank adapters that are trained instead of the model's own weights (Hu et al. 2021,
    arXiv 2106.09685). Optimizer state and checkpoints are then a small part of their usual size."""

    rank: Count = 16
    """Rank of an adapter."""
    alpha: Positive = 32.0
    """An adapter's output is scaled by `alpha / rank`."""
    targets: list[str] = field(default_factory=lambda: [*LINEAR_LAYERS])
    """Linear layers that get an adapter, by the last part of their name."""


class Policy(Variant):
    """The agent's weights."""

    lora: Lora | None = None
    """Adapters to train; None trains all weights."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type in which the learner trains. At learning rates of 1e-6 bfloat16 rounds updates to zero,
    unless `learner.float32_masters` is on."""


class Tiny(Policy, tag="tiny"):
    """A model of Qwen3's architecture with random weights, built for the environment's words."""

    hidden_size: Count = 64
    """Width of the residual stream; a multiple of twice `heads`."""
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

    source: str = ""
    """Directory of the model, or its id on the hub. No other model is ever downloaded."""


class WarmStart(Variant):
    """Behaviour cloning before RL; without this section RL begins at once."""

    steps: Natural = 150
    """Steps of cloning over which the learning rate falls to a tenth. 0 is the same as no section.
    """
    episodes: Count = 3
    """Episodes of a cloned trial. A single-episode RL baseline sets more than `trial.episodes`, so
    that it begins from the same policy as the run that it is compared with."""
    trials: Count = 3000
    """Number of trials that are played to be cloned."""
    batch_size: Count = 64
    """Trials per step of cloning."""
    learning_rate: Positive = 0.002
    """AdamW's rate while cloning."""
    cache: bool = True
    """Whether the result is kept under the user's cache directory, for later runs of the same warm
    start."""
    threads: Count = 1
    """Threads of the cloning: two are a quarter faster on two idle cores, and three times slower
    than one on busy ones."""


class GatedWarmStart(WarmStart):
    """Behaviour cloning that goes on after `steps` until the gate opens."""

    gate: Share = 1.0
    """Cloning goes on after `steps` until the loss on observations of the last episode is at most
    this share of the loss on those of the first episode: a model that uses earlier episodes gets
    there. If the observations of the last episode are easier to predict by themselves, any model
    does, and the run prints a note. 1.0 is no gate."""
    max_steps: Natural = 400
    """Largest number of steps: after these the warm start ends even if the gate is still shut, and
    the run prints a note. Steps beyond `steps` have a tenth of the learning rate."""


class FromScript(GatedWarmStart, tag="script"):
    """The environment's script plays."""

    gate: Share = 0.8
    """Cloning goes on after `steps` until the loss on observations of the last episode is at most
    this share of the loss on those of the first episode: a model that uses earlier episodes gets
    there. If the observations of the last episode are easier to predict by themselves, any model
    does, and the run prints a note. 1.0 is no gate."""


class FromScriptIfAny(FromScript, tag="auto"):
    """The environment's script plays. In an environment without a script, the player of "win_stay"
    plays, and `gate` and `max_steps` have no effect; if that player is not worth cloning either,
    there is no warm start."""


class FromRandom(GatedWarmStart, tag="random"):
    """Random legal play, which teaches the form of a trial and the answers of the environment."""


class FromWinStay(WarmStart, tag="win_stay"):
    """A player without knowledge of the task, which repeats an action that paid in an earlier
    episode and tries another one if none did. A model that clones it learns to look up earlier
    episodes. Nothing is cloned if it earns no more than random play, or no more than in its first
    episode, or if a trial takes long."""

    repeat_gate: Share = 0.5
    """The learning rate is constant until the loss on actions that the player repeats is at most
    this share of the loss on actions that it only tries, which shows that the model looks up
    earlier episodes. Then the rate falls over `steps`."""
    max_stable_steps: Natural = 800
    """Largest number of steps with a constant learning rate. After these the rate falls even if the
    loss on repeated actions is still larger."""
    steps: Natural = 200
    """Steps of cloning over which the learning rate falls to a tenth. 0 is the same as no section.
    """
    trials: Count = 1000
    """Number of trials that are cloned until the learning rate falls. A small model learns sooner
    to look up earlier episodes from few trials that it meets often."""
    further_trials: Natural = 3000
    """Number of trials that are cloned too while the rate falls, so that the first ones are not
    learned by heart; fewer if they take more than 20 s to play."""
    batch_size: Count = 32
    """Trials per step of cloning."""
    learning_rate: Positive = 0.004
    """AdamW's rate while cloning."""


class FromBest(GatedWarmStart, tag="best"):
    """The best of the model's own trials: those with the largest return of the last episode."""

    kept: Share = 0.1
    """Share of the trials that is cloned, at least one trial."""


class FromData(GatedWarmStart, tag="data"):
    """A data set. Of rows with `messages`, the assistant's messages are cloned; rows with `text`
    are cloned whole."""

    path: str = ""
    """A file of JSON lines or Parquet, or a folder of such files, as HuggingFace's hub has them and
    `mage journal --export` writes them."""


DATA_ENDINGS = (".jsonl", ".parquet")
"""Endings of the names of a data set's files."""
AnyWarmStart = FromScriptIfAny | FromScript | FromRandom | FromWinStay | FromBest | FromData
"""The type of `[warm_start]`: one class for each of its kinds."""


def check_widths(policy: Policy) -> None:
    """Refuse a tiny model whose `hidden_size` is no even multiple of `heads`, or whose `heads` is
    no multiple of `kv_heads`.

    Raises:
        ConfigError: the message has the keys and their values.
    """
    if not isinstance(policy, Tiny):
        return
    # A rotary embedding rotates pairs of a head's numbers, so a head's width is even.
    if policy.heads % policy.kv_heads or policy.hidden_size % (2 * policy.heads):
        raise ConfigError(
            "policy: hidden_size must be a multiple of 2 * heads, and heads of kv_heads; "
            f"got {policy.hidden_size}, {policy.heads}, {policy.kv_heads}"
        )


def data_files(path: str) -> list[Path]:
    """Return the files of a data set: the file at `path`, or all files in and below a folder.

    Raises:
        ConfigError: there is no such file.
    """
    place = Path(path)
    files = sorted(place.rglob("*")) if place.is_dir() else [place]
    found = [file for file in files if file.suffix in DATA_ENDINGS and file.is_file()]
    if not path or not found:
        raise ConfigError(
            f"warm_start.path = {path!r}: no data set is there: give a file that ends in "
            f"{' or '.join(DATA_ENDINGS)}, or a folder of such files"
        )
    return found


def check_source(policy: Policy) -> None:
    """Refuse a `policy.source` that is neither a model directory nor a hub id.

    Raises:
        PolicyError: as `local_policy`.
    """
    if isinstance(policy, Pretrained):
        local_policy(policy.source)


ADAPTER = "adapter_config.json"
"""Name of a file that only a directory with an adapter has."""
MERGE = "merge it into its model with peft's merge_and_unload, and save the result elsewhere"
"""Advice to a user whose model directory has an adapter."""


def _instead_of(directory: Path) -> str:
    """Return advice for a directory without a model: which directory to give instead. "" if none is
    known.
    """
    if (directory / ADAPTER).is_file():
        return f" but an adapter: {MERGE}"
    # transformers' Trainer and the hub's cache give these names to model directories.
    inside = [*directory.glob("checkpoint-*"), *directory.glob("snapshots/*")]
    models = [each for each in inside if (each / "config.json").is_file()]
    newest = max(models, key=lambda each: each.stat().st_mtime, default=None)
    return f": give one that it holds, such as {newest}" if newest else ""


def local_policy(source: str) -> Path | None:
    """Return the model directory that a source names, or None for a hub id.

    Raises:
        PolicyError: no source is given, or it is a path at which there is no model.
    """
    if not source:
        raise PolicyError(
            "policy.source is not set: give the directory of a model, or its id on the hub, or set "
            'policy.kind = "tiny" for a small model that is built for the environment'
        )
    if Path(source).is_dir():
        if not (Path(source) / "config.json").is_file():
            raise PolicyError(
                f"{source}: no config.json, so this is no HuggingFace model directory"
                f"{_instead_of(Path(source))}"
            )
        return Path(source).resolve()
    if source.startswith((".", "/", "~")) or source.count("/") > 1:
        raise PolicyError(f"policy.source {source!r} is no directory; give one, or a hub id")
    return None


Keep = Literal["newest", "best", "spread"]
"""Which past policies of a `Population` are kept."""


BOUND_OF = {"sync": 0, "one_step": 1}
"""Bound on staleness, in steps, of each rule that ignores `admission.max_staleness`."""

NO_BOUND = ("count", "window", "unbounded")
"""Rules that do not bound staleness. "count" and "window" only limit the number of groups in flight
to what a bound of `admission.max_staleness` would need; a group may still become staler.
"""


class Admission(Section):
    """How many groups are in flight, and how stale they may become."""

    groups_per_step: Count = 16
    """Groups in the batch of a step."""
    trials_per_group: Count = 8
    """Trials of one task, which are compared with each other."""
    rule: Literal[
        "sync", "one_step", "count", "window", "strict", "drop", "slots", "overtake", "unbounded"
    ] = "slots"
    """Rule by which groups are granted to actors and accepted into a batch; `mage ablate --help`
    states the guarantee of each."""
    max_staleness: Natural = 2
    """Bound on the staleness of a group, in steps. The rules "slots", "strict", "overtake" and
    "drop" never exceed it; "sync" and "one_step" have a bound of their own, 0 and 1; "count",
    "window" and "unbounded" have none."""
    replaced_groups: Natural = 0
    """Largest number of groups of a step that are dropped because all their trials earned the same
    in every episode, and are replaced by new ones (dynamic sampling of DAPO, arXiv 2503.14476): the
    advantages of such trials are 0. A group is kept if its trials still have advantages, because of
    a penalty or because their rewards came at different turns. Must be 0 where groups are compared
    with each other, or a method rewards turns, adds a loss of its own or brings a trainer. 0
    replaces none."""
    max_groups_in_play: Count = 1024
    """Largest number of groups that are played at a time (granted and not complete); the contexts
    of the actors' engines limit them too."""
    over_age_target: Share = 1.0
    """Bound on the predicted share of tokens staler than `max_staleness`: actors play as many
    groups at once as it allows (`mage_async/admission/concurrent_groups.py`). 1 is no bound."""
    lag: Annotated[int, Meta(ge=0, le=256)] = 0
    """Steps by which the weights of actors lag behind the newest, which adds staleness without
    changing the speed; for experiments. The learner keeps the newest `lag + 1` versions."""
    grant_deadline_s: Positive = 600.0
    """Seconds after which an unfinished group is granted again."""

    @property
    def nominal_bound(self) -> int:
        """Staleness of a group, in steps, that the rule aims at; see `NO_BOUND`."""
        return BOUND_OF.get(self.rule, self.max_staleness)

    @property
    def nominal_most_stale(self) -> int:
        """Staleness, in steps, above which metrics count a token as over the bound."""
        return self.nominal_bound + self.lag

    @property
    def most_stale(self) -> int | None:
        """Largest staleness of a token, in steps; None if the rule has no bound."""
        return None if self.rule in NO_BOUND else self.nominal_most_stale


class Population(Section):
    """The tasks and opponents that the agent meets in training: task variants of the environment,
    called members, and past versions of its own policy."""

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
    """Largest number of past policies at once."""
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
    """Learning rate to which the rate falls linearly, one step after the last: with 0, the last of
    200 steps has 1/200 of `learning_rate`. If a file or `--set` gives a `learning_rate` below this
    key's default, and not this key, this key gets the same value."""
    warmup_steps: Natural = 10
    """Steps over which the learning rate grows from 0."""
    correction: AnyCorrection = CORRECTIONS.load("decoupled")()
    """The loss on stale tokens."""
    proximal: Literal["computed", "interpolated"] = "computed"
    """Log-probs under the weights at the beginning of a step, around which the loss is clipped.
    "computed": by a forward for each minibatch but the first. "interpolated": estimated without a
    forward, between the log-probs under the sampling weights and under the present ones, by the
    token's staleness (A-3PO, arXiv 2512.06547)."""
    average: Literal["token", "trial", "turn"] = "token"
    """How the policy loss is averaged. "token": over all tokens of an update. "trial": over the
    tokens of each trial, then over trials (GRPO). "turn": over the tokens of each turn, then over
    the turns of each kind in a trial, then over trials (arXiv 2503.09501). The KL term is averaged
    likewise; the entropy bonus is always a mean over tokens."""
    kl: NonNegative = 0.0
    """Weight of the KL divergence from the initial policy, estimated by k3 per token in nats;
    with 0 no second model is in memory."""
    entropy: NonNegative = 0.0
    """Weight of the entropy bonus at the first step, per nat of the entropy at a sampled token of
    an action. Tokens of remarks get no bonus."""
    final_entropy: NonNegative = 0.0
    """Weight of the entropy bonus to which the weight changes linearly, one step after the last. If
    a file or `--set` gives an `entropy` below this key's default, and not this key, this key gets
    the same value."""
    entropy_ceiling: NonNegative = 0.0
    """Entropy in nats above which a token gets no bonus; 0 is no ceiling. With stale data the bonus
    acts at once, and the rewards that counteract it arrive later, so entropy can run away
    (Skywork-OR1, arXiv 2505.22312, switches the bonus off by the mean entropy of the batch)."""
    entropy_tokens: Literal["all", "restricted"] = "all"
    """Which tokens of actions get the entropy bonus. "restricted": those that were sampled from a
    set of allowed tokens, as of `legal_actions` or of a program's `regex`. Over the whole
    vocabulary of a pretrained model the bonus rewards nonsense."""
    max_tokens_per_microbatch: Natural = 0
    """Largest number of tokens of one forward pass. A larger minibatch is split into micro-batches
    whose gradients add up. 0 is no bound; otherwise at least `engine.max_tokens`."""
    shared_opening: bool = False
    """Whether the tokens that all sequences of a micro-batch begin with (the chat's first turn:
    rules and first observation) are computed only once, in the warm start too; the gradient is the
    same."""
    activation_checkpointing: bool = False
    """Whether one activation per layer is kept and the others are recomputed in the backward pass:
    a small part of the memory for a third more time."""
    float32_masters: bool = False
    """Whether the optimizer, with `policy.dtype = "bfloat16"`, updates a float32 copy of each
    trained weight and rounds it into the model, so that no update is rounded to zero. It takes 10
    more bytes per weight: 4 of the copy, 4 of the moments and 2 of the gradient, which are float32
    too."""
    optimizer_state: Literal["full", "8bit"] = "full"
    """AdamW's two moments, in the type of the trained weights or in one byte each by torchao (`pip
    install "mage_async[8bit]"`): 2 bytes per trained weight instead of 8 in float32."""
    matmul_precision: Literal["highest", "high", "medium"] = "highest"
    """Precision of products of float32 matrices, as in PyTorch's `set_float32_matmul_precision`: on
    a GPU "high" is TF32, with 10 bits of mantissa. Products in bfloat16 do not change."""
    grad_clip: Positive = 1.0
    """Largest norm of the gradient."""
    beta2: Annotated[float, Meta(ge=0, lt=1)] = 0.99
    """AdamW's decay of the second moment; that of the first is 0.9."""
    weight_decay: NonNegative = 0.0
    """AdamW's weight decay."""
    checkpoint_every: Count = 20
    """Steps between checkpoints."""
    checkpoint_minutes: Positive = 10.0
    """Largest number of minutes between checkpoints, for runs whose steps are slow: after a run has
    ended early, `--resume` trains the steps since its newest checkpoint again, from the journal."""
    keep_checkpoints: Count = 2
    """Number of newest checkpoints that are kept; the best one is kept too."""
    device: Annotated[str, Meta(pattern=r"^(cpu|cuda(:\d+)?)$")] = "cpu"
    """"cpu", or a GPU: "cuda:0"."""
    threads: Count = 4
    """Threads of the learner's process, or of each rank."""
    ranks: Count = 1
    """Processes of this machine over which weights, gradients and optimizer state are sharded
    (`--learner N`). On GPUs, rank 0 has `device` and each further rank the next one."""

    @property
    def repeated_forwards(self) -> float:
        """Share of a step's tokens that get one more forward, for the proximal log-probs."""
        # The first minibatch needs none: its training forward precedes every update, and so gives
        # its proximal log-probs too.
        return 1 - 1 / self.minibatches if self.proximal == "computed" else 0.0


def check_installed(learner: Learner) -> None:
    """Refuse 8-bit moments if torchao is not installed.

    Raises:
        ConfigError: torchao is not installed; the message has the command that installs it.
    """
    if learner.optimizer_state == "8bit" and find_spec("torchao") is None:
        raise ConfigError(
            'learner.optimizer_state = "8bit" needs the package torchao, which is not installed: '
            "pip install 'mage_async[8bit]', or leave the key out"
        )


SignatureName = Literal[
    "not_finite",
    "no_variance",
    "rare_rewards",
    "truncation",
    "invalid_actions",
    "entropy_collapse",
    "entropy_runaway",
    "off_policy",
    "engine_mismatch",
    "over_bound",
    "format_gaming",
    "return_collapse",
    "class_raises",
    "member_failing",
    "selection",
    "disk_soon_full",
    "evicted_contexts",
    "slow_retries",
    "learner_starving",
    "actors_starving",
]
"""Faults that show while a run trains; `mage_async/doctor/signatures.py` explains each."""

GPU = Literal[
    "", "t4", "v100", "l4", "rtx4090", "l40s", "a100_40", "a100_80", "h100", "h200", "b200"
]
"""GPU models of `mage_async/plan/plan.py`."""


class Hardware(Section):
    """The machine that the run is meant for."""

    gpu: GPU = ""
    """Model of every GPU that the configuration names, for `mage plan` and the memory check
    before a launch; "" is the model of this machine's GPU."""


class Evaluation(Section):
    """Evaluation while training (the curve), and after it with controls."""

    every: Natural = 20
    """Steps between points of the curve; 0 is no curve."""
    trials: Count = 128
    """Trials of a point, from each split."""
    final_trials: Count = 512
    """Trials of each set of the final evaluation: training tasks, held-out tasks, and held-out
    tasks under each control."""
    episodes: Count = 3
    """Episodes of an evaluated trial. If a file or `--set` gives `trial.episodes`, at least 2, and
    not this key, this key gets the same value."""

    def is_due(self, version: int, last: int) -> bool:
        """Return whether the evaluator plays this version of the weights: version 0, each
        `every`-th, and the last of the run, `last`; if `every` is 0, the last alone.
        """
        return version == last or (self.every > 0 and version % self.every == 0)


class Transport(Section):
    """Communication between the learner and its peers."""

    address: str = "ipc"
    """Address of the learner: "ipc" (a private socket file), or tcp://HOST:PORT."""
    keys: str = ""
    """Directory of keys for CURVE, ZeroMQ's encryption, made by `mage keys new`. With "" there is
    no encryption, and HOST must be 127.0.0.1."""
    weights: AnyWeightTransport = WEIGHT_TRANSPORTS.load("disk")()
    """How weights reach the engines."""


class Journal(Section):
    """The journal of grants, trials and steps on disk."""

    max_bytes: Count = 32_000_000_000
    """Largest size in bytes. If the journal is larger than half of it, or the disk is full,
    segments that a checkpoint has made unnecessary are deleted. A full journal accepts no trial
    until segments have been deleted."""


class Supervision(Section):
    """Restarts of the run's processes."""

    max_restarts: Natural = 3
    """Restarts of one process before the run ends."""
    silence_s: Positive = 60.0
    """Seconds without a heartbeat after which a process counts as dead."""


class Doctor(Section):
    """The doctor examines every step for signs that a run goes wrong. The processes of one run may
    have different values in this table."""

    halt: list[SignatureName] = field(default_factory=list)
    """Signatures that end the run when they are found, so that it can be resumed with other keys.
    A signature found before a run was resumed does not end it again."""


# A section with one optional table per registered tracker, so that a new tracker needs no line
# here. A type checker cannot evaluate `defstruct`, and sees a section without keys.
if TYPE_CHECKING:
    _TrackerTables = Section
else:
    _TrackerTables = msgspec.defstruct(
        "_TrackerTables",
        [(name, TRACKERS.load(name) | None, None) for name in TRACKERS],
        bases=(Section,),
        frozen=True,
    )


class Tracking(_TrackerTables):
    """Trackers to which a run's metrics are sent, each by a process of its own. By default there is
    none, and nothing is sent anywhere."""

    own: AnyTracker | None = None
    """A tracker class of your own, such as `tracking.own.kind = "my_tracker:Mine"`; its fields are
    keys of this table. The trackers below have tables of their own and need no `own`."""
    wait_s: NonNegative = 0.0
    """Largest number of seconds that a run waits for its trackers at its end. With 0 they end by
    themselves within a minute after the run; in a container, which ends with the command, set 30.
    """


class Config(Section):
    """The configuration of a run."""

    seed: Natural = 0
    """Seed of the run's random draws."""
    environment: Environment = Environment()
    trial: TrialShape = TrialShape()
    transcript: Transcript = Transcript()
    policy: Tiny | Pretrained = Pretrained()
    warm_start: AnyWarmStart | None = None
    sampling: SamplingConfig = SamplingConfig()
    engine: Embedded | Sglang = Embedded()
    admission: Admission = Admission()
    population: Population = Population()
    credit: AnyCredit = CREDITS.load("final_only")()
    advantage: AnyAdvantage = ESTIMATORS.load("group_mean")()
    learner: Learner = Learner()
    methods: MethodTables = field(default_factory=dict)
    """Tables of the methods that are turned on, by name: `[methods.NAME]`. Their keys are those of
    the method's own `Settings`, all of them present."""
    evaluation: Evaluation = Evaluation()
    transport: Transport = Transport()
    hardware: Hardware = Hardware()
    journal: Journal = Journal()
    supervision: Supervision = Supervision()
    doctor: Doctor = Doctor()
    tracking: Tracking = Tracking()

    @property
    def most_episodes(self) -> int:
        """Largest number of episodes of a trial, in training or in an evaluation."""
        return max(self.trial.episodes, self.evaluation.episodes)


NOT_COMPARED = {"doctor", "tracking"}
"""Sections in which the peers of one run may differ."""


def digest(config: Config) -> str:
    """Return a fingerprint of the configuration, in eight hex digits: processes of one run refuse
    to work with a peer that has another one.
    """
    names = (name for name in config.__struct_fields__ if name not in NOT_COMPARED)
    compared = msgspec.to_builtins({name: getattr(config, name) for name in names})
    return blake2s(msgspec.json.encode(compared, order="sorted"), digest_size=4).hexdigest()
