"""Export trials of a journal to a file, in the format that the file's ending names.

A row is a trial with the values of `mage_async/attribution.py` (`trial_row`): its group and number,
the step that trained on it, its texts, actions and rewards, and each turn's return, advantage and
`info`; in Parquet also every token with its log-prob, version, staleness and advantage
(`token_columns`). See `docs/exports.md`.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.util import find_spec
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from mage_async import __version__
from mage_async.attribution import (
    AttributedTrial,
    AttributedTurn,
    attributed,
    steps_of,
    token_versions,
)
from mage_async.errors import RunError
from mage_async.policy_version import oldest
from mage_async.results.run_directory import RunDirectory
from mage_async.trajectory import trial_as_dict
from mage_async.trials.chat_format import ChatFormat
from mage_services.journal.reader import check_journal, open_journal, steps_in_words


def export(
    trials: Iterable[AttributedTrial], chat: ChatFormat, file: Path, *, run: str = "run"
) -> int:
    """Write trials to a file, in the format that its ending names; return the number of trials.

    The file or folder appears when it is complete, or not at all.

    Args:
        run: Name of the run, for formats that have a field for it.

    Raises:
        RunError: the ending is unknown, pyarrow is not installed, the journal cannot be read, or
            the file cannot be written, for example because a folder of that name exists.
    """
    check_file(file)
    working, num_trials = file.with_name(f".{file.name}.part"), 0

    def counted() -> Iterator[AttributedTrial]:
        """Yield the trials, and count them."""
        nonlocal num_trials
        for trial in trials:
            num_trials += 1
            yield trial

    try:
        _remove(working)
        WRITERS[file.suffix](counted(), chat, working, run)
        os.replace(working, file)
    except OSError as fault:
        # The trials are read from the journal meanwhile: the fault may be one of reading.
        raise RunError(f"the export to {file} failed: {fault}") from fault
    finally:
        _remove(working)
    return num_trials


def check_file(file: Path) -> None:
    """Refuse a file in which no trials can be written.

    Raises:
        RunError: the ending is unknown, pyarrow is needed and not installed, a folder has that
            name, or the folder of the file does not exist.
    """
    if file.suffix not in WRITERS:
        known = " or ".join([", ".join([*WRITERS][:-1]), [*WRITERS][-1]])
        raise RunError(f"{file}: an export ends in {known}, got {file.suffix!r}")
    # Otherwise these errors would be raised only after all trials were read.
    if file.is_dir():
        raise RunError(f"{file} is a folder, which is not overwritten: choose another name")
    if not file.parent.is_dir():
        raise RunError(f"{file}: there is no folder {file.parent}")
    if file.suffix in (".parquet", ".dataset") and find_spec("pyarrow") is None:
        raise RunError(
            "Parquet needs pyarrow: pip install 'mage_async[export]', or export to a file that "
            "ends in .jsonl"
        )


def journaled_trials(
    run: RunDirectory, chat: ChatFormat, *, step: int | None = None, grant: int | None = None
) -> Iterator[AttributedTrial]:
    """Yield the trials of a run's journal with return and advantage, in the order of their steps.

    Args:
        step: Step whose trials are yielded; None for all steps.
        grant: Number of the group whose trials are yielded; None for all groups.

    Raises:
        RunError: the run has no journal.
    """
    check_journal(run)
    for each in steps_of(open_journal(run.journal).records()):
        # Attribution takes long, so only the trials of the requested steps are attributed.
        grants = {group.grant for group in each.groups}
        if step in (None, each.step) and (grant is None or grant in grants):
            trials = attributed(each, chat.decode)
            yield from (trial for trial in trials if grant in (None, trial.grant))


def selected_trials(
    run: RunDirectory, chat: ChatFormat, *, step: int | None = None, grant: int | None = None
) -> Iterator[AttributedTrial]:
    """Return the same trials as `journaled_trials`; raise at once if the journal has none of them.

    Raises:
        RunError: the run has no journal, or the journal has no such trial.
    """
    found = journaled_trials(run, chat, step=step, grant=grant)
    if (first := next(found, None)) is None:
        there = steps_in_words(open_journal(run.journal))
        raise RunError(f"{run.root}: no such trial; the journal has {there}")
    return chain([first], found)


def trial_row(attributed_trial: AttributedTrial, chat: ChatFormat) -> dict[str, Any]:
    """Return a trial as plain data: its group and step, its text, the values of each turn."""
    trial = attributed_trial.trial
    version = oldest(run for segment in trial.segments for run in segment.versions)
    row = trial_as_dict(trial, chat.decode, version)
    turns = [
        turn | _turn_values(values)
        for turn, values in zip(row["turns"], attributed_trial.turns, strict=True)
    ]
    ids = {"grant": attributed_trial.grant, "trial": trial.index, "step": attributed_trial.step}
    return ids | row | {"turns": turns}


def token_columns(attributed_trial: AttributedTrial) -> dict[str, list[np.ndarray]]:
    """Return the values of every token of a trial, by name; one array per segment.

    Versions, staleness and advantages are 0 for tokens that the policy did not sample. Staleness
    and advantages are also 0 for tokens that no step trained. Advantages are also 0 if the journal
    no longer has the whole batch of the step.
    """
    segments = attributed_trial.trial.segments
    columns: dict[str, list[np.ndarray]] = {
        "tokens": [segment.tokens for segment in segments],
        "logprobs": [segment.logprobs for segment in segments],
        "is_sampled": [segment.is_sampled for segment in segments],
        "versions": [np.where(part.is_sampled, token_versions(part), 0) for part in segments],
        "staleness": [np.zeros(len(part.tokens), np.int32) for part in segments],
        "advantages": [np.zeros(len(part.tokens), np.float32) for part in segments],
    }
    for values in attributed_trial.turns:
        turn = values.turn
        completion = slice(turn.start, turn.stop)
        is_sampled = segments[turn.segment].is_sampled[completion]
        if values.staleness is not None:
            columns["staleness"][turn.segment][completion] = values.staleness * is_sampled
        columns["advantages"][turn.segment][completion] = (values.advantage or 0.0) * is_sampled
    return columns


def _turn_values(values: AttributedTurn) -> dict[str, Any]:
    """Return the values of a turn as plain data; its staleness is that of its oldest token."""
    staleness = values.staleness
    return {
        "return": values.return_to_go,
        "advantage": values.advantage,
        "staleness": int(staleness.max()) if staleness is not None and len(staleness) else None,
        "context": values.turn.segment,
        "start": values.turn.start,
        "stop": values.turn.stop,
    }


def _remove(working: Path) -> None:
    """Delete a file or folder, if it is there."""
    shutil.rmtree(working, ignore_errors=True)
    working.unlink(missing_ok=True)


def _write_lines(trials: Iterable[AttributedTrial], chat: ChatFormat, file: Path, run: str) -> None:
    """Write one line of JSON for each trial."""
    with file.open("w") as out:
        out.writelines(json.dumps(trial_row(trial, chat)) + "\n" for trial in trials)


def _write_trajectories(
    trials: Iterable[AttributedTrial], chat: ChatFormat, folder: Path, run: str
) -> None:
    """Write one folder per trial, with the two files that Harbor's viewer looks for."""
    folder.mkdir()
    for trial in trials:
        name, task = trajectory_name(trial), trial.trial.task
        agent = folder / name / "agent"
        agent.mkdir(parents=True)
        (agent / "trajectory.json").write_text(json.dumps(trajectory_of(trial, run, __version__)))
        config = {"task": {"path": f"{task.environment}/{task.member}"}, "trial_name": name}
        (folder / name / "config.json").write_text(json.dumps(config))


def write_dataset(
    trials: Iterable[AttributedTrial], chat: ChatFormat, folder: Path, run: str
) -> None:
    """Write a folder for HuggingFace's `datasets.load_dataset`, ready to be uploaded."""
    (folder / "data").mkdir(parents=True)
    (folder / "README.md").write_text(CARD)
    write_parquet(trials, chat, folder / "data" / "train.parquet", run)


def write_parquet(
    trials: Iterable[AttributedTrial], chat: ChatFormat, file: Path, run: str
) -> None:
    """Write one row per trial."""
    import pyarrow
    import pyarrow.parquet

    schema, trials = _schema(pyarrow), iter(trials)
    with pyarrow.parquet.ParquetWriter(file, schema) as out:
        while rows := [
            trial_row(trial, chat) | token_columns(trial) for trial in islice(trials, ROWS_AT_ONCE)
        ]:
            out.write_table(pyarrow.Table.from_pylist(rows, schema=schema))


def _schema(pyarrow: Any) -> Any:
    """Return the columns of the Parquet file. In a list of lists, the outer index is the segment of
    the trial's context, and the inner one the token.
    """
    whole, text, real = pyarrow.int64(), pyarrow.string(), pyarrow.float64()
    small, single, flag = pyarrow.int32(), pyarrow.float32(), pyarrow.bool_()
    many: Callable[[Any], Any] = pyarrow.list_
    turn = [
        *(("episode", small), ("kind", text), ("action", text), ("reward", real)),
        *(("is_valid", flag), ("info", text), ("return", real), ("advantage", real)),
        *(("staleness", small), ("context", small), ("start", small), ("stop", small)),
    ]
    return pyarrow.schema(
        [
            ("grant", whole),
            ("trial", whole),
            ("step", whole),
            ("version", whole),
            ("environment", text),
            ("member", text),
            ("seat", small),
            ("seed", pyarrow.uint64()),
            ("reward_by_episode", many(real)),
            ("turns", many(pyarrow.struct(turn))),
            ("contexts", many(text)),
            ("tokens", many(many(small))),
            ("logprobs", many(many(single))),
            ("is_sampled", many(many(flag))),
            ("versions", many(many(small))),
            ("staleness", many(many(small))),
            ("advantages", many(many(single))),
        ]
    )


ROWS_AT_ONCE = 1000
"""Number of rows that are held in memory and written to a Parquet file together."""
CARD = """\
---
configs:
- config_name: default
  data_files:
  - split: train
    path: data/train.parquet
---

Trials of a run of mage_async, one per row; `docs/why_a_turn.md` explains the columns.
"""
"""Text of an export's `README.md`, a dataset card of the Hugging Face hub."""

# ATIF, the trajectory format of Harbor: `harbor.models.trajectories` of Harbor 0.25 (RFC 0001).
# Values that ATIF has no field for, such as returns and policy versions, are in its `extra`.

VERSION = "ATIF-v1.8"
"""Version of the trajectory format ATIF that is written."""


def trajectory_name(trial: AttributedTrial) -> str:
    """Return the name of a trial, unique in its run."""
    return f"group-{trial.grant}-trial-{trial.trial.index}"


def trajectory_of(trial: AttributedTrial, run: str, version: str) -> dict[str, Any]:
    """Return the trajectory of a trial.

    Each segment's prompt is a step of the user; each completion is a step of the agent, with
    the environment's next observation. Log-probs are those of the behaviour policy, in
    nats, after temperature. Every step holds all token ids of its prompt, so the size of a
    trajectory grows with the square of its number of turns.

    Args:
        run: Name of the run, the same for all its trajectories.
        version: Version of this program.
    """
    task, played = trial.trial.task, trial.trial
    return {
        "schema_version": VERSION,
        "session_id": run,
        "trajectory_id": trajectory_name(trial),
        "agent": {"name": "mage_async", "version": version, "model_name": run},
        "steps": _steps(trial),
        "final_metrics": {
            "total_prompt_tokens": played.num_prompt_tokens,
            "total_completion_tokens": played.num_sampled(),
            "total_cached_tokens": played.num_reused_tokens,
            "extra": {"reward_by_episode": played.episode_rewards()},
        },
        "extra": {
            "grant": trial.grant,
            "trial": played.index,
            "step": trial.step,
            "granted_at": trial.granted_at,
            "environment": task.environment,
            "member": task.member,
            "seat": task.seat,
            "seed": task.seed,
        },
    }


def _steps(trial: AttributedTrial) -> list[dict[str, Any]]:
    """Return the trajectory's steps, numbered from 1. A prompt is a step of its own only at the
    start of a segment; later prompts are the observations of the agent's steps.
    """
    steps: list[dict[str, Any]] = []
    observations = [*_later_observations(trial.turns), trial.ending]
    for number, (each, after) in enumerate(zip(trial.turns, observations, strict=True)):
        if _begins_segment(trial.turns, number):
            steps.append({"source": "user", "message": each.text.observation})
        steps.append(_agent_step(trial, each, after))
    return [{"step_id": number} | step for number, step in enumerate(steps, 1)]


def _later_observations(turns: Sequence[AttributedTurn]) -> list[str]:
    """Return the observation after each completion but the last; "" after the last one of a
    segment.
    """
    return [
        "" if _begins_segment(turns, number) else turns[number].text.observation
        for number in range(1, len(turns))
    ]


def _begins_segment(turns: Sequence[AttributedTurn], number: int) -> bool:
    """Return whether the turn of this index is the first of its segment."""
    return number == 0 or turns[number].turn.segment != turns[number - 1].turn.segment


def _agent_step(trial: AttributedTrial, values: AttributedTurn, after: str) -> dict[str, Any]:
    """Return the step of one completion; `after` is the observation that follows it."""
    turn = values.turn
    segment_tokens = trial.trial.segments[turn.segment].tokens
    return {
        "source": "agent",
        "message": values.text.completion,
        "observation": {
            "results": [{"content": after, "extra": {"reward": turn.reward, "info": turn.info}}]
        },
        "metrics": {
            "prompt_tokens": turn.start,
            "completion_tokens": len(values.tokens),
            "cached_tokens": turn.num_reused,
            "prompt_token_ids": segment_tokens[: turn.start].tolist(),
            "completion_token_ids": values.tokens.tolist(),
            "logprobs": values.logprobs.tolist(),
            "extra": {"versions": values.versions.tolist()},
        },
        "extra": {
            "kind": turn.kind.name.lower(),
            "episode": turn.episode,
            "action": turn.action,
            "is_valid": turn.is_valid,
            "return": values.return_to_go,
            "advantage": values.advantage,
        },
    }


WRITERS: dict[str, Callable[[Iterable[AttributedTrial], ChatFormat, Path, str], None]] = {
    ".jsonl": _write_lines,
    ".parquet": write_parquet,
    ".dataset": write_dataset,
    ".atif": _write_trajectories,
}
"""The format by ending: one line of JSON per trial; one row per trial with all its tokens; the same
rows in a folder for HuggingFace's `datasets`; trajectories in a folder like a job of Harbor's.
Parquet and datasets need the extra `export`."""
