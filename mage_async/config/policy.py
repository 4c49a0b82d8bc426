"""Define the keys of the policy, a pretrained model or a tiny one, and of its warm start."""

from pathlib import Path
from typing import Literal

from msgspec import field

from mage_async.config.section import Count, Natural, Positive, Section, Share, Variant
from mage_async.errors import ConfigError, PolicyError

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

    source: str = ""
    """Directory of the model, or its id on the hub. No other model is ever downloaded."""


class WarmStart(Variant):
    """Behaviour cloning before RL; without this section RL begins at once."""

    steps: Natural = 150
    """Steps of cloning before the gate is checked, over which the learning rate falls to a tenth.
    0 is the same as no section."""
    episodes: Count = 3
    """Episodes of a cloned trial. A single-episode RL baseline sets more than `trial.episodes`,
    so that it begins from the same policy."""
    trials: Count = 3000
    """Number of trials that are played to be cloned."""
    batch_size: Count = 64
    """Trials a step."""
    learning_rate: Positive = 0.002
    """AdamW's rate while cloning."""
    gate: Share = 1.0
    """Go on until the loss on observations in the last episode is at most this share of the loss in
    the first episode: then the model uses earlier episodes. 1.0 is no gate."""
    max_steps: Natural = 400
    """Steps after which an unmet gate is an error; those beyond `steps` go on at a tenth of the
    rate."""
    cache: bool = True
    """Keep the result under the user's cache directory, for later runs of the same warm start."""
    threads: Count = 1
    """Threads of the cloning: two are a quarter faster on two idle cores, and three times slower
    than one on busy ones."""


class FromScript(WarmStart, tag="script"):
    """The environment's script plays."""

    gate: Share = 0.8
    """Go on until the loss on observations in the last episode is at most this share of the loss in
    the first episode: then the model uses earlier episodes. 1.0 is no gate."""


class FromScriptIfAny(FromScript, tag="auto"):
    """The environment's script plays; if it has none, what "win_stay" does, or no warm start if
    repeating what paid earns no more than random play."""


class FromRandom(WarmStart, tag="random"):
    """Random legal play, which teaches the form of a trial and what the environment answers."""


class FromWinStay(WarmStart, tag="win_stay"):
    """A player without knowledge of the task, which repeats an action that paid in an earlier
    episode and tries another one where none did: it teaches to look earlier episodes up. Nothing is
    cloned if it earns no more than random play, or if a trial takes long."""

    steps: Natural = 200
    """Steps of cloning after the gate has opened, over which the learning rate falls to a tenth. 0
    is the same as no section."""
    gate: Share = 0.5
    """The learning rate is constant until the loss on repeated actions is at most this share of the
    loss on actions that are only tried: then the model looks earlier episodes up."""
    max_steps: Natural = 800
    """Steps after which the learning rate falls although the gate is shut."""
    trials: Count = 1000
    """Number of trials that are played to be cloned."""
    batch_size: Count = 32
    """Trials a step."""
    learning_rate: Positive = 0.004
    """AdamW's rate while cloning."""


class FromBest(WarmStart, tag="best"):
    """The best of the model's own trials: those with the largest return of the last episode."""

    kept: Share = 0.1
    """Share of the trials that is cloned, at least one trial."""


class FromData(WarmStart, tag="data"):
    """A data set: rows with `messages`, of which what the assistant says is cloned, or with
    `text`, which is cloned whole."""

    path: str = ""
    """A file of JSON lines or Parquet, or a folder of such files, as HuggingFace's hub has them and
    `mage journal --export` writes them."""


DATA_ENDINGS = (".jsonl", ".parquet")
"""Endings of the names of a data set's files."""
AnyWarmStart = FromScriptIfAny | FromScript | FromRandom | FromWinStay | FromBest | FromData


def check(policy: Policy) -> None:
    """Refuse a tiny model whose widths do not divide.

    Raises:
        ConfigError: they do not divide; the error has the keys and their values.
    """
    if not isinstance(policy, Tiny):
        return
    if policy.heads % policy.kv_heads or policy.hidden_size % policy.heads:
        raise ConfigError(
            "policy: hidden_size must be a multiple of heads, and heads of kv_heads; "
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
            )
        return Path(source).resolve()
    if source.startswith((".", "/", "~")) or source.count("/") > 1:
        raise PolicyError(f"policy.source {source!r} is no directory; give one, or a hub id")
    return None
