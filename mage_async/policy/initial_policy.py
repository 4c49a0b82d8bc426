"""Prepare the initial policy of a run: a local model, one downloaded by its hub id, a warm-started
one, or one from the cache.
"""

import os
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from hashlib import blake2s
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from mage_async.assembly import (
    environment_of,
    named_parts,
    own_sources,
    trial_config_of,
    with_warm_start,
)
from mage_async.config.schema import (
    Config,
    FromBest,
    FromData,
    FromRandom,
    FromWinStay,
    Pretrained,
    Tiny,
    WarmStart,
    data_files,
    local_policy,
)
from mage_async.errors import PolicyError, TrialFault, first_line
from mage_async.inference.chat_files import load_chat
from mage_async.methods.method import Methods, overriding
from mage_async.policy.load import build_tiny, export_hf, load_policy
from mage_async.policy.lora import add_adapters
from mage_async.policy.warm_start import (
    TEMPLATE_WEIGHT,
    WIN_STAY_TEMPLATE_WEIGHT,
    Example,
    Progress,
    best_trials,
    examples_of,
    read_examples,
    warm_start,
    win_stay_examples,
)
from mage_async.results.run_directory import COUNTERS, NOT_OF_MODEL
from mage_async.trajectory import Trial
from mage_async.trials.chat_format import ChatFormat
from mage_async.trials.scripted import (
    Player,
    own_script,
    random_play,
    random_task,
    scripted_trial,
    word_tokens,
)
from mage_async.trials.win_stay import NUM_COMPARED, Rule, best_rule, player_of
from mage_async.user_modules import source_digest

NUM_TIMED = 8
"""Number of trials of random play that are timed, to decide whether a thousand can be played."""
QUICK_S = 0.3
"""Most seconds that the fastest of these trials may take. The fastest, because on a busy machine
the times of the others tell little."""
LATE_S = 5.0
"""Seconds after which a trial of win-stay, lose-shift counts as hanging."""
ABANDONED_S = 86_400.0
"""Seconds after which an unfinished copy in the cache is taken for that of a killed process."""
InTime = Callable[[Iterator[Trial], float], Iterator[tuple[Trial, float]]]
"""Yields each trial of an iterator and the seconds that it took, until one takes longer than the
given seconds."""


def _untimed(trials: Iterator[Trial], _: float) -> Iterator[tuple[Trial, float]]:
    """Yield trials however long they take, each with 0 seconds."""
    return ((trial, 0.0) for trial in trials)


def prepare_policy(
    config: Config,
    directory: Path,
    report: Callable[[Progress], None],
    in_time: InTime = _untimed,
) -> str:
    """Write the model directory of version 0 as `directory`; return its origin in a few words.

    Args:
        report: Function that is called after each step of a warm start.
        in_time: Function that ends the play of a class that hangs; the default waits for ever.
    """
    # A process may be killed while it writes: the directory gets its name only when it is whole.
    working = directory.with_name(f".{directory.name}.part")
    # A pretrained policy that is not cloned is a link to its source, which `rmtree` leaves alone.
    if working.is_symlink():
        working.unlink()
    shutil.rmtree(working, ignore_errors=True)
    origin = _write(with_warm_start(config), working, report, in_time)
    os.replace(working, directory)
    return origin


def _write(
    config: Config, directory: Path, report: Callable[[Progress], None], in_time: InTime
) -> str:
    """Write the files of version 0 into a directory, one after another; return their origin."""
    policy, warm = config.policy, config.warm_start
    if warm is None and isinstance(policy, Pretrained):
        source = source_directory(policy.source)
        for tools in (part.tools for _, part in named_parts(config) if part.tools):
            load_chat(source).offering(tools)  # raises if the template offers no tools
        if (source / COUNTERS).is_file() or (source.parent / COUNTERS).is_file():
            # A checkpoint, or its merged model, which its run may delete.
            shutil.copytree(source, directory, ignore=shutil.ignore_patterns(*NOT_OF_MODEL))
        else:
            directory.symlink_to(source, target_is_directory=True)
        return f"{policy.source}, as it is"
    cached = cache_folder() / policy_key(config)
    if warm and warm.cache and (cached / "config.json").is_file():
        shutil.copytree(cached, directory)
        return "from the cache of an earlier warm start"
    if isinstance(policy, Tiny):
        source = directory
        build_tiny(policy, environment_of(config).facts.words, config.seed, directory)
    else:
        source = source_directory(policy.source)
    if warm is None:
        return "built here"
    examples, origin = _examples(config, warm, source, in_time)
    if not examples:
        if source != directory:  # a tiny model was built in `directory` itself
            directory.symlink_to(source, target_is_directory=True)
        return origin
    _clone(config, warm, examples, source, directory, report)
    if warm.cache:
        _store(directory, cached)
    return origin


def cache_folder() -> Path:
    """Return the folder that caches warm starts between runs."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "mage_async"


def _clone(
    config: Config,
    warm: WarmStart,
    examples: Sequence[Example],
    source: Path,
    directory: Path,
    report: Callable[[Progress], None],
) -> None:
    """Warm-start a model; every step is determined by the configuration and its seed.

    Only a pretrained model trains adapters here: a tiny one has random weights.
    """
    torch.set_num_threads(warm.threads)
    lora = config.policy.lora if isinstance(config.policy, Pretrained) else None
    # Without adapters the weights stay float32: 16 bits would round small updates to nothing.
    device = _device(config)
    model = load_policy(source, config.policy.dtype if lora else "float32", device)
    if lora:
        add_adapters(model, lora, config.seed)
    warm_start(
        model,
        examples,
        warm,
        config.seed,
        report,
        max_tokens=config.learner.max_tokens_per_microbatch,
        shares_opening=config.learner.shared_opening,
    )
    export_hf(model, source, directory)
    if device != "cpu":
        del model
        # PyTorch would keep the memory, and the engines on this GPU could not have it.
        torch.cuda.empty_cache()


def _device(config: Config) -> str:
    """Return the device of the warm start: the learner's, with two exceptions.

    A tiny model takes a GPU longer to start its kernels than a core to compute. A model that is
    sharded over ranks may not fit on one GPU.
    """
    is_whole = isinstance(config.policy, Pretrained) and config.learner.ranks == 1
    return config.learner.device if is_whole else "cpu"


def _examples(
    config: Config, warm: WarmStart, directory: Path, in_time: InTime
) -> tuple[list[Example], str]:
    """Return the examples to clone, which are rows of a data set, or trials on training tasks, and
    the origin of the policy in a few words.

    There are no examples if no rule of win-stay, lose-shift is worth cloning.
    """
    chat, origin = load_chat(directory, thinking=config.transcript.thinking), "warm-started here"
    is_tiny = isinstance(config.policy, Tiny)
    if isinstance(warm, FromData):
        return read_examples(warm.path, chat, config.engine.max_tokens), origin
    words = word_tokens(environment_of(config), chat)
    if isinstance(warm, FromWinStay):
        played = _win_stay_trials(config, warm, chat, in_time)
        if isinstance(played, str):
            return [], f"without a warm start: {played}"
        rule, trials = played
        weight = WIN_STAY_TEMPLATE_WEIGHT if is_tiny else 0.0
        return win_stay_examples(trials, rule, words, weight), f"{origin}, to {rule}"
    if isinstance(warm, FromBest):
        trials = best_trials(config, warm, directory, chat)
    else:
        trials = _demonstrations(config, warm, chat)
    return examples_of(trials, words, TEMPLATE_WEIGHT if is_tiny else 0.0), origin


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
        trial = scripted_trial(environment, task, index, trial_config, chat, guidance, player)
        trials.append(trial)
        methods.learn_demonstration(trial)
    return trials


def _win_stay_trials(
    config: Config, warm: FromWinStay, chat: ChatFormat, in_time: InTime
) -> tuple[Rule, list[Trial]] | str:
    """Return the best rule of win-stay, lose-shift, and trials that it played; or why none is worth
    cloning.
    """
    environment = environment_of(config)
    trial_config = trial_config_of(config, environment, chat, warm.episodes)

    def play(player: Player, count: int = NUM_COMPARED) -> Iterator[Trial]:
        """Yield trials of a player, on the same tasks in every call."""
        source = random.Random(f"{config.seed}/win-stay")
        for index in range(count):
            task = random_task(environment, "train", source)
            # A class that fails now and then is played again by actors; here it is left out.
            with suppress(TrialFault):
                yield scripted_trial(environment, task, index, trial_config, chat, player=player)

    seconds = [each for _, each in in_time(play(random_play, NUM_TIMED), LATE_S)]
    if len(seconds) < NUM_TIMED // 2:
        return f"{NUM_TIMED - len(seconds)} of {NUM_TIMED} trials of random play failed or hang"
    if min(seconds) > QUICK_S:
        return f"each of {NUM_TIMED} trials of random play took over {QUICK_S} s"
    rule = best_rule(lambda player: (trial for trial, _ in in_time(play(player), LATE_S)))
    if rule is None:
        return "a player that repeats what paid earns no more than random play"
    trials = [trial for trial, _ in in_time(play(player_of(rule), warm.trials), LATE_S)]
    return (rule, trials) if trials else "the trials of the player that repeats what paid hang"


def source_directory(name: str) -> Path:
    """Return a local directory, or that of a hub model, which is downloaded once.

    Raises:
        PolicyError: there is no such directory, and no such hub model can be fetched.
    """
    if folder := local_policy(name):
        return folder
    try:
        return Path(snapshot_download(name))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise PolicyError(
            f"policy.source {name!r} is no directory, and no hub id that can be fetched: "
            f"{first_line(error)}"
        ) from error


def policy_key(config: Config) -> str:
    """Return a digest of everything that version 0 depends on.

    This includes the program, the source of the user's own classes, and the files of a local model.
    """
    config = with_warm_start(config)
    source = local_policy(config.policy.source) if isinstance(config.policy, Pretrained) else None
    read = sorted(source.iterdir()) if source else []
    if isinstance(config.warm_start, FromData):
        read += data_files(config.warm_start.path)
    files = [(each.name, each.stat()) for each in read]
    parts = (
        config.seed,
        config.environment,
        # A warm start has its own number of episodes, so that a control on single episodes begins
        # from the same policy.
        msgspec.structs.replace(config.trial, episodes=1),
        config.transcript,
        config.engine.max_tokens,
        config.policy,
        config.warm_start,
        {name: config.methods[name] for name in overriding(config, "guide_demonstration")},
        config.learner.shared_opening,
        # Devices round differently.
        _device(config),
        source_digest(),
        # A class may read its words from a file that is no source.
        environment_of(config).facts.words,
        own_sources(config),
        [(name, status.st_size, status.st_mtime_ns) for name, status in files],
    )
    return blake2s(msgspec.json.encode(parts, order="sorted"), digest_size=12).hexdigest()


def _store(directory: Path, cached: Path) -> None:
    """Store a copy, whole or not at all. Two runs may race; their copies are equal.

    Unfinished copies of processes that were killed are removed after `ABANDONED_S`.
    """
    cached.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{cached.name}.", dir=cached.parent) as working:
        copy = shutil.copytree(directory, Path(working) / "copy")
        with suppress(OSError):  # another run has stored an equal copy first
            os.replace(copy, cached)
        now = Path(working).stat().st_mtime  # by the same clock as the other folders' times
        for left in cached.parent.glob(f".{'?' * len(cached.name)}.*"):
            with suppress(OSError):  # another run has removed it first
                if now - left.stat().st_mtime > ABANDONED_S:
                    shutil.rmtree(left)
