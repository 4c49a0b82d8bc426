"""Check before a run that its policy fits: memory of this machine, context length, and deadlines.
`plan.py` checks whether it fits a GPU.

The checks import no torch and read only the headers, the tokenizer and the chat template of a model
directory. Scripted trials are played with the tokenizer and the template of the model, so a context
that is too short or an action that is cut off is found in the tokens of this model.
"""

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import msgspec

from mage_async.assembly import environment_of, named_parts, trial_config_of
from mage_async.config.schema import Config, Embedded, Pretrained, Tiny
from mage_async.environments.agent import AgentTasks
from mage_async.environments.environment import Environment
from mage_async.environments.user_class import ResetStep
from mage_async.errors import ConfigError, PolicyError
from mage_async.inference.chat_files import load_chat
from mage_async.policy.model_files import (
    Outline,
    check_head,
    check_targets,
    check_type,
    outline_of,
)
from mage_async.results.run_directory import SHARED_MEMORY
from mage_async.trajectory import Kind, Turn
from mage_async.trials.chat_format import ChatFormat
from mage_async.trials.scripted_play import random_task, scripted_trial

TAGS = "<action></action>"
"""Text that a tokenizer has to encode and decode without a change."""
PATIENCE = 5.0
"""Smallest ratio of a deadline to the time that was measured on the first turns."""

ENGINE_BYTES, LEARNER_BYTES = 220_000_000, 500_000_000
"""Bytes of an actor or evaluator, and of the learner, on CPU cores before a policy is loaded:
Python and its libraries. They are the largest private memory of a quickstart's processes
(`smaps_rollup`)."""


MATRIX_BYTES = {"float32": 4, "bfloat16": 2, "exact": 8}
"""Bytes of an element of a layer's matrix in an embedded engine, by `engine.arithmetic`."""


def engine_weight_bytes(engine: Embedded, num_weights: int, num_in_matrices: int) -> int:
    """Return the bytes of weights in an embedded engine.

    Embedding, norms and biases are float32 in any arithmetic. The LM head is counted so too,
    although exact arithmetic rounds it into a copy.

    Args:
        num_weights: Number of all weights.
        num_in_matrices: Number of those in the matrices of the layers.
    """
    others = num_weights - num_in_matrices
    return 4 * others + MATRIX_BYTES[engine.arithmetic] * num_in_matrices


@dataclass(frozen=True, slots=True)
class Size:
    """Hold the numbers from which the memory of a policy is computed: its weights, and the bytes of
    its keys and values.
    """

    num_weights: int
    num_in_matrices: int
    """Number of weights in the matrices of the layers."""
    kv_token_bytes: int
    """Bytes of one token's keys and values in float32; 0 if unknown."""


def tiny_size(shape: Tiny) -> Size:
    """Return the size of a tiny policy, without its embedding (one row for each word)."""
    head_size = shape.hidden_size // shape.heads
    attention = 2 * shape.hidden_size * head_size * (shape.heads + shape.kv_heads)
    block = attention + 3 * shape.hidden_size * shape.mlp_size
    num_weights = shape.layers * block
    return Size(num_weights, num_weights, 2 * 4 * shape.layers * shape.kv_heads * head_size)


def versions_at_once(config: Config) -> int:
    """Return the number of versions of the weights for which their file system needs space.

    These are the `admission.lag + 1` newest, the one that is being written, the one that the
    evaluator has loaded, and the past policies that play as opponents. A slow actor or evaluator,
    and a group that still plays against a removed past policy, keep further versions for a while;
    if there is no space, the publisher waits for them.
    """
    population, steps = config.population, config.learner.steps
    has_rivals = population.rivals > 0 and population.every > 0
    rivals = min(population.kept, steps // population.every + 1) if has_rivals else 0
    return min(config.admission.lag + 3 + rivals, steps + 1)


def check_space(folder: Path, total_bytes: int, version_bytes: int, num_versions: int) -> None:
    """Refuse a file system that is too small for the versions of the weights.

    Args:
        total_bytes: Size of the file system of `folder`.
        num_versions: See `versions_at_once`.

    Raises:
        ConfigError: the message has both sizes and the cure.
    """
    needed = num_versions * version_bytes
    if total_bytes < needed:
        raise ConfigError(
            f"the file system of {folder} has {total_bytes / 1e6:,.1f} MB, and the {num_versions} "
            f"versions of the weights that the run keeps at once have {needed / 1e6:,.1f} "
            "(admission.lag and population.kept add to their number). A container gets a larger "
            '/dev/shm by `--shm-size` of docker, or set transport.weights = "disk"'
        )


def check_shared_memory(config: Config, num_weights: int, total_bytes: int) -> None:
    """Refuse a policy whose published versions do not fit into /dev/shm, if the run publishes them
    there.

    Adapters that are published alone are small, and are not checked here.

    Args:
        total_bytes: Size of /dev/shm.

    Raises:
        ConfigError: as `check_space`.
    """
    is_whole = config.policy.lora is None or not isinstance(config.engine, Embedded)
    if config.transport.weights.kind == "tensor" and is_whole:
        version_bytes = num_weights * (4 if config.policy.dtype == "float32" else 2)
        check_space(SHARED_MEMORY, total_bytes, version_bytes, versions_at_once(config))


def check_size(config: Config, size: Size, *, num_actors: int, memory_bytes: int) -> None:
    """Refuse a policy that does not fit into memory with the contexts of its engines.

    Activations and logits are not counted; `mage plan` counts them.

    Raises:
        ConfigError: the message says what is needed, what there is, and which key to change.
    """
    # Bytes in this machine's memory; the memory of a GPU is not counted.
    learner = 0  # weights, gradients and moments
    engines = 0  # weights
    kv_caches = 0
    learner_processes = engine_processes = 0  # Python and its libraries
    needs = list[str]()
    if config.learner.device == "cpu":
        learner = size.num_weights * _bytes_per_weight(config)
        learner_processes = LEARNER_BYTES * config.learner.ranks
        needs.append(
            f"the learner needs {learner / 1e9:.1f} GB for weights, gradients and optimizer"
        )
    if isinstance(engine := config.engine, Embedded):
        # Without a curve the evaluator makes its engine only after training.
        with_evaluator = bool(config.evaluation.every)
        num_engines = num_actors + with_evaluator
        tokens = engine.max_contexts * engine.max_tokens
        engines = engine_weight_bytes(engine, size.num_weights, size.num_in_matrices) * num_engines
        kv_caches = size.kv_token_bytes * tokens * num_engines
        engine_processes = ENGINE_BYTES * num_engines
        number = f"{num_engines} engine" + "s" * (num_engines > 1)
        among = ", the evaluator's among them," if with_evaluator else ""
        needs.append(
            f"{number}{among} need "
            f"{engines / 1e9:.1f} GB for weights, {kv_caches / 1e9:.1f} GB for keys and values of "
            f"{engine.max_contexts} contexts each, and {engine_processes / 1e9:.1f} GB for their "
            "processes"
        )
    if learner + learner_processes + engines + kv_caches + engine_processes <= memory_bytes:
        return
    # Give advice on the largest part: keys and values, the processes themselves, or weights.
    advice = "lower engine.max_contexts or engine.max_tokens, or take fewer --actors"
    if engine_processes > max(learner + engines, kv_caches):
        advice = "take fewer --actors"
    elif kv_caches <= learner + engines:
        # Adapters change the learner's memory alone.
        may_adapt = isinstance(config.policy, Pretrained) and not config.policy.lora and learner
        smaller = "set policy.lora.rank = 16" if may_adapt else "take a smaller policy"
        advice = f"{smaller}, or fewer --actors"
    raise ConfigError(
        f"policy of {size.num_weights:,} weights: {', and '.join(needs)}, but this machine or "
        f"its container has {memory_bytes / 1e9:.1f} GB; {advice}"
    )


def _bytes_per_weight(config: Config) -> int:
    """Return the learner's bytes for each weight: the weight, its gradient, AdamW's moments, and
    its float32 master.
    """
    own = 4 if config.policy.dtype == "float32" else 2
    if config.policy.lora:  # adapters, their gradients and their moments are small
        return own
    # Gradient and moments have the type of the tensors that the optimizer updates.
    masters = 4 * config.learner.float32_masters
    trained = masters or own
    moments = 2 if config.learner.optimizer_state == "8bit" else 2 * trained
    return own + masters + trained + moments


def with_deadlines(config: Config, *, turn_s: float, num_turns: int) -> tuple[Config, list[str]]:
    """Raise deadlines that the policy would miss on this machine.

    Args:
        turn_s: Seconds of one turn of all trials of a group, if no other group is played.
        num_turns: Number of turns of a trial.

    Returns:
        The configuration, and a sentence for each key that was raised.
    """
    # An engine that plays n groups at once takes n times as long for a turn of each.
    groups_at_once = max(1, config.engine.max_contexts // config.admission.trials_per_group)
    slowest_turn_s = turn_s * groups_at_once
    group_s = slowest_turn_s * num_turns
    engine, admission = config.engine, config.admission
    notes = []
    if engine.turn_deadline_s < PATIENCE * slowest_turn_s:
        engine = msgspec.structs.replace(engine, turn_deadline_s=PATIENCE * slowest_turn_s)
        notes.append(_raised("engine.turn_deadline_s", engine.turn_deadline_s, "turn"))
    if admission.grant_deadline_s < PATIENCE * group_s:
        admission = msgspec.structs.replace(admission, grant_deadline_s=PATIENCE * group_s)
        notes.append(_raised("admission.grant_deadline_s", admission.grant_deadline_s, "group"))
    return msgspec.structs.replace(config, engine=engine, admission=admission), notes


def _raised(key: str, seconds: float, what: str) -> str:
    return f"{key} is raised to {seconds:.0f}: a {what} may take {seconds / PATIENCE:.0f} s here"


NUM_SCRIPTED_TRIALS = 3
"""Number of scripted trials that are measured."""


class Contexts(NamedTuple):
    """Hold the context lengths of trials, in tokens of the policy."""

    scripted: int
    """Number of tokens that a context needs so that at least the shortest scripted trial can be
    played to its last turn.
    """
    longest: int
    """Number of tokens of the longest scripted trial if every action and every remark were as long
    as allowed; 0 if a program plays, because its length is not known.
    """
    num_turns: int
    """Number of turns of the longest scripted trial."""
    lost: str = ""
    """Sentence on characters that the tokenizer lacks (`ChatFormat.lost`); "" if it has all."""


def check_files(config: Config, directory: Path) -> Contexts:
    """Read the tokenizer and the chat template, and measure scripted trials in their tokens.

    Trials are not played if the environment has no script or its calls may wait. Their length is
    then that of all actions and remarks, because observations are unknown.

    Raises:
        PolicyError: the tokenizer or the template is missing, the tokenizer changes texts, or the
            template drops words, or the tools of an environment.
        ConfigError: no trial fits into `engine.max_tokens`, or an action does not fit into
            `transcript.max_action_tokens`.
    """
    chat = load_chat(directory, thinking=config.transcript.thinking)
    if (read := chat.decode(chat.encode(TAGS))).strip() != TAGS:
        raise PolicyError(
            f"{directory / 'tokenizer.json'}: does not give texts back: {TAGS!r} is read as "
            f"{read!r:.100}. Take a tokenizer with a byte-level pre-tokenizer and decoder "
            "(tokenizers.pre_tokenizers.ByteLevel, tokenizers.decoders.ByteLevel), and make the "
            "model for it"
        )
    contexts = [_contexts(config, directory, chat, *named) for named in named_parts(config)]
    texts = [chat.template]
    for _, part in named_parts(config):
        texts += [*part.facts.words, part.rules() if config.transcript.rules else ""]
    lost = chat.lost("".join(texts), "the text of the chat template, the rules or the words")
    return Contexts(
        max(each.scripted for each in contexts),
        max(each.longest for each in contexts),
        max(each.num_turns for each in contexts),
        lost,
    )


def check_words(config: Config, policy: Path) -> None:
    """Check that a tiny policy knows all words of an environment.

    Raises:
        ConfigError: the environment has words that the policy was not built with.
    """
    if not isinstance(config.policy, Tiny):
        return
    chat, words = load_chat(policy), environment_of(config).facts.words
    # A word that the tokenizer was built with is a single token, with the space before it.
    if unknown := [word for word in words if len(chat.encode(f" {word}")) > 1]:
        raise ConfigError(
            f"environment {config.environment.name!r} has {len(unknown)} words that this tiny "
            f"policy was not built with, such as {unknown[0]!r}: train a new run with them, a mix "
            "in which the environment has a share of 0, or a pretrained model"
        )


def _contexts(
    config: Config, directory: Path, chat: ChatFormat, name: str, environment: Environment
) -> Contexts:
    """Return the lengths of the trials of one environment, named `name` in the configuration."""
    chat = chat.offering(environment.tools)
    transcript = config.transcript
    # The shortest action of a class with tools is a call without arguments.
    names = [each["function"]["name"] for each in environment.tools]
    calls = [f'{{"name": "{each}", "arguments": {{}}}}' for each in names]
    least = min((len(chat.encode(each)) for each in calls), default=0)
    if least > transcript.max_action_tokens:
        raise ConfigError(
            f"transcript.max_action_tokens must be larger than {least}, the tokens of a tool call "
            f"of {name!r} without arguments; got {transcript.max_action_tokens}: start with 128"
        )
    if isinstance(environment, ResetStep) or environment.script(random.Random(0)) is None:
        max_turns = environment.facts.max_turns
        bounds = config.trial.context_bounds(max_turns)
        longest = bounds.num_actions * transcript.max_action_tokens
        longest += bounds.num_remarks_held * transcript.max_reflection_tokens
        num_contexts = 1 if config.trial.keeps_history else config.trial.episodes
        num_turns = config.trial.most_turns(max_turns)
        num_turns += num_contexts * bounds.num_remarks_written
        # The largest number of a program's calls is a bound that it hardly ever reaches.
        return Contexts(0, 0 if isinstance(environment, AgentTasks) else longest, num_turns)
    trial_config = trial_config_of(config, environment, chat, config.trial.episodes)
    trial_config = replace(trial_config, max_tokens=0)  # measure whole trials: nothing is cut
    source = random.Random(0)
    tasks = [random_task(environment, "train", source) for _ in range(NUM_SCRIPTED_TRIALS)]
    trials = [scripted_trial(environment, task, 0, trial_config, chat) for task in tasks]
    action = max(
        turn.stop - turn.start for trial in trials for turn in trial.turns if turn.kind is Kind.ACT
    )
    if action > config.transcript.max_action_tokens:
        raise ConfigError(
            f"transcript.max_action_tokens must be at least {action}, the tokens of an action of "
            f"{name!r} in this policy's tokenizer; got {config.transcript.max_action_tokens}"
        )
    scripted = min(max(turn.start for turn in trial.turns) + 1 for trial in trials)
    if scripted > config.engine.max_tokens:
        raise ConfigError(
            f"engine.max_tokens must be at least {scripted}, the tokens of a trial of "
            f"{config.trial.episodes} episodes of {name!r} in the tokenizer of {directory}; "
            f"got {config.engine.max_tokens}"
        )
    num_turns = max(len(trial.turns) for trial in trials)

    def most_tokens(turn: Turn) -> int:
        """Return the largest number of tokens of a turn."""
        is_action = turn.kind is Kind.ACT
        return transcript.max_action_tokens if is_action else transcript.max_reflection_tokens

    # The sum is an upper bound, because the tokens of a segment include those of its turns.
    longest = max(
        len(segment.tokens)
        + sum(most_tokens(turn) for turn in trial.turns if turn.segment == number)
        for trial in trials
        for number, segment in enumerate(trial.segments)
    )
    return Contexts(scripted, longest, num_turns)


def check_outline(config: Config, directory: Path) -> Outline:
    """Read the model's shape from its files, and refuse a combination that cannot work.

    Raises:
        PolicyError: the model's type cannot be trained or served, a file cannot be read, there is
            no LM head, or adapters have no layers.
    """
    check_type(directory, is_embedded=isinstance(config.engine, Embedded))
    outline = outline_of(directory)
    check_head(directory, outline.tensors, is_tied=not outline.says_untied)
    if config.policy.lora:
        check_targets(outline.model_type, config.policy.lora.targets, outline.linear())
    return outline
