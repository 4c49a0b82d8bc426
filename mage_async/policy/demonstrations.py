"""Make the examples that a warm start clones, and weight their tokens.

Examples are rows of a data set, or trials. The trials are played by the environment's script, at
random, by the rule of win-stay, lose-shift (repeat what paid), or by the model itself.
"""

import json
import math
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mage_async.assembly import environment_of, named_parts, trial_config_of, with_warm_start
from mage_async.config.schema import (
    Config,
    FromBest,
    FromData,
    FromRandom,
    FromWinStay,
    GatedWarmStart,
    Tiny,
    WarmStart,
    data_files,
)
from mage_async.environments.agent import AgentTasks
from mage_async.environments.environment import Environment
from mage_async.errors import (
    CallFault,
    ConfigError,
    PolicyError,
    TrialFault,
    first_line,
    has_lone_surrogate,
)
from mage_async.inference.chat_files import load_chat
from mage_async.methods.method import Methods
from mage_async.trajectory import Kind, Task, Trial
from mage_async.trials.agent_run import Message
from mage_async.trials.chat_format import ChatFormat
from mage_async.trials.chat_format import Message as ChatMessage
from mage_async.trials.scripted_play import (
    Player,
    own_script,
    random_play,
    random_task,
    random_trials,
    scripted_trial,
    word_tokens,
)
from mage_async.trials.win_stay import (
    LEAST_COMPARED,
    NUM_COMPARED,
    NUM_MORE,
    Comparison,
    Rule,
    best_rule,
    known_actions,
    player_of,
)

TEMPLATE_WEIGHT = 0.1
"""Weight in the loss of tokens that the transcript forces, for a model with random weights, which
has to learn the form of a trial. For a pretrained model, which has read chats, the weight is 0.
"""
WIN_STAY_TEMPLATE_WEIGHT = 0.02
"""`TEMPLATE_WEIGHT` for trials of win-stay, lose-shift. It is smaller, because only few tokens of
such a trial have weight 1."""
TRIED_WEIGHT = 0.05
"""Weight of an action that win-stay, lose-shift only tries. It cannot be predicted from the
context, so its loss would only add noise to the loss of repeated actions. With this weight a tiny
model learns in 100 steps to repeat what paid; with a weight of 1 it takes 300.
"""
OBSERVED_WEIGHT = 0.05
"""Weight of observed words in trials of win-stay, lose-shift, which need not be predicted. With a
weight of 0.3 the tiny model takes up to twice as many steps until it looks up earlier episodes.
"""
NUM_TIMED = 8
"""Number of trials of random play that are timed, to decide whether a thousand can be played."""
QUICK_S = 0.3
"""Seconds above which the fastest of these trials is too slow for a thousand. The fastest is
compared, because on a busy machine the others take longer than they need."""
SLIPS = 0.2
"""Probability that a player that follows answers takes any action instead, in further trials.
Without slips all its later episodes are right, and its clone, whose are not, has never met an
answer to a second mistake. In the first trials slips would keep the gate shut: in one of three
seeds of a class of guests for over 1,000 steps, without them for 575."""
FURTHER_S = 20.0
"""Seconds after which no more of `warm_start.further_trials` are played."""
LATE_S = 5.0
"""Seconds after which a trial of win-stay, lose-shift counts as hanging."""
NOTHING_TO_CLONE = "nothing_to_clone.json"
"""File of the cache with the reason why no rule of win-stay, lose-shift is worth cloning."""
WIN_STAY_RULE = "win_stay.json"
"""File of a policy's directory with the rule of win-stay, lose-shift that it was cloned from."""
MADE_HERE = "warm-started here"
"""Beginning of the origin of a policy that was cloned in this run."""
CHECKED_BYTES = 20_000_000
"""Largest size of a data set whose rows are checked before a run, which takes less than a second.
"""
_MESSAGE_KEYS = ("role", "content")
"""Keys of a message in a data set."""
InTime = Callable[[Iterator[Trial], float], Iterator[tuple[Trial, float]]]
"""Yields each trial of an iterator and the seconds that it took, until one takes longer than the
given seconds."""
Watch = Callable[[Callable[[], list[Trial]]], list[Trial]]
"""Calls a function that plays trials; raises a `CallFault` if a call of the environment hangs."""


def untimed(trials: Iterator[Trial], _: float) -> Iterator[tuple[Trial, float]]:
    """Yield trials however long they take, each with 0 seconds."""
    return ((trial, 0.0) for trial in trials)


def unwatched(play: Callable[[], list[Trial]]) -> list[Trial]:
    """Call a function that plays trials, however long it takes."""
    return play()


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """Hold a token sequence to clone, and how much each of its tokens counts."""

    tokens: np.ndarray
    """int64 [T]"""
    weights: np.ndarray
    """float32 [T]: weight of the loss of predicting each token"""
    episodes: np.ndarray
    """int64 [T]: episode that an observed word belongs to; -1 for other tokens. In trials of
    win-stay, lose-shift: 1 for a repeated action, 0 for one that was only tried, -1 for others."""
    is_further: bool = False
    """Whether it is cloned only while the learning rate falls (`warm_start.further_trials`)."""


ToClone = tuple[list[Example], str, Rule | None]
"""The examples to clone, which are rows of a data set, or trials on training tasks; the origin of
the policy in a few words; and the rule that played them, if win-stay, lose-shift did."""


@dataclass(frozen=True, slots=True)
class NothingToClone:
    """Hold why no rule of win-stay, lose-shift is worth cloning."""

    reason: str
    """A clause."""
    is_lasting: bool = False
    """Whether another start would find the same: not if trials were slow or failed, which may be
    due to the machine or to a network."""


def examples_to_clone(
    config: Config,
    warm: WarmStart,
    directory: Path,
    in_time: InTime,
    watch: Watch = unwatched,
) -> ToClone | NothingToClone:
    """Return what a warm start clones, or why no rule of win-stay, lose-shift is worth it."""
    chat, origin = load_chat(directory, thinking=config.transcript.thinking), MADE_HERE
    is_tiny = isinstance(config.policy, Tiny)
    if isinstance(warm, FromData):
        examples = read_examples(warm.path, chat, config.engine.max_tokens)
        return examples, f"{origin}{_rows_without_rules(config, examples, chat)}", None
    words = word_tokens(environment_of(config), chat)
    if isinstance(warm, FromWinStay):
        played = _win_stay_trials(config, warm, chat, in_time)
        if isinstance(played, NothingToClone):
            return played
        compared, first, further = played
        rule, units = compared.rule, environment_of(config).facts.units
        origin = f"{origin}, to {rule}: {compared.sentence(units)}"
        weight = WIN_STAY_TEMPLATE_WEIGHT if is_tiny else 0.0
        examples = win_stay_examples(first, rule, words, weight, chat)
        later = win_stay_examples(further, rule, words, weight, chat)
        return examples + [replace(each, is_further=True) for each in later], origin, rule
    if isinstance(warm, FromBest):
        trials = best_trials(config, warm, directory, chat)
    else:
        trials = watch(partial(_demonstrations, config, warm, chat))
    examples = examples_of(trials, words, TEMPLATE_WEIGHT if is_tiny else 0.0)
    if isinstance(warm, GatedWarmStart) and warm.gate < 1.0:
        origin += _gate_without_memory(examples, warm.gate)
    return examples, origin, None


def _rows_without_rules(config: Config, examples: Sequence[Example], chat: ChatFormat) -> str:
    """Return a clause about rows without the rules with which each context of the run begins; "" if
    all rows have them.
    """
    parts = [part for _, part in named_parts(config)]
    if not config.transcript.rules or any(isinstance(part, AgentTasks) for part in parts):
        return ""
    rules = [part.rules() for part in parts]
    texts = (chat.decode(example.tokens.tolist()) for example in examples)
    num_missing = sum(not any(each in text for each in rules) for text in texts)
    if not num_missing:
        return ""
    return (
        f"; {num_missing} of {len(examples)} rows lack the rules with which each context of the "
        "run begins (`mage check` prints them)"
    )


def frequency_ratio(examples: Sequence[Example]) -> float:
    """Return the ratio of the gate of a model that knows only the frequencies of words in the first
    and in the last episode; infinite if it has no loss in the first. The loss of such a model is
    the entropy of these frequencies.
    """
    last = max(int(each.episodes.max()) for each in examples)
    losses = list[float]()
    for episode in (0, last):
        words = np.concatenate([each.tokens[each.episodes == episode] for each in examples])
        shares = np.unique(words, return_counts=True)[1] / max(1, len(words))
        losses.append(float(shares @ np.log(1 / shares)))
    return losses[1] / losses[0] if losses[0] else math.inf


def _gate_without_memory(examples: Sequence[Example], gate: float) -> str:
    """Return a clause if even a model that knows only the frequencies of words passes the gate."""
    if (ratio := frequency_ratio(examples)) > gate:
        return ""
    # A lower gate is no advice: whether a model that uses earlier episodes comes below it depends
    # on how many observations are drawn anew in each episode.
    return (
        f"; its gate does not show that earlier episodes are used, because the frequencies of "
        f"words alone lead to a ratio of {ratio:.2f}, and warm_start.gate is {gate}: the final "
        "evaluation shows it, by the returns without them (blind)"
    )


def _demonstrations(config: Config, warm: WarmStart, chat: ChatFormat) -> list[Trial]:
    """Play trials of the script, or of random legal actions, on training tasks.

    Methods may give some of the trials guidance.
    """
    environment = environment_of(config)
    player = random_play if isinstance(warm, FromRandom) else own_script
    trial_config = trial_config_of(config, environment, chat, warm.episodes)
    trial_config = replace(trial_config, max_tokens=0)  # no limit: no engine plays these trials
    source = random.Random(f"{config.seed}/demonstrations")
    trials, methods = list[Trial](), Methods(config, environment)
    for index in range(warm.trials):
        task = random_task(environment, "train", source)
        guidance = methods.guide_demonstration(task)
        given = environment, task, index, trial_config, chat, guidance, player
        for left in reversed(range(1 + config.environment.retries)):
            try:
                trials.append(trial := scripted_trial(*given))
                break
            except CallFault as fault:
                # A fault of a network or a server may be gone at the next try, so the same trial is
                # played again, as actors do. So the cloned trials depend on the seed alone.
                if fault.mistake or not left:
                    raise
        methods.learn_demonstration(trial)
    return trials


def _win_stay_trials(
    config: Config, warm: FromWinStay, chat: ChatFormat, in_time: InTime
) -> tuple[Comparison, list[Trial], list[Trial]] | NothingToClone:
    """Return the best rule of win-stay, lose-shift, compared with random play, trials that it
    played, and further trials; or why none is worth cloning.
    """
    environment = environment_of(config)
    compared = compare_win_stay(config, environment, chat, in_time)
    if isinstance(compared, str):
        return NothingToClone(compared)
    if not compared.is_better:
        sentence = compared.sentence(environment.facts.units)
        return NothingToClone(sentence, is_lasting=compared.is_complete)
    play = _training_play(config, environment, chat, player_of(compared.rule), warm.trials)
    trials = [trial for trial, _ in in_time(play, LATE_S)]
    if not trials:
        return NothingToClone(
            f"a trial of the player that repeats what paid takes more than {LATE_S:g} s"
        )
    player = player_of(compared.rule, SLIPS if compared.rule.follows_answers else 0.0)
    count, further, took_s = warm.further_trials, list[Trial](), 0.0
    play = _training_play(config, environment, chat, player, count, drawn_for="win-stay, further")
    for trial, seconds in in_time(play, LATE_S):
        further.append(trial)
        took_s += seconds
        if took_s > FURTHER_S:
            break
    return compared, trials, further


def _training_play(
    config: Config,
    environment: Environment,
    chat: ChatFormat,
    player: Player,
    count: int = NUM_COMPARED,
    on_fault: Callable[[TrialFault], None] = lambda fault: None,
    drawn_for: str = "win-stay",
) -> Iterator[Trial]:
    """Yield trials of a player on training tasks, the same tasks in every call with the same
    `drawn_for`.
    """
    warm, source = with_warm_start(config).warm_start, random.Random(f"{config.seed}/{drawn_for}")
    episodes = warm.episodes if isinstance(warm, FromWinStay) else config.trial.episodes
    tasks = (random_task(environment, "train", source) for _ in range(count))
    yield from scripted_play(config, environment, chat, player, tasks, episodes, on_fault)


def scripted_play(
    config: Config,
    environment: Environment,
    chat: ChatFormat,
    player: Player,
    tasks: Iterable[Task],
    episodes: int,
    on_fault: Callable[[TrialFault], None] = lambda fault: None,
) -> Iterator[Trial]:
    """Yield a trial of a player on each task, except those that fail, whose faults are passed to
    `on_fault`.
    """
    trial_config = trial_config_of(config, environment, chat, episodes)
    trial_config = replace(trial_config, max_tokens=0)  # no limit: no engine plays these trials
    for index, task in enumerate(tasks):
        # An actor would play a trial again after a fault; here it is left out.
        try:
            yield scripted_trial(environment, task, index, trial_config, chat, player=player)
        except TrialFault as fault:
            on_fault(fault)


def compare_win_stay(
    config: Config, environment: Environment, chat: ChatFormat, in_time: InTime
) -> Comparison | str:
    """Return the best rule of win-stay, lose-shift compared with random play, or why it cannot be
    found. A warm start clones the rule if it is better, and `mage check` prints the comparison.
    """
    faults = list[TrialFault]()

    def play(
        player: Player, count: int = NUM_COMPARED, drawn_for: str = "win-stay"
    ) -> Iterator[tuple[Trial, float]]:
        given = player, count, faults.append, drawn_for
        return in_time(_training_play(config, environment, chat, *given), LATE_S)

    seconds = list[float]()
    for _, each in play(random_play, NUM_TIMED):
        seconds.append(each)
        if min(seconds) > QUICK_S and sum(seconds) > LATE_S:
            break
    else:
        # Fewer times than trials: some trials failed, or one took more than `LATE_S`.
        if len(seconds) < NUM_TIMED // 2:
            if len(faults) > NUM_TIMED // 2:
                return f"{len(faults)} of {NUM_TIMED} trials of random play failed: {faults[0]}"
            return (
                f"a trial of random play takes more than {LATE_S:g} s, too long for a warm start; "
                "set warm_start = none to skip the attempt"
            )
    if min(seconds) > QUICK_S:
        return f"each of {len(seconds)} trials of random play took over {QUICK_S} s"

    found = best_rule(
        lambda player: (trial for trial, _ in play(player)),
        lambda player: (trial for trial, _ in play(player, NUM_MORE, "win-stay, again")),
        chat.decode,
    )
    if found is None:
        return (
            f"fewer than {LEAST_COMPARED} of {NUM_COMPARED} trials of random play, or of the "
            "player that repeats what paid, ended in time and without a fault"
        )
    return found


def best_trials(config: Config, warm: FromBest, directory: Path, chat: ChatFormat) -> list[Trial]:
    """Let a model play training tasks, and return the trials with the best last episodes.

    Of two trials whose last episodes are equally good, the one with the higher total reward is
    better.

    Raises:
        CallFault: a call of the environment failed, or is a coroutine that has to wait, which needs
            an event loop that is not running here.
    """
    # Imports torch, which the check of a data set before a run does not need.
    from mage_async.inference.model import Model
    from mage_async.inference.scheduler import Scheduler, play_trials

    environment = environment_of(config)
    trial_config = trial_config_of(config, environment, chat, warm.episodes)
    source = random.Random(f"{config.seed}/own play")
    runs = random_trials(environment, trial_config, chat, source, warm.trials)
    slots, max_tokens = config.engine.max_contexts, config.engine.max_tokens
    model = Model.load(directory, slots=slots, max_tokens=max_tokens)
    trials = play_trials(runs, Scheduler(model))
    trials.sort(key=lambda trial: (trial.episode_rewards()[-1], sum(trial.episode_rewards())))
    return trials[-max(1, round(warm.kept * len(trials))) :]


def examples_of(
    trials: Sequence[Trial], words: Collection[int], template_weight: float
) -> list[Example]:
    """Return the contexts of trials, in which observed words and sampled tokens have weight 1.

    Args:
        words: Ids of the environment's words that are one token.
        template_weight: Weight of all other tokens, which the transcript forces.
    """
    return [
        _example(trial, number, words, template_weight)
        for trial in trials
        for number in range(len(trial.segments))
    ]


def _example(trial: Trial, number: int, words: Collection[int], template_weight: float) -> Example:
    """Make an example of one segment. Observations after a turn belong to the turn's episode."""
    segment = trial.segments[number]
    is_word = np.isin(segment.tokens, list(words))
    is_learned = is_word | segment.is_sampled
    weights = np.where(is_learned, 1.0, template_weight).astype(np.float32)
    episodes = np.full(len(segment.tokens), -1)
    turns = [turn for turn in trial.turns if turn.segment == number]
    stops = [*(turn.start for turn in turns[1:]), len(segment.tokens)]
    for turn, stop in zip(turns, stops, strict=True):
        episodes[turn.stop : stop] = turn.episode
    episodes[~is_word] = -1
    return Example(segment.tokens.astype(np.int64), weights, episodes)


def win_stay_examples(
    trials: Sequence[Trial],
    rule: Rule,
    words: Collection[int],
    template_weight: float,
    chat: ChatFormat,
) -> list[Example]:
    """Return the contexts of trials that were played by a rule of win-stay, lose-shift.

    Args:
        words: Ids of the environment's words that are one token.
        template_weight: Weight of tokens that the transcript forces.
    """
    found = list[Example]()
    for trial in trials:
        examples = examples_of([trial], words, template_weight)
        known = known_actions(trial, rule, chat.decode)
        for example in examples:
            example.weights[example.episodes >= 0] = OBSERVED_WEIGHT
            example.episodes[:] = -1
        for number, turn in enumerate(trial.turns):
            if turn.kind is not Kind.ACT:
                continue
            sampled = np.flatnonzero(trial.segments[turn.segment].is_sampled[: turn.stop])
            sampled = sampled[sampled >= turn.start]
            # 1 for an action that the context shows to be good, 0 for one that is only tried: the
            # gate compares the losses of both.
            examples[turn.segment].episodes[sampled] = number in known
            if number not in known:
                examples[turn.segment].weights[sampled] = TRIED_WEIGHT
        found += examples
    return found


def read_examples(path: str, chat: ChatFormat, max_tokens: int) -> list[Example]:
    """Read the rows of a data set as examples, each of at most `max_tokens` tokens.

    Raises:
        ConfigError: the data set has no rows; a row has neither `messages` nor `text`; a message
            has no role or no text, or the chat template refuses it; the assistant says nothing in a
            row; a file cannot be read as JSON lines or Parquet; or pyarrow, which reads Parquet, is
            not installed.
    """
    return [_example_of_row(row, where, chat, max_tokens) for where, row in _rows(path)]


def _rows(path: str) -> Iterator[tuple[str, Any]]:
    """Yield each row of a data set with its place, as an error names it; there is at least one."""
    where = ""
    for file in data_files(path):
        for where, row in _rows_of(file):
            yield where, row
    if not where:
        raise ConfigError(f"warm_start.path = {path!r}: the data set has no rows")


def _rows_of(file: Path) -> Iterator[tuple[str, Any]]:
    """Yield each row of a file with its place."""
    if file.suffix == ".jsonl":
        # Bytes are read, so that a line that is not UTF-8 is named. A BOM may begin the file.
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                where = f"{file}, line {number}"
                try:
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                    if text.strip():
                        yield where, json.loads(text)
                except UnicodeDecodeError as error:
                    raise ConfigError(f"{where}: not UTF-8: {error}") from None
                except (ValueError, RecursionError) as error:
                    raise ConfigError(
                        f"{where}: not JSON: {error}; each line must be a whole row"
                    ) from None
        return
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise ConfigError(
            f"{file}: Parquet needs pyarrow: pip install 'mage_async[export]', or give JSON lines"
        ) from None
    try:
        rows = parquet.read_table(file).to_pylist()
    except (ArrowException, OSError) as error:  # OSError: a page of the file is damaged
        raise ConfigError(f"{file}: cannot be read as Parquet: {first_line(error)}") from None
    for number, row in enumerate(rows, 1):
        yield f"{file}, row {number}", row


def _example_of_row(row: Any, where: str, chat: ChatFormat, max_tokens: int) -> Example:
    """Return a row of a data set as an example; `where` names the row in errors."""
    tokens: Sequence[int]
    content = _content(row, where)
    if isinstance(content, str):
        tokens = chat.encode(content, is_first=True)
        is_own = [True] * len(tokens)
    else:
        try:
            tokens, is_own = chat.conversation(content)
        except PolicyError as error:
            raise ConfigError(f"{where}: {error}") from error
    if not any(is_own[1:max_tokens]):
        raise ConfigError(f"{where}: the assistant says nothing in the first {max_tokens} tokens")
    kept = np.array(tokens[:max_tokens], np.int64)
    weights = np.array(is_own[:max_tokens], np.float32)
    return Example(kept, weights, np.full(len(kept), -1))


def check_rows(path: str) -> None:
    """Check the form of a data set's rows without a tokenizer, if it is at most `CHECKED_BYTES`.

    Raises:
        ConfigError: as `read_examples`, except for faults that only a tokenizer or a chat template
            finds.
    """
    if sum(file.stat().st_size for file in data_files(path)) <= CHECKED_BYTES:
        for where, row in _rows(path):
            _content(row, where)


def _content(row: Any, where: str) -> list[ChatMessage] | str:
    """Return the messages of a row of a data set, or its text."""
    is_table = isinstance(row, dict)
    if is_table and isinstance(row.get("messages"), list):
        if not all(map(_is_message, row["messages"])):
            raise ConfigError(
                f"{where}: a message must be a table with `role` and `content`, both text"
            )
        messages = [_with_calls(each, where) for each in row["messages"]]
        _check_texts((each[key] for each in messages for key in _MESSAGE_KEYS), where)
        roles = {each["role"]: None for each in messages}
        if "assistant" not in roles:
            raise ConfigError(
                f"{where}: no message has the role 'assistant', whose words are cloned: "
                f"its roles are {', '.join(map(repr, roles)) or 'none'}"
            )
        return messages
    if is_table and isinstance(row.get("text"), str):
        _check_texts([row["text"]], where)
        text: str = row["text"]
        return text
    raise ConfigError(
        f"{where}: a row must have `messages`, a list of tables with `role` and `content`, or "
        "`text`"
    )


def _check_texts(texts: Iterable[str], where: str) -> None:
    """Refuse a text with half of a surrogate pair, which JSON may write as an escape."""
    for text in texts:
        if has_lone_surrogate(text):
            raise ConfigError(
                f"{where}: a text has half of a surrogate pair, which no tokenizer reads"
            )


def _with_calls(message: dict[str, Any], where: str) -> ChatMessage:
    """Return a message of a data set with its tool calls as text, as the gateway writes them.

    Raises:
        ConfigError: a call has no name, or the message has thinking beside its content.
    """
    if message.get("reasoning_content"):
        raise ConfigError(
            f"{where}: `reasoning_content` is not cloned: write it into `content`, in <think> tags"
        )
    given, calls = message.get("tool_calls") or [], list[tuple[str, str]]()
    for each in given if isinstance(given, list) else [given]:
        function = each.get("function", each) if isinstance(each, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ConfigError(f"{where}: a tool call must have a function with a `name`")
        arguments = function.get("arguments", {})
        is_text = isinstance(arguments, str)
        written = arguments if is_text else json.dumps(arguments, ensure_ascii=False)
        calls.append((function["name"], written))
    return Message(message["role"], message.get("content") or "", tuple(calls)).as_chat()


def _is_message(value: Any) -> bool:
    """Return whether a value is a table with `role` and `content`, both text; beside tool calls the
    content may be null.
    """
    if not isinstance(value, dict):
        return False
    content = value.get("content")
    is_content = isinstance(content, str) or (content is None and bool(value.get("tool_calls")))
    return is_content and isinstance(value.get("role"), str)
