"""Every metric: its name, its unit, and one sentence. No other file explains a metric."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from mage_async.admission.counts import LedgerCounts
from mage_async.environments.environment import Environment
from mage_async.environments.mix.parts import label_of, part_of
from mage_async.policy_version import PROVENANCES, tokens_by_provenance
from mage_async.tasks.population import is_policy
from mage_async.trajectory import Group, Kind, Trial

IN = "_in_"
INJECTIONS = {side: f"injections_by_{side}" for side in ("environment", "opponent")}
"""Names of metrics, by the side that wrote the text of a special token."""
METRICS: dict[str, tuple[str, str]] = {
    "step": ("steps", "Policy version after this step."),
    "time_s": ("s", "Since the learner began to train."),
    "return_by_episode": (
        "reward/unit",
        "Mean return of each episode over the trials of the batch; one that a curriculum has not "
        "reached repeats the last.",
    ),
    "invalid_actions_per_trial": ("1", "Actions that were refused or could not be parsed."),
    "valid_action_share": ("share", "Actions that were neither, of all actions."),
    "truncated_action_share": (
        "share",
        "Actions that are invalid and used up `transcript.max_action_tokens`; 0 where the "
        "transcript closes their tags itself.",
    ),
    "injections_by_environment": (
        "observations",
        "Observations that held the text of a special token of the chat; the agent was told it as "
        "plain text. Left out where there was none.",
    ),
    "injections_by_opponent": (
        "observations",
        "The same, where a version of the policy was the opponent.",
    ),
    "trials_per_s": ("1/s", "Trials trained per second since the last step."),
    "generated_tokens_per_s": ("tokens/s", "Sampled tokens trained a second since the last step."),
    "trained_tokens_per_s": ("tokens/s", "Context and sampled tokens trained per second."),
    "prefix_hit_rate": ("share", "Prompt tokens that the engine did not compute in that turn."),
    "prefix_reuse_rate": (
        "share",
        "Of the prompt tokens computed before, those not computed again.",
    ),
    "reused_prompt_tokens": ("tokens", "Mean of a trial's prompt tokens that were not computed."),
    "exact_version_share": ("share", "Sampled tokens whose version is known exactly."),
    "segment_version_share": (
        "share",
        "Sampled tokens whose version is known by where they were when new weights came.",
    ),
    "reply_version_share": (
        "share",
        "Sampled tokens whose version is taken to be that of the reply's end.",
    ),
    "extension_faults": ("turns", "Prompts that did not extend their context; should be 0."),
    "trial_s": ("s", "Mean time from a trial's first prompt to its end."),
    "staleness_mean": ("steps", "Version being trained minus version that drew the token."),
    "staleness_max": ("steps", "The largest staleness of a token of the batch."),
    "over_bound_share": ("share", "Tokens staler than `admission.max_staleness` plus `lag`."),
    "exact_staleness_mean": ("steps", "Of tokens whose version the engine named for each."),
    "segment_staleness_mean": ("steps", "Of tokens cut into versions where new weights came."),
    "reply_staleness_mean": ("steps", "Of tokens with the version at the reply: an estimate."),
    "token_share": ("share", "Tokens of this age, of all sampled ones or of the episode's."),
    "k3_mean": ("nats", "Mean r - log r - 1, with r the proximal over the behaviour probability."),
    "effective_share": ("share", "Effective sample size of those r, over the number of tokens."),
    "loss": ("1", "Mean surrogate per sampled token, those masked among them."),
    "entropy": ("nats", "Mean entropy of the policy at sampled tokens."),
    "clipped_share": ("share", "Tokens whose ratio the clip bound."),
    "masked_share": ("share", "Tokens that the correction left out."),
    "expert_agreement": (
        "share",
        "Actions equal to those of the expert, of all at which one was asked and knew.",
    ),
    "expert_loss": ("1", "Mean preference loss of the pairs of an expert's and a policy's action."),
    "expert_preferred_share": (
        "share",
        "Pairs in which the expert's action has gained on the policy's since training began.",
    ),
    "reference_k3": (
        "nats",
        "Divergence from the policy that training began with, estimated (k3) per token; 0 where "
        "`learner.kl` is.",
    ),
    "mean_weight": ("1", "Mean importance weight, after truncation; 0 where masked."),
    "actor_loss": ("reward", "Mean `sum pi (alpha log pi - Q)` over valid actions (`sac`)."),
    "critic_loss": ("reward²", "Mean half squared error of both Q heads (`sac`)."),
    "invalid_nats": ("nats", "Mean -log of how probable the valid actions are together (`sac`)."),
    "soft_value": ("reward", "Mean soft value of drawn states, by the target heads (`sac`)."),
    "replay_trials": ("trials", "In the replay buffer (`sac`)."),
    "replay_age_mean": ("steps", "Version being trained minus version of a drawn trial (`sac`)."),
    "replay_age_max": ("steps", "The largest such age of the step (`sac`)."),
    "grad_norm": ("1", "Mean norm of the gradient before clipping."),
    "learning_rate": ("1", "Of the optimizer."),
    "logprob_gap_mean": ("nats", "Mean |proximal - behaviour| log-prob."),
    "logprob_mismatch_mean": ("nats", "Mean |learner - engine| log-prob at equal version."),
    "logprob_mismatch_max": ("nats", "Largest |learner - engine| log-prob at equal version."),
    "equal_version_tokens": (
        "tokens",
        "Tokens whose weights and cached keys were the trained ones.",
    ),
    "train_s": ("s", "Of this step, computing."),
    "waiting_s": ("s", "Of this step, waiting for the batch."),
    "groups_in_flight": ("groups", "Groups that hold a slot."),
    "zero_advantage_share": (
        "share",
        "Sampled tokens with advantage 0: they teach nothing. All of a group are where its trials "
        "earned the same.",
    ),
    "actors_idle_share": (
        "share",
        "Time that actors had nothing to play, since they were last heard. Left out where none was "
        "heard since.",
    ),
    "receipts": ("loads", "Loads since the last step that were shown to be what was published."),
    "receipt_retries": ("loads", "Of these, weights that were read again, being others at first."),
    "receipt_difference": (
        "nats",
        "Largest mean gap of log-probs to the learner's, where they were scored.",
    ),
    "disk_free_bytes": ("bytes", "Free on the disk of the run's directory."),
    "dropped_by_member": (
        "groups",
        "Groups given up since the last step, by what is hidden in them. Left out where there were "
        "none.",
    ),
    "over_bound_by_actor": (
        "share",
        "Of `over_bound_share`, what each actor played. Left out where it is 0.",
    ),
}
"""A metric that ends in `_episode_N` is about episode N. One that ends in `_age_N` is about tokens
that are N steps old, or N and more for the largest N (`admission/staleness.py`, `OLDEST_AGE`). Both
have the unit of their stem. So has one that ends in `_in_NAME`, which is about one environment of
a mix.
"""


def batch_metrics(
    groups: Sequence[Group], environment: Environment, elapsed_s: float, num_episodes: int
) -> dict[str, object]:
    """What a batch says of itself, trained `elapsed_s` after the one before.

    Args:
        num_episodes: of a trial; what a curriculum has not reached repeats the last episode played.
    """
    trials = [trial for group in groups for trial in group.trials]
    return {
        **_returns(trials, environment, num_episodes),
        "invalid_actions_per_trial": _mean([trial.num_invalid() for trial in trials]),
        "valid_action_share": _valid_share(trials),
        **_injections(trials),
        "trials_per_s": len(trials) / elapsed_s,
        "generated_tokens_per_s": sum(trial.num_sampled() for trial in trials) / elapsed_s,
        "trained_tokens_per_s": sum(trial.num_tokens() for trial in trials) / elapsed_s,
        "trial_s": _mean([trial.duration_s for trial in trials]),
        "extension_faults": sum(trial.num_extension_faults for trial in trials),
        **prefix_rates(trials),
        **_reuse_by_episode(trials),
        **_provenance_shares(trials),
    }


def _returns(
    trials: Sequence[Trial], environment: Environment, num_episodes: int
) -> dict[str, list[float]]:
    """Mean returns by episode of all trials and, where several are mixed, of each environment."""
    alike: dict[str, list[list[float]]] = {}
    for trial in trials:
        row, units = trial.episode_rewards(), part_of(environment, trial.task.member).facts.units
        row = [reward / units for reward in row + row[-1:] * (num_episodes - len(row))]
        alike.setdefault(label_of(environment, trial.task.member) or "", []).append(row)
    every = [row for rows in alike.values() for row in rows]
    means = {f"return_by_episode{IN}{label}": alike[label] for label in sorted(alike) if label}
    return {name: _columns(rows) for name, rows in ({"return_by_episode": every} | means).items()}


def _columns(rows: Sequence[Sequence[float]]) -> list[float]:
    return [sum(column) / len(column) for column in zip(*rows, strict=True)]


def returns_by_environment(record: Mapping[str, Any]) -> dict[str, list[float]]:
    """The returns of a step's line by environment; empty where nothing is mixed."""
    stem = f"return_by_episode{IN}"
    return {
        name.removeprefix(stem): value for name, value in record.items() if name.startswith(stem)
    }


def _injections(trials: Sequence[Trial]) -> dict[str, int]:
    """Observations with special tokens in their text, by the side that wrote them, above 0."""
    counts: Counter[str] = Counter()
    for trial in trials:
        side = "opponent" if is_policy(trial.task.member) else "environment"
        counts[INJECTIONS[side]] += trial.num_injections
    return dict(+counts)


def injections_by_source(
    records: Collection[Mapping[str, Any]], environment: str
) -> dict[str, int]:
    """Those of all steps, by the environment's name and the side; only what is above 0."""
    sources = {"environment": environment, "opponent": f"{environment}, opponent"}
    counts = {
        source: sum(record.get(INJECTIONS[side], 0) for record in records)
        for side, source in sources.items()
    }
    return {source: count for source, count in counts.items() if count}


def _valid_share(trials: Sequence[Trial]) -> float:
    num_actions = sum(turn.kind is Kind.ACT for trial in trials for turn in trial.turns)
    return 1.0 - sum(trial.num_invalid() for trial in trials) / max(1, num_actions)


def prefix_rates(trials: Sequence[Trial]) -> dict[str, float]:
    """Shares of prompt tokens that the engine took from its prefix cache.

    `prefix_hit_rate` is reused / all prompt tokens. Its ceiling is below 1, because each turn
    brings new words: about `2 / (n + 1)` of a history of n turns. `prefix_reuse_rate` leaves those
    out: it is 1 when no token was computed twice.
    """
    prompt = sum(trial.num_prompt_tokens for trial in trials)
    reused = sum(trial.num_reused_tokens for trial in trials)
    repeated = sum(trial.num_repeated_tokens for trial in trials)
    return {
        "prefix_hit_rate": reused / max(1, prompt),
        "prefix_reuse_rate": reused / max(1, reused + repeated),
    }


def _reuse_by_episode(trials: Sequence[Trial]) -> dict[str, float]:
    """What of each episode's prompts the engine had read before, as a share and in tokens.

    An episode that no trial played is left out.
    """
    prompt: dict[int, int] = {}
    reused: dict[int, int] = {}
    for turn in (turn for trial in trials for turn in trial.turns):
        prompt[turn.episode] = prompt.get(turn.episode, 0) + turn.start
        reused[turn.episode] = reused.get(turn.episode, 0) + turn.num_reused
    shares = {
        f"prefix_hit_rate_episode_{episode + 1}": reused[episode] / max(1, prompt[episode])
        for episode in sorted(prompt)
    }
    return shares | {
        f"reused_prompt_tokens_episode_{episode + 1}": reused[episode] / len(trials)
        for episode in sorted(prompt)
    }


def _provenance_shares(trials: Sequence[Trial]) -> dict[str, float]:
    """How the versions of sampled tokens are known."""
    counts = dict.fromkeys(PROVENANCES, 0)
    for segment in (segment for trial in trials for segment in trial.segments):
        for name, count in tokens_by_provenance(segment.versions, segment.is_sampled).items():
            counts[name] += count
    total = max(1, sum(counts.values()))
    return {f"{name}_version_share": count / total for name, count in counts.items()}


def batch_totals(groups: Sequence[Group]) -> dict[str, int]:
    """What a batch adds to the totals of a run."""
    trials = [trial for group in groups for trial in group.trials]
    return {
        "trials": len(trials),
        "generated_tokens": sum(trial.num_sampled() for trial in trials),
        "trained_tokens": sum(trial.num_tokens() for trial in trials),
        "prompt_tokens": sum(trial.num_prompt_tokens for trial in trials),
        "reused_tokens": sum(trial.num_reused_tokens for trial in trials),
        "repeated_tokens": sum(trial.num_repeated_tokens for trial in trials),
        "invalid_actions": sum(trial.num_invalid() for trial in trials),
        "extension_faults": sum(trial.num_extension_faults for trial in trials),
    }


def trial_counts(counts: LedgerCounts) -> dict[str, int]:
    """Trials by fate: granted = trained + dropped + in_flight."""
    trials = counts.trials
    return {
        "granted": trials.granted,
        "acknowledged": counts.acknowledged,
        "trained": trials.trained,
        "dropped": trials.dropped,
        "in_flight": trials.in_flight,
        "duplicate": counts.duplicate,
    }


def check_names(record: Mapping[str, object]) -> None:
    """A record holds nothing that `METRICS` does not explain."""
    for name in record:
        stem = name.split(IN, 1)[0].rsplit("_episode_", 1)[0].rsplit("_age_", 1)[0]
        assert name in METRICS or stem in METRICS, f"metric {name!r} is not in METRICS"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(1, len(values))
