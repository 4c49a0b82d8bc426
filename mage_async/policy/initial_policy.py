"""Prepare the initial policy of a run: a local model, one downloaded by its hub id, a warm-started
one, or one from the cache.
"""

import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
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
    played_sources,
    with_warm_start,
)
from mage_async.config.schema import (
    Config,
    Embedded,
    Engine,
    FromBest,
    FromData,
    Pretrained,
    Tiny,
    data_files,
    local_policy,
)
from mage_async.errors import PolicyError, first_line
from mage_async.inference.chat_files import load_chat
from mage_async.learning.lora import add_adapters
from mage_async.methods.method import overriding
from mage_async.policy.demonstrations import (
    MADE_HERE,
    NOTHING_TO_CLONE,
    WIN_STAY_RULE,
    Example,
    InTime,
    NothingToClone,
    ToClone,
    Watch,
    examples_to_clone,
    untimed,
    unwatched,
)
from mage_async.policy.load import build_tiny, export_hf, load_policy
from mage_async.policy.model_files import check_type
from mage_async.policy.warm_start import Progress, warm_start
from mage_async.results.run_directory import COUNTERS, NOT_OF_MODEL, WARM_START
from mage_async.results.run_files import read_document
from mage_async.user_modules import cache_folder, source_digest

UNREAD_FILES = [
    *("*.bin", "*.ckpt", "*.gguf", "*.h5", "*.msgpack", "*.onnx", "*.onnx_data", "*.pt", "*.pth"),
    "consolidated*.safetensors",
]
"""Patterns of files of a hub model that are not fetched, because they hold the same weights in
formats that this program does not read."""
ABANDONED_S = 86_400.0
"""Seconds after which an unfinished copy in the cache counts as left by a killed process."""


def prepare_policy(
    config: Config,
    directory: Path,
    report: Callable[[Progress], None],
    in_time: InTime = untimed,
    watch: Watch = unwatched,
) -> str:
    """Write the model directory of version 0 as `directory`; return its origin in a few words.

    Args:
        report: Function that is called after each step of a warm start.
        in_time: Function that ends the play of win-stay, lose-shift if a user's class hangs; the
            default waits for ever.
        watch: Function that ends scripted or random play with a fault if a user's class hangs; the
            default waits for ever.
    """
    # A process may be killed while it writes: the directory gets its name only when it is whole.
    working = directory.with_name(f".{directory.name}.part")
    # A pretrained policy that is not cloned is a link to its source, which `rmtree` leaves alone.
    if working.is_symlink():
        working.unlink()
    shutil.rmtree(working, ignore_errors=True)
    origin = _write(with_warm_start(config), working, report, in_time, watch)
    os.replace(working, directory)
    return origin


def _write(
    config: Config,
    directory: Path,
    report: Callable[[Progress], None],
    in_time: InTime,
    watch: Watch,
) -> str:
    """Write the files of version 0 into a directory, one after another; return their origin."""
    policy, warm = config.policy, config.warm_start
    if warm is None and isinstance(policy, Pretrained):
        source = source_directory(policy, config.engine)
        for tools in (part.tools for _, part in named_parts(config) if part.tools):
            load_chat(source).offering(tools)  # raises if the template offers no tools
        if (source / COUNTERS).is_file() or (source.parent / COUNTERS).is_file():
            # A checkpoint, or its merged model, which its run may delete.
            shutil.copytree(source, directory, ignore=shutil.ignore_patterns(*NOT_OF_MODEL))
        else:
            directory.symlink_to(source, target_is_directory=True)
        return f"{policy.source}, as it is"
    cached = cached_policy(config)
    if cached and (cached / "config.json").is_file():
        shutil.copytree(cached, directory)
        origin = str(read_document(directory / WARM_START)["origin"])
        return origin.replace(MADE_HERE, "from the cache of an earlier warm start", 1)
    known = read_document(cached / NOTHING_TO_CLONE) if cached else {}
    if isinstance(policy, Tiny):
        source = directory
        build_tiny(policy, environment_of(config).facts.words, config.seed, directory)
    else:
        source = source_directory(policy, config.engine)
    if warm is None:
        return "built here"
    found: ToClone | NothingToClone
    if known:
        found = NothingToClone(f"as an earlier start found, {known['reason']}")
    else:
        found = examples_to_clone(config, warm, source, in_time, watch)
    if isinstance(found, NothingToClone):
        if source != directory:  # a tiny model was built in `directory` itself
            directory.symlink_to(source, target_is_directory=True)
        uncached = ""
        if cached and found.is_lasting:
            # The reason alone: `directory` may be a link to a pretrained model.
            uncached = _cache(partial(_write_reason, found.reason), cached)
        return f"without a warm start: {found.reason}{uncached}"
    examples, origin, rule = found
    end = _clone(config, examples, source, directory, report)
    record = {"origin": origin, "fault": end.fault, "cure": end.cure}
    (directory / WARM_START).write_bytes(msgspec.json.encode(record))
    if rule is not None:
        (directory / WIN_STAY_RULE).write_bytes(msgspec.json.encode(rule))
    return origin + _cache(partial(shutil.copytree, directory), cached) if cached else origin


def _clone(
    config: Config,
    examples: Sequence[Example],
    source: Path,
    directory: Path,
    report: Callable[[Progress], None],
) -> Progress:
    """Warm-start a model, and return its progress at the end; every step is determined by the
    configuration and its seed.

    Only a pretrained model trains adapters here: a tiny one has random weights.
    """
    assert config.warm_start is not None, "there are examples to clone"
    torch.set_num_threads(config.warm_start.threads)
    lora = config.policy.lora if isinstance(config.policy, Pretrained) else None
    # Without adapters the weights stay float32: 16 bits would round small updates to nothing.
    device = _device(config)
    model = load_policy(source, config.policy.dtype if lora else "float32", device)
    if lora:
        add_adapters(model, lora, config.seed)
    end = warm_start(model, examples, config, report)
    export_hf(model, source, directory)
    if device != "cpu":
        del model
        # PyTorch would keep the memory, and the engines on this GPU could not have it.
        torch.cuda.empty_cache()
    return end


def _device(config: Config) -> str:
    """Return the device of the warm start: the learner's, with two exceptions.

    For a tiny model, a GPU takes longer to start its kernels than a core takes to compute. A model
    that is sharded over ranks may not fit on one GPU.
    """
    is_whole = isinstance(config.policy, Pretrained) and config.learner.ranks == 1
    return config.learner.device if is_whole else "cpu"


def source_directory(policy: Pretrained, engine: Engine) -> Path:
    """Return a local directory, or that of a hub model, which is downloaded once.

    Raises:
        PolicyError: there is no such directory, and no such hub model can be fetched, or it
            cannot be trained or served.
    """
    name = policy.source
    if folder := local_policy(name):
        return folder
    try:
        # `config.json` is fetched first: it says whether the other files, perhaps many GB, can be
        # used.
        outline = Path(snapshot_download(name, allow_patterns="config.json"))
        check_type(outline, is_embedded=isinstance(engine, Embedded))
        return Path(snapshot_download(name, ignore_patterns=UNREAD_FILES))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise PolicyError(
            f"policy.source {name!r} is no directory, and no hub id that can be fetched: "
            f"{first_line(error)}"
        ) from error


def cached_policy(config: Config) -> Path | None:
    """Return the directory in which the result of a warm start is cached, or will be (the reason if
    there is nothing to clone, unless it may be due to the machine); None if the
    run has no warm start, or one that is not cached.
    """
    warm = with_warm_start(config).warm_start
    return cache_folder() / policy_key(config) if warm and warm.cache else None


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
        # `trial.episodes` does not count, because a warm start has its own number of episodes. So a
        # run on single episodes, as a control, begins from the same policy.
        msgspec.structs.replace(config.trial, episodes=1),
        config.transcript,
        config.engine.max_tokens,
        # Only the model's own trials are sampled. The number of sequences in a batch decides the
        # last bits of log-probs.
        (config.sampling, config.engine.max_contexts)
        if isinstance(config.warm_start, FromBest)
        else None,
        config.policy,
        config.warm_start,
        {name: config.methods[name] for name in overriding(config, "guide_demonstration")},
        config.learner.shared_opening,
        # Devices round differently.
        _device(config),
        source_digest(),
        # A class may read its words from a file that is no source.
        environment_of(config).facts.words,
        played_sources(config),
        [(name, status.st_size, status.st_mtime_ns) for name, status in files],
    )
    return blake2s(msgspec.json.encode(parts, order="sorted"), digest_size=12).hexdigest()


def _write_reason(reason: str, directory: Path) -> None:
    """Write a directory with the reason why there is nothing to clone."""
    directory.mkdir()
    (directory / NOTHING_TO_CLONE).write_bytes(msgspec.json.encode({"reason": reason}))


def _cache(write: Callable[[Path], object], cached: Path) -> str:
    """Store a directory in the cache; return a clause on why that failed, "" if it did not."""
    try:
        _store(write, cached)
    except OSError as error:  # a home that cannot be written, or a full disk
        return f", not cached: {first_line(error)}"
    return ""


def _store(write: Callable[[Path], object], cached: Path) -> None:
    """Store a directory in the cache, whole or not at all. If several processes store it at the
    same time, their copies are equal.

    Unfinished copies of processes that were killed are removed after `ABANDONED_S`.

    Args:
        write: Writes the directory.
    """
    cached.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{cached.name}.", dir=cached.parent) as working:
        copy = Path(working) / "copy"
        write(copy)
        with suppress(OSError):  # another run has stored an equal copy first
            os.replace(copy, cached)
        now = Path(working).stat().st_mtime  # by the same clock as the other folders' times
        for unfinished in cached.parent.glob(f".{'?' * len(cached.name)}.*"):
            with suppress(OSError):  # another run has removed it first
                if now - unfinished.stat().st_mtime > ABANDONED_S:
                    shutil.rmtree(unfinished)
