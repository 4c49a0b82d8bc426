"""The files of a run on disk. No other file spells these names."""

from dataclasses import dataclass
from hashlib import blake2s
from pathlib import Path


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """Paths of one run."""

    root: Path

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.root / "config.toml"

    @property
    def launch(self) -> Path:
        """How many actors the run was last started with; `--resume` starts as many."""
        return self.root / "launch.json"

    @property
    def lock(self) -> Path:
        """Held by the process that runs it; see `mage_services/processes/run_lock.py`."""
        return self.root / ".lock"

    @property
    def policy(self) -> Path:
        """The model directory the run began from; its tokenizer serves every later version."""
        return self.root / "policy"

    @property
    def weights(self) -> Path:
        """Weights published on disk, a file a version; versions without a lease are removed."""
        return self.root / "weights"

    @property
    def shared_weights(self) -> Path:
        """The same in shared memory; the supervisor removes it at the run's end."""
        name = blake2s(str(self.root.resolve()).encode(), digest_size=6).hexdigest()
        return Path("/dev/shm") / f"mage-{name}"

    @property
    def checkpoints(self) -> Path:
        """A HuggingFace folder a checkpoint."""
        return self.root / "checkpoints"

    @property
    def journal(self) -> Path:
        """Append-only segments: see `mage_async/protocol/journal_records.py`."""
        return self.root / "journal"

    @property
    def logs(self) -> Path:
        """What each process printed."""
        return self.root / "logs"

    @property
    def metrics(self) -> Path:
        """One line of JSON a step."""
        return self.root / "metrics.jsonl"

    @property
    def curve(self) -> Path:
        """One line of JSON an evaluation while training."""
        return self.root / "evaluations.jsonl"

    @property
    def memory(self) -> Path:
        """The strategies of the graph memory, one line of JSON a version."""
        return self.root / "memory.jsonl"

    @property
    def evaluation(self) -> Path:
        """The final evaluation with its controls."""
        return self.root / "evaluation.json"

    @property
    def samples(self) -> Path:
        """A few whole trials to read, a line of JSON each."""
        return self.root / "trials.jsonl"

    @property
    def learner(self) -> Path:
        """What the learner knew at its end: counts and totals."""
        return self.root / "learner.json"

    @property
    def events(self) -> Path:
        """Births, ends, faults and remarks of the run's processes, a line of JSON each."""
        return self.root / "events.jsonl"

    @property
    def times(self) -> Path:
        """Where the time of each process went until now; written anew while a run goes on."""
        return self.root / "times.json"

    @property
    def index(self) -> Path:
        """Where each trial lies in the journal; `mage view` makes it, and makes it anew."""
        return self.root / "index.sqlite"

    @property
    def supervisor(self) -> Path:
        """Where the supervisor's time went, in its last life."""
        return self.root / "supervisor.json"

    @property
    def summary(self) -> Path:
        """The run in one JSON document."""
        return self.root / "summary.json"

    @property
    def report(self) -> Path:
        """The run as one page."""
        return self.root / "report.html"

    @property
    def tracking(self) -> Path:
        """What trackers write on this machine, and how much each was told: `NAME.json`."""
        return self.root / "tracking"

    def log_of(self, process: str) -> Path:
        """Where a process prints."""
        return self.logs / f"{process}.log"
