"""Status lines as processes send them to the terminal, and a summary as a run leaves one."""

from dataclasses import asdict, replace

from mage_async.results.progress import Progress
from mage_services.terminal.run_state import RunState

NAN = float("nan")


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def started(name):
    return "supervisor", {"event": "started", "text": name}


def warm_start(step, gate=NAN):
    return "learner", {"event": "warm_start", "step": step, "steps": 150, "loss": 1.5, "gate": gate}


POLICY = ("learner", {"event": "policy", "origin": "warm-started here", "prepared_s": 14.7})


def step(number, blocked_s=None, faults=(), returns=(0.0, 0.4, 0.5)):
    metrics = {
        "step": number,
        "time_s": 0.5 * number,
        "return_by_episode": list(returns),
        "trials_per_s": 288.0,
        "generated_tokens_per_s": 3456.0,
        "trained_tokens_per_s": 29376.0,
        "staleness_mean": 0.6,
        "staleness_max": 1.0,
        "prefix_hit_rate": 0.86,
        "entropy": 0.7,
        "invalid_actions_per_trial": 0.1,
        "valid_action_share": 0.992,
    }
    return "learner", {"event": "step", "metrics": metrics, **seen(blocked_s or {}, faults)}


def seen(blocked_s, faults=()):
    trials = {"granted": 432, "trained": 144, "dropped": 0, "in_flight": 288}
    trials |= {"acknowledged": 160, "duplicate": 0}
    return {"trials": trials, "blocked_s": blocked_s, "faults": list(faults)}


def in_view(arrived, faults=(), **changes):
    """The learner's figures twice a second, as it waits for the batch of the first step."""
    progress = Progress(
        step=1,
        steps=60,
        doing="batch not full",
        doing_s=1.5 * arrived,
        num_actors=1,
        num_loading=0,
        groups_in_flight=8,
        trials_arrived=arrived,
        trials_needed=128,
        turns=10 * arrived,
        tokens=100 * arrived,
        turns_per_s=6.7,
        tokens_per_s=66.7,
        mean_return=-0.5,
        valid_share=0.75,
        dropped={},
        due_s=190.0 - 1.5 * arrived,
        is_due_bound=False,
    )
    progress = asdict(replace(progress, **changes))
    return "learner", {"event": "view", **seen({}, faults), "progress": progress}


def curve(version, *heldout):
    sets = {"train": [0.0, 0.1, 0.2], "heldout": list(heldout)}
    return "evaluator", {"event": "curve", "version": version, "sets": sets}


def summary(**changes):
    score = {
        "return_by_episode": [-0.013, 0.653, 0.746],
        "ci95_by_episode": [0.031, 0.032, 0.033],
        "num_trials": 1024,
        "probes_by_episode": [0.0, 0.0, 0.0],
    }
    names = ("train", "heldout", "heldout_blind", "heldout_swapped")
    return {
        "seed": 0,
        "steps": 60,
        "complete": True,
        "wall_s": 96.3,
        "processor_s": 140.2,
        "warm_start_s": 14.7,
        "environment": {"name": "rps", "units": 4},
        "evaluation": dict.fromkeys(names, score),
        "references": {"heldout": {"random": [0.0] * 3, "best_response": [0.95] * 3}},
        "throughput": {"trials_per_s": 288.0, "generated_tokens_per_s": 3456.0},
        "staleness": {"mean": 0.59, "max": 1.0},
        "prefix_cache": {"hit_rate": 0.86, "reuse_rate": 1.0},
        "trials": {"granted": 432, "trained": 144, "dropped": 0, "in_flight": 288},
    } | changes


def state_after(config, events, *, every_s=0.5):
    state, now = RunState(config, 100.0), 100.0
    for process, event in events:
        now += every_s
        state.take(process, event, now)
    return state, now


FULL_RUN = [
    *map(started, ("learner", "actor-0", "actor-1", "actor-2", "actor-3", "evaluator")),
    warm_start(10),
    warm_start(150, gate=0.7),
    POLICY,
    ("actor-0", {"event": "ready", "describe": "96k parameters"}),
    *(step(n, {"learner": {"training": 0.4 * n, "batch not full": 0.1 * n}}) for n in range(1, 31)),
    curve(10, -0.01, 0.31, 0.42),
    ("actor-1", {"event": "beat"}),
    ("supervisor", {"event": "restarting", "text": "actor-2 was killed by SIGKILL; see its log"}),
]
