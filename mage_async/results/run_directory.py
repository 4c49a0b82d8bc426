"""Name the files of a run, and find the runs below a folder. No other module spells the names;
`run_files.py` reads the files.
"""

import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from hashlib import blake2s
from pathlib import Path

from mage_async.errors import RunError
from mage_async.user_modules import shown_name

OPTIMIZER, COUNTERS, SHARDS = "optimizer.pt", "counters.json", "optimizer"
"""Names of two files of a checkpoint, and of the folder that several ranks write in place of the
first.
"""
NOT_OF_MODEL = (OPTIMIZER, COUNTERS, SHARDS)
"""Files and folders of a checkpoint that only training reads."""
WARM_START = "warm_start.json"
"""Name of the file in a policy's directory that describes its warm start: the `origin` of the
weights in a few words and, if the warm start may have taught nothing, why (`fault`) and what to do
(`cure`)."""
SHARED_MEMORY = Path("/dev/shm")
"""Folder of files in shared memory."""
MAX_DEPTH = 3
"""Number of levels of folders below the root in which runs are looked for."""


def default_name(environment: str, started: datetime) -> str:
    """Return the name of the folder of a run that is started without `--run-dir`, such as
    `rps-20261127-191200`.

    Args:
        environment: Value of `environment.name`.
    """
    name = re.sub(r"[^\w.-]+", "-", shown_name(environment))
    return f"{name}-{started:%Y%m%d-%H%M%S}"


class _Below:
    """Return the path `root / name` as an attribute of `RunDirectory`; descriptor."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: "RunDirectory", owner: type | None = None) -> Path:
        return run.root / self._name


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """Hold the paths of the files of one run."""

    root: Path

    config = _Below("config.toml")
    """The resolved configuration."""
    launch = _Below("launch.json")
    """Number of actors of the last start, which `--resume` starts again; the versions of Python, of
    this program and of libraries at that start; and the keys that `--resume` changed, each with the
    step after which it was changed.
    """
    lock = _Below(".lock")
    """Lock of the process that supervises the run; see `mage_services/processes/run_lock.py`."""
    policy = _Below("policy")
    """Model directory of the initial policy; its tokenizer serves every later version."""
    warm_start = _Below(f"policy/{WARM_START}")
    """Description of the warm start; missing if nothing was cloned."""
    weights = _Below("weights")
    """Weights published on disk, one file a version; versions that nobody needs are removed."""
    checkpoints = _Below("checkpoints")
    """Checkpoints, one HuggingFace folder each."""
    journal = _Below("journal")
    """Append-only segments; see `mage_async/protocol/journal_records.py`."""
    logs = _Below("logs")
    """Output of each process; see `log_of`."""
    metrics = _Below("metrics.jsonl")
    """Metrics, one line of JSON a step; `mage_async/results/metrics.py` explains them."""
    curve = _Below("evaluations.jsonl")
    """Evaluations while training, one line of JSON each."""
    memory = _Below("memory.jsonl")
    """States that methods record, such as the strategies of the graph memory, one line of JSON for
    each method and version.
    """
    evaluation = _Below("evaluation.json")
    """The final evaluation with its controls."""
    samples = _Below("trials.jsonl")
    """A few whole trials to read, one line of JSON each."""
    learner = _Below("learner.json")
    """Counts and totals of the learner, as of its last checkpoint or its end."""
    events = _Below("events.jsonl")
    """Starts, ends, faults and remarks of the run's processes, one line of JSON each."""
    times = _Below("times.json")
    """Seconds of each process by state, and the progress to the next step (`progress.py`);
    rewritten while the run goes on.
    """
    index = _Below("index.sqlite")
    """Place of each trial in the journal; `mage view` builds it, and rebuilds it if it is lost."""
    supervisor = _Below("supervisor.json")
    """Seconds of the supervisor by state, since it was last started."""
    summary = _Below("summary.json")
    """The run in one JSON document; see `mage_async/results/summary.py`."""
    report = _Below("report.html")
    """The run as one page."""
    tracking = _Below("tracking")
    """Files of trackers on this machine, and in `NAME.json` how much each tracker has received."""

    def check(self) -> None:
        """Check that this is the directory of a run.

        Raises:
            RunError: the directory has no configuration.
        """
        if not self.config.is_file():
            raise RunError(
                f"{self.root}: no config.toml, so this is no run directory{self._where_runs_are()}"
            )

    def _where_runs_are(self) -> str:
        """Return a clause for the error about a folder that is no run: the newest run inside it, or
        that there is no such folder; "" if neither holds.
        """
        if not self.root.exists():
            return "; there is no such folder"
        name = self.config.name
        files = [*self.root.glob(f"*/{name}"), *self.root.glob(f"runs/*/{name}")]
        if not files:
            return ""
        newest = max(files, key=lambda file: file.stat().st_mtime).parent
        return f"; a run lies in {newest}"

    def check_policy(self) -> None:
        """Check that this is a run with a policy.

        Raises:
            RunError: the directory has no configuration, or no policy.
        """
        self.check()
        if (self.root / "config.json").is_file():
            raise RunError(
                f"{self.root}: this is a model that `mage push` wrote, and no run: give the run's "
                "own directory; `mage adapt --model` alone plays such a folder"
            )
        if not self.policy.exists():
            raise RunError(f"{self.root}: the run has no policy yet")

    @property
    def has_begun(self) -> bool:
        """Whether there is something to go on with: a policy, or steps."""
        return self.policy.exists() or self.metrics.exists()

    def check_is_new(self, *, is_retried: bool = False) -> None:
        """Check that no run has begun in this directory, which a new run would write over.

        Args:
            is_retried: Whether a start that failed before it made a policy may be replaced.

        Raises:
            RunError: the directory holds a run.
        """
        if self.config.exists() and (self.has_begun or not is_retried):
            raise RunError(
                f"{self.root} holds a run already: add --resume, or choose another --run-dir"
            )

    @property
    def resume_command(self) -> str:
        """Command that goes on with the run after its end."""
        return f"mage train --resume --run-dir {shlex.quote(str(self.root))}"

    @property
    def shared_weights(self) -> Path:
        """Folder of weights published in shared memory; `mage_services/api/start_to_report.py`
        removes it at the end of the run.
        """
        # Runs of the same name in different folders have different digests. A resumed run has the
        # same digest as before.
        name = blake2s(str(self.root.resolve()).encode(), digest_size=6).hexdigest()
        return SHARED_MEMORY / f"mage-{name}"

    def evaluated_in(self, version: int) -> Path:
        """Return the folder with the evaluation of a version: the run's own for its newest
        policy.
        """
        found = checkpoints(self.checkpoints)
        is_newest = not found or version == step_of(found[-1])
        return self.root if is_newest else self.root / f"step_{version}"

    def log_of(self, process: str) -> Path:
        """Return the file with the output of a process."""
        return self.logs / f"{process}.log"


def checkpoint_at(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint of a step."""
    return folder / f"step_{step:06d}"


def step_of(checkpoint: Path) -> int:
    """Return the step of a checkpoint, from its name."""
    return int(checkpoint.name.removeprefix("step_"))


def checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints, oldest first."""
    # A checkpoint that is being written has another name, `.step_N.part`. Checkpoints are sorted by
    # step, because step_1000000 precedes step_999999 by name.
    return sorted(folder.glob("step_*"), key=step_of)


def distinct_name(safe: str, text: str) -> str:
    """Return the name of a folder for `text`.

    Args:
        safe: The part of the text that a folder's name may have. If it is not the whole text, a
            digest of the text follows, so that two texts never share a name.
    """
    digest = blake2s(text.encode(), digest_size=3).hexdigest()
    return safe if safe == text else f"{safe}-{digest}"


def find_runs(root: Path) -> dict[str, RunDirectory]:
    """Return the runs below a folder by a name made of their path; or the folder itself if it is a
    run.

    Raises:
        RunError: there is no such folder, or this user may not read it.
    """
    if not root.is_dir():
        raise RunError(f"{root}: no such folder of runs")
    if not os.access(root, os.R_OK | os.X_OK):
        raise RunError(f"{root} cannot be read: permission denied")
    if RunDirectory(root).config.is_file():
        return {root.resolve().name: RunDirectory(root)}
    return {
        _name(path.relative_to(root)): RunDirectory(path)
        for path in sorted(_runs_below(root, MAX_DEPTH))
    }


def _name(path: Path) -> str:
    """Return a path as one part of an address; different paths have different names."""
    return str(path).replace("%", "%25").replace("~", "%7E").replace("/", "~")


def _runs_below(folder: Path, depth: int) -> Iterator[Path]:
    """Yield the folders of runs, at most `depth` levels below a folder."""
    try:
        paths = [path for path in folder.iterdir() if not path.name.startswith(".")]
    except OSError:  # the folder was deleted since, or this user may not read it
        return
    for path in paths:
        try:
            if not path.is_dir() or not os.access(path, os.R_OK | os.X_OK):
                continue
            is_run = RunDirectory(path).config.is_file()
        except OSError:  # such as an error of a network disk, which hides this folder alone
            continue
        if is_run:
            yield path
        elif depth > 1:
            yield from _runs_below(path, depth - 1)
