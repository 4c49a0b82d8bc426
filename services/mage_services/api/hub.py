"""Publish a run's model as a HuggingFace folder, with a model card made from the run."""

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import msgspec
from huggingface_hub import HfApi, get_token, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from mage_async import __version__
from mage_async.config import config_file
from mage_async.config.schema import Config, Pretrained
from mage_async.errors import RunError, first_line
from mage_async.inference.chat_files import load_chat
from mage_async.pages.report import verdict
from mage_async.results.intervals import half_text
from mage_async.results.run_directory import NOT_OF_MODEL, RunDirectory
from mage_async.results.run_files import read_document
from mage_async.results.summary import chosen_note, set_rows
from mage_async.trajectory import num_decimals
from mage_services.actor.play_session import chosen_policy

# Class of the errors that huggingface_hub's HTTP library raises, such as for an absent network. The
# library is httpx, or httpx2 from version 2 of huggingface_hub on. The class is found among the
# parents of huggingface_hub's own errors, so that neither library is imported by name.
_HTTPError: type[Exception] = next(
    each for each in HfHubHTTPError.__mro__ if each.__name__ == "HTTPError"
)


def write_folder(
    run: RunDirectory, folder: Path, license_id: str = "", checkpoint: str = "newest"
) -> int:
    """Write a checkpoint as a HuggingFace folder, with `README.md`, the run's `config.toml`, and
    the `summary.json` with the checkpoint's evaluation.

    Args:
        folder: Folder to write; it must be empty or not exist yet.
        license_id: Licence of the model, such as "apache-2.0"; "" for the one that the card of the
            base model names, if any.
        checkpoint: See `chosen_checkpoint`.

    Returns:
        The version of the model: the number of steps that it was trained for.

    Raises:
        RunError: the run has no policy or not that checkpoint, or the folder is not empty.
    """
    run.check_policy()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RunError(f"{folder} is no empty folder: choose another one")
    config = config_file.load_recorded(run.config, imports=False)
    source, version = chosen_policy(run, config, checkpoint)
    shutil.copytree(
        source, folder, ignore=shutil.ignore_patterns(*NOT_OF_MODEL), dirs_exist_ok=True
    )
    _name_stop_tokens(folder)
    base = base_folder(run, config)
    hub_id = hub_id_of(base, config)
    if isinstance(config.policy, Pretrained) and not hub_id:
        # The card and the configuration name a model of the hub, but no folder of the machine that
        # trained.
        policy = msgspec.structs.replace(config.policy, source="")
        (folder / run.config.name).write_text(
            config_file.dump(msgspec.structs.replace(config, policy=policy)), encoding="utf-8"
        )
    else:
        shutil.copy(run.config, folder)
    measured = RunDirectory(run.evaluated_in(version))
    if measured.summary.is_file():
        shutil.copy(measured.summary, folder)
    license_id = license_id or base_license(base)
    text = card(config, read_document(measured.summary), version, license_id, hub_id)
    (folder / "README.md").write_text(text, encoding="utf-8")
    return version


def _name_stop_tokens(folder: Path) -> None:
    """Write the tokens that end a turn into `generation_config.json`, where other programs look for
    them: that of a base model may lack the token with which the template ends messages.
    """
    file, stops = folder / "generation_config.json", load_chat(folder).stop_tokens
    generation = read_document(file)
    named = generation.get("eos_token_id")
    if not {*stops} <= ({*named} if isinstance(named, list) else {named}):
        file.write_text(json.dumps(generation | {"eos_token_id": [*stops]}, indent=2) + "\n")


def push(
    run: RunDirectory,
    repo: str,
    *,
    license_id: str = "",
    is_private: bool = False,
    checkpoint: str = "newest",
) -> str:
    """Upload a run's model to a repository, which is created if it is not there.

    Returns:
        The address of the commit.

    Raises:
        RunError: there is no token, the hub refuses, or the run has no policy.
    """
    if get_token() is None:  # without one the hub would refuse only once the folder is made
        raise RunError("no token for the hub: `hf auth login`, or set HF_TOKEN")
    api = HfApi()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "model"
        version = write_folder(run, folder, license_id, checkpoint)
        message = f"Step {version} of {run.root.name}"
        try:
            api.create_repo(repo, private=is_private, exist_ok=True)
            done = api.upload_folder(repo_id=repo, folder_path=folder, commit_message=message)
        except (HfHubHTTPError, HFValidationError) as error:
            raise RunError(f"the hub refused {repo!r}: {first_line(error)}") from error
        except (_HTTPError, OSError) as error:
            raise RunError(
                f"the hub cannot be reached: {first_line(error)}; push again later, or write the "
                "folder alone with --to"
            ) from error
    return str(done)


def base_folder(run: RunDirectory, config: Config) -> Path | None:
    """Return the folder of the model that a run began from; None if it is not on this machine, or
    the run began from random weights.
    """
    if not isinstance(config.policy, Pretrained):
        return None
    if run.policy.is_symlink():  # without a warm start, version 0 is a link to that folder
        return run.policy.resolve()
    source = config.policy.source
    if Path(source).is_dir():
        return Path(source)
    try:
        cached = try_to_load_from_cache(source, "config.json")
    except HFValidationError:
        return None
    return Path(cached).parent if isinstance(cached, str) else None


def hub_id_of(base: Path | None, config: Config) -> str:
    """Return the hub id of the model that a run began from; "" if it was not taken from the hub.

    Args:
        base: See `base_folder`.
    """
    # The text of `policy.source` does not say whether it is an id or a folder: `models/mine` may be
    # a folder, and `gpt2` an id. The hub's cache has a folder for each id.
    source = getattr(config.policy, "source", "")
    in_cache = f"models--{source.replace('/', '--')}"
    return source if base is not None and in_cache in base.parts else ""


USE = """## Use

`PLACE` is the id of this repository, or a folder with its files:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("PLACE")
tokenizer = AutoTokenizer.from_pretrained("PLACE")
```

In the tokenizer's chat template, a user's message is what the environment says, and the model
answers with an action. `mage adapt --model FOLDER` measures the files of a folder."""
"""Part of a model card that says how the model is loaded."""


def card(
    config: Config, summary: dict[str, Any], version: int, license_id: str = "", base: str = ""
) -> str:
    """Return the text of a model card.

    Args:
        summary: Content of `summary.json`; {} if the run has not ended.
        version: Version of the model: the number of steps that it was trained for.
        license_id: Licence of the model; "" if it is not known.
        base: Hub id of the base model; "" if it was not taken from the hub.
    """
    # The YAML block with which a card begins, between two lines "---".
    front = ["library_name: transformers", "pipeline_tag: text-generation"]
    front += [f"license: {license_id}"] if license_id else []
    front += [f"base_model: {base}"] if base else []
    front += ["tags:", "- reinforcement-learning", "- meta-learning", "- mage_async"]
    if not isinstance(config.policy, Pretrained):
        began = "It began with random weights, and knows only the words of its environment."
    else:
        began = f"It began as {base or 'a model that is not on the hub'}."
    warm = msgspec.to_builtins(config.warm_start)
    cloned = f"; before that a warm start, `{warm['kind']}`, by behaviour cloning" if warm else ""
    unknown = "The licence of the base model is not known: ask whoever made it before you use this."
    has_unknown_base = isinstance(config.policy, Pretrained) and not license_id
    admission, most_stale = config.admission, config.admission.most_stale
    staleness = (
        "staleness has no bound" if most_stale is None else f"staleness at most {most_stale}"
    )
    lines = [
        *("---", *front, "---", "", f"# {config.environment.name}, step {version}", ""),
        f"A language agent trained by mage_async {__version__}: it plays "
        f"{config.trial.episodes} episodes of one task, and was trained to use in each what the "
        f"earlier ones showed. {began}",
        *(["", unknown] if has_unknown_base else []),
        *("", USE, ""),
        *("## Training", ""),
        f"- Data: trials of `{config.environment.name}` that the policy played itself, from seed "
        f"{config.seed}{cloned}.",
        f"- Steps: {version} of {config.learner.steps}, each of {admission.groups_per_step} "
        f"groups of {admission.trials_per_group} trials; {staleness}.",
        "- `config.toml` has every key, and `summary.json` every result.",
        *("", "## Evaluation", "", *_evaluation(summary)),
    ]
    return "\n".join(lines) + "\n"


def _evaluation(summary: dict[str, Any]) -> list[str]:
    """Return the table of returns with controls and intervals."""
    scores = summary.get("evaluation")
    if not scores:
        return ["The run has not been evaluated."]
    rows = set_rows(scores)
    episodes = range(1, 1 + len(next(iter(rows.values())).values))
    lines = [
        *([verdict(scores), ""] if "heldout" in scores else []),
        "Return per unit of the environment, with 95 % intervals. `blind` removes earlier episodes "
        "from the context, and `swapped` hides another task in the last one: the return that is "
        "lost with them is due to knowledge about the task at hand.",
        "",
        "| set | trials | " + " | ".join(f"episode {number}" for number in episodes) + " |",
        "|---|---|" + "---|" * len(episodes),
    ]
    digits = num_decimals(value for row in rows.values() for value in row.values)
    for name, row in rows.items():
        pairs = zip(row.values, row.half_widths or [], strict=True)
        cells = " | ".join(
            f"{mean:+,.{digits}f} ± {half_text(half, digits)}" for mean, half in pairs
        )
        lines.append(f"| {row.label} | {scores[name]['num_trials']} | {cells} |")
    return [*lines, "", note] if (note := chosen_note(summary)) else lines


def base_license(folder: Path | None) -> str:
    """Return the licence that the card in a model's folder names; "" if there is none."""
    file = folder / "README.md" if folder else None
    text = file.read_text(encoding="utf-8", errors="replace") if file and file.is_file() else ""
    # A card begins with a block of YAML between two lines "---".
    front = text.split("---")[1] if text.startswith("---") and text.count("---") > 1 else ""
    named = (line.partition(":")[2] for line in front.splitlines() if line.startswith("license:"))
    return next(named, "").strip()
