"""Define the keys of environment, trial, transcript, sampling and engine."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, field

from mage_async.config.section import Count, Natural, NonNegative, Positive, Section, Variant
from mage_async.registry import address_of


class Environment(Section):
    """The environment and its own options."""

    name: str = "rps"
    """Name in the catalogue, `module:Class` of your own, or `gymnasium:Taxi-v4` and the like. From
    Python it may also be the class itself."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the environment."""
    ladder: str = ""
    """Curriculum: the name of a ladder of the environment, such as "boxes", a list of options from
    easy to hard. Training begins with its easiest rung and ends with `options`; evaluations play
    all rungs. "" trains on `options` alone."""
    rung_steps: Count = 10
    """Number of steps on each rung of the curriculum before the next one; the last rung stays."""
    step_deadline_s: Positive = 60.0
    """Timeout in seconds of one call of `reset`, `step` or `close` of a class with `reset` and
    `step`, and of `begin` or `act` of your own class, of TextWorld or of ALFWorld. Of a program
    that is the agent, it is the timeout of an episode without the time in which the program waits
    for the policy. A call that times out has failed."""
    retries: Natural = 8
    """How often the same trial, with the same task and seed, is played again with fresh objects
    after a call of its environment has failed, or its engine has lost a turn or missed
    `engine.turn_deadline_s`. The first retry comes at once, later ones after 1, 2, 4 … seconds, at
    most 30. After the last one the trial's group is dropped, and in an evaluation the trial ends
    where it failed. With 0 every fault drops a group, so tasks on which faults are frequent are
    trained less."""
    workers: Natural = 0
    """Worker processes of each actor that play a class with `reset` and `step`. If one dies, the
    calls of its episodes have failed, and the actor lives on. With 0 the actor itself plays."""
    most_open: Natural = 0
    """Largest number of objects of a class with `reset` and `step`, or of plays of another class of
    your own, that an actor has open at once, for a server that limits its sessions. Further
    episodes wait before they begin. 0 is no bound."""
    idle_s: NonNegative = 0.0
    """Seconds after which an object that is not called is closed, so that the next call fails. 0
    closes none, however long a turn takes."""
    wait_for_room_s: NonNegative = 0.0
    """Seconds for which a `reset` that raises `CapacityReached` is repeated, every second and
    whenever another object was closed; after that it has failed."""

    def __post_init__(self) -> None:
        # Other processes load the class by its address. The struct is frozen, hence `force_`.
        if isinstance(self.name, type):
            msgspec.structs.force_setattr(self, "name", address_of(self.name))


class TrialShape(Section):
    """What one trial is made of, and what of earlier episodes stays in its context."""

    episodes: Count = 3
    """Episodes of a trial in training."""
    memory: Literal[
        "none", "history", "reflection", "history_and_reflection", "notes", "truncation"
    ] = "history"
    """What an episode sees of the earlier ones; with "none" episodes are independent retries. With
    "notes" the history stays until it would outgrow `room`, in the middle of an episode too: then
    the agent writes notes, and a new context begins with them in place of the history. With
    "truncation" the oldest turns are left out there instead."""
    room: Natural = 0
    """Longest context, in tokens, with `memory = "notes"` or "truncation"; 0 is
    `engine.max_tokens`."""
    train_notes: bool = True
    """Whether the tokens of notes are trained on, with the return of the action that follows them;
    if not, their advantage is 0, and only the other turns are trained on."""
    repeats: Literal["same", "fresh"] = "same"
    """Whether an environment of your own begins an episode of the same task in the same way each
    time. "same" is checked by a rehearsal before the run starts; "fresh" allows another beginning
    each time, and the rehearsal does not check it."""
    stop_on_success: bool = False
    """In training an episode that is won ends its trial, as in LaMer and MAGE; evaluations always
    play all episodes, so that each has a return of its own."""
    turn_budget: Natural = 0
    """Budget of turns for a whole trial, counted in episodes of full length, as in ORBIT: with 2, a
    trial has as many turns as two longest episodes, and an agent that wins early plays more
    episodes, up to `episodes`, which must be larger. In figures by episode, the last episode played
    counts for those that were not. 0 is no budget."""
    strategy: Literal["none", "episode", "turn"] = "none"
    """Before an episode's first action, or before every one, the agent writes in a remark what it
    means to do."""

    def most_turns(self, max_turns: int) -> int:
        """Return the largest number of actions of a trial, whose episodes have `max_turns` each."""
        return (self.turn_budget or self.episodes) * max_turns

    @property
    def keeps_history(self) -> bool:
        """Whether earlier episodes stay in the context, as far as they fit into it."""
        return self.memory not in ("none", "reflection")

    @property
    def compaction(self) -> Literal["none", "notes", "truncation"]:
        """How a context that would outgrow `room` is shortened."""
        return self.memory if self.memory in ("notes", "truncation") else "none"


class Transcript(Section):
    """How a trial becomes chat."""

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
    """Let the policy think before it answers, if the chat template has this (Qwen3's has); thinking
    counts as part of the completion and stays in its context, and no action is looked for in it."""


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
    Log-probs, entropy and the ratio are then of this distribution."""
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
    """What a turn in progress does when new weights arrive: it continues over its KV cache, or it
    ends and continues as a new request, for which `cache_rule` decides what is recomputed."""
    turn_deadline_s: Positive = 300.0
    """Seconds after which a turn that is not complete has failed, and its trial is played again;
    the start of an SGLang server counts as part of the turn."""
    devices: list[Natural] = field(default_factory=list)
    """GPUs of the actors' engines, one for each actor (or `gpus_per_actor`); with more actors than
    GPUs they are assigned again from the first. The evaluator has the last. A process sees only its
    own GPUs; with [] it sees all of the machine."""

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
