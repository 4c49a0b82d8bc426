"""Name all metrics of a step with their meaning (`METRICS`), and compute those of its trials.
`learning/token_metrics.py` computes those of its tokens.

`bench/lib/reference_pages.py` writes their list as a page.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from mage_async.admission.ledger import LedgerCounts
from mage_async.environments.environment import Environment
from mage_async.environments.mix import component_of, label_of
from mage_async.errors import DeterministicFailure
from mage_async.methods.catalogue import metrics as metrics_of_methods
from mage_async.policy_version import PROVENANCES, oldest, tokens_by_provenance
from mage_async.tasks.league import is_policy
from mage_async.trajectory import Group, Segment, Trial

IN = "_in_"
"""Text between the name of a metric and that of one environment, in a run on a mix of several
environments."""
INJECTIONS = {side: f"injections_by_{side}" for side in ("environment", "opponent")}
"""Names of the metrics that count special tokens in text, by the side that wrote the text."""
METRICS: dict[str, tuple[str, str]] = {
    "step": ("steps", "Policy version after this step."),
    "time_s": ("s", "Time since the learner began to train."),
    "return_by_episode": (
        "reward/unit",
        "Mean return of each episode over the trials of the batch; an episode that a curriculum "
        "has not reached repeats the last one played.",
    ),
    "earning_share": ("share", "Episodes that earned any reward, of all episodes."),
    "invalid_actions_per_trial": ("actions", "Actions that were refused or could not be parsed."),
    "valid_action_share": ("share", "Actions that were parsed and accepted, of all actions."),
    "truncated_action_share": (
        "share",
        "Actions that are invalid and used up `transcript.max_action_tokens`; 0 where the "
        "transcript closes their tags itself.",
    ),
    "cut_episodes": (
        "episodes",
        "Episodes that ended early because they had used their share of the engine's context.",
    ),
    "contexts_per_trial": (
        "contexts",
        "Contexts of a trial: more than one where notes or the newest turns replace a full one, "
        "where only reflections are kept, and where a program holds several conversations.",
    ),
    "retried_trials": (
        "trials",
        "Trials that were played again because their environment had failed.",
    ),
    "injections_by_environment": (
        "observations",
        "Observations that held the text of a special token of the chat, which the prompt holds as "
        "plain text. Left out if there was none.",
    ),
    "injections_by_opponent": (
        "observations",
        "The same for observations from an opponent that is a version of the policy.",
    ),
    "trials_per_s": ("1/s", "Trials trained per second since the last step."),
    "generated_tokens_per_s": (
        "tokens/s",
        "Sampled tokens trained per second since the last step.",
    ),
    "trained_tokens_per_s": ("tokens/s", "Context and sampled tokens trained per second."),
    "prefix_hit_rate": ("share", "Prompt tokens that the engine took from its prefix cache."),
    "prefix_reuse_rate": (
        "share",
        "Prompt tokens taken from the prefix cache, of those that were computed before.",
    ),
    "reused_prompt_tokens": (
        "tokens",
        "Prompt tokens of a trial that came from the prefix cache, mean over trials.",
    ),
    "exact_version_share": ("share", "Sampled tokens whose version is known exactly."),
    "segment_version_share": (
        "share",
        "Sampled tokens whose version is inferred from how many had arrived at a load of weights.",
    ),
    "reply_version_share": (
        "share",
        "Sampled tokens whose version is taken to be the version at the end of the reply.",
    ),
    "extension_faults": ("turns", "Prompts that did not extend their context; should be 0."),
    "trial_s": ("s", "Mean time from a trial's first prompt to its end."),
    "staleness_mean": ("steps", "Version being trained minus version that sampled the token."),
    "staleness_max": ("steps", "The largest staleness of a token of the batch."),
    "over_bound_share": ("share", "Tokens staler than the bound of `admission.rule` plus `lag`."),
    "exact_staleness_mean": ("steps", "Staleness of tokens whose version is known exactly."),
    "segment_staleness_mean": (
        "steps",
        "Staleness of tokens whose version is inferred from how many had arrived at a load.",
    ),
    "reply_staleness_mean": (
        "steps",
        "Staleness of tokens that have the version at the end of the reply: an estimate.",
    ),
    "token_share": (
        "share",
        "Share of the sampled tokens, or of an episode's, that have the age in the metric's name.",
    ),
    "k3_mean": ("nats", "Mean r - log r - 1, with r the proximal over the behaviour probability."),
    "effective_share": (
        "share",
        "Effective sample size of the ratios of `k3_mean`, divided by the number of tokens.",
    ),
    "loss": ("1", "Mean surrogate loss per sampled token, including masked tokens."),
    "entropy": ("nats", "Mean entropy of the policy at sampled tokens."),
    "clipped_share": ("share", "Tokens whose importance ratio was clipped."),
    "masked_share": ("share", "Tokens that the correction left out."),
    "reference_k3": (
        "nats",
        "KL divergence from the reference policy, by the k3 estimate of a token; 0 if "
        "`learner.kl` is 0.",
    ),
    "mean_weight": ("1", "Mean importance weight after truncation; a masked token counts 0."),
    "grad_norm": ("1", "Mean norm of the gradient before clipping."),
    "skipped_updates": (
        "updates",
        "Optimizer updates of the step that were left out: their gradient was not finite.",
    ),
    "learning_rate": ("1", "Learning rate of the optimizer."),
    "logprob_gap_mean": ("nats", "Mean |proximal - behaviour| log-prob."),
    "logprob_mismatch_mean": ("nats", "Mean |learner - engine| log-prob at equal version."),
    "logprob_mismatch_max": ("nats", "Largest |learner - engine| log-prob at equal version."),
    "equal_version_tokens": (
        "tokens",
        "Tokens sampled by the version being trained, from keys and values of the same version.",
    ),
    "train_s": ("s", "Time that the learner computed in this step."),
    "waiting_s": ("s", "Time that the learner waited for the batch of this step."),
    "groups_in_flight": ("groups", "Groups that were granted and are not yet trained or dropped."),
    "zero_advantage_share": (
        "share",
        "Sampled tokens with advantage 0, on which the policy loss has no gradient. All tokens of "
        "a group have it if its trials earned the same.",
    ),
    "actors_idle_share": (
        "share",
        "Share of the actors' time without anything to play since their last report. Left out if "
        "no actor has reported since.",
    ),
    "receipts": (
        "loads",
        "Weight loads since the last step whose fingerprint matched the published weights.",
    ),
    "receipt_retries": (
        "loads",
        "Loads of `receipts` that matched only after the weights had been read again.",
    ),
    "receipt_difference": (
        "nats",
        "Largest mean difference between an engine's log-probs of the probe tokens and the "
        "learner's, over loads of versions that were published with such log-probs.",
    ),
    "disk_free_bytes": ("bytes", "Free space on the disk of the run's directory."),
    "dropped_by_member": (
        "groups",
        "Groups dropped since the last step, by hidden member. Left out if there were none.",
    ),
    "trained_groups": (
        "groups",
        "Groups of the batch, as rows of the hidden member's family, the member, turns of all "
        "trials, and number of groups.",
    ),
    "dropped_groups": (
        "groups",
        "Groups dropped since the last step, as rows of the hidden member's family, the member, "
        "turns so far, cause, and number of groups. Left out if there were none.",
    ),
    "over_bound_by_actor": (
        "share",
        "The part of `over_bound_share` that each actor played. Left out where it is 0.",
    ),
}
"""Unit and meaning of each metric. A member is the hidden part of a task, such as an opponent.

A suffix narrows a metric down and keeps its unit: `_episode_N` to episode N, `_age_N` to tokens
that are N steps old (or older, for N = `OLDEST_AGE`), `_in_NAME` to one environment of a mix.
"""


def batch_metrics(
    groups: Sequence[Group], environment: Environment, elapsed_s: float, num_episodes: int
) -> dict[str, object]:
    """Return the metrics that follow from the trials of a batch.

    Args:
        elapsed_s: Seconds since the previous batch was trained.
        num_episodes: Number of episodes of a whole trial; a curriculum may play fewer.
    """
    trials = [trial for group in groups for trial in group.trials]
    num_trials, totals = max(1, len(trials)), batch_totals(groups)
    num_actions = sum(trial.num_actions() for trial in trials)
    return {
        **_returns(trials, environment, num_episodes),
        "earning_share": earning_share(trials),
        "invalid_actions_per_trial": totals["invalid_actions"] / num_trials,
        "valid_action_share": 1.0 - totals["invalid_actions"] / max(1, num_actions),
        **_injections(trials),
        "cut_episodes": sum(trial.num_cut_episodes for trial in trials),
        "contexts_per_trial": sum(len(trial.segments) for trial in trials) / num_trials,
        "retried_trials": sum(trial.num_retries > 0 for trial in trials),
        "trials_per_s": len(trials) / elapsed_s,
        "generated_tokens_per_s": totals["generated_tokens"] / elapsed_s,
        "trained_tokens_per_s": totals["trained_tokens"] / elapsed_s,
        "trial_s": sum(trial.duration_s for trial in trials) / num_trials,
        "extension_faults": totals["extension_faults"],
        **prefix_rates(totals),
        **_reuse_by_episode(trials),
        **_provenance_shares(trials),
    }


def earning_episodes(trials: Sequence[Trial]) -> list[bool]:
    """Return for each episode of some trials whether it earned any reward."""
    return [reward != 0 for trial in trials for reward in trial.episode_rewards()]


def earning_share(trials: Sequence[Trial]) -> float:
    """Return the share of episodes that earned any reward."""
    earned = earning_episodes(trials)
    return sum(earned) / max(1, len(earned))


def batch_totals(groups: Sequence[Group]) -> dict[str, int]:
    """Return the counts that a batch adds to the totals of a run."""
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


def prefix_rates(totals: Mapping[str, int]) -> dict[str, float]:
    """Return the shares of prompt tokens that the engine took from its prefix cache.

    `prefix_hit_rate` is reused / all prompt tokens. It stays below 1, because each turn brings new
    tokens: in a trial of n equally long turns, 2 / (n + 1) of all prompt tokens are new.
    `prefix_reuse_rate` leaves new tokens out: it is 1 if no token was computed twice.

    Args:
        totals: Counts of `batch_totals`, of one batch or of a run.
    """
    reused = totals["reused_tokens"]
    return {
        "prefix_hit_rate": reused / max(1, totals["prompt_tokens"]),
        "prefix_reuse_rate": reused / max(1, reused + totals["repeated_tokens"]),
    }


def _returns(
    trials: Sequence[Trial], environment: Environment, num_episodes: int
) -> dict[str, list[float]]:
    """Return the mean returns by episode: of all trials and, in a mix, of each environment."""
    rows: dict[str, list[list[float]]] = {"return_by_episode": []}
    for trial in trials:
        rewards, member = trial.episode_rewards(), trial.task.member
        units = component_of(environment, member).facts.units
        # Episodes that a curriculum has not reached repeat the last one played.
        rewards = rewards + rewards[-1:] * (num_episodes - len(rewards))
        row = [reward / units for reward in rewards]
        rows["return_by_episode"].append(row)
        if label := label_of(environment, member):
            rows.setdefault(f"return_by_episode{IN}{label}", []).append(row)
    return {
        name: [sum(column) / len(column) for column in zip(*returns, strict=True)]
        for name, returns in sorted(rows.items())
    }


def returns_by_environment(record: Mapping[str, Any]) -> dict[str, list[float]]:
    """Return `return_by_episode` of a step by environment of a mix; empty without a mix."""
    stem = f"return_by_episode{IN}"
    return {
        name.removeprefix(stem): value for name, value in record.items() if name.startswith(stem)
    }


def _injections(trials: Sequence[Trial]) -> dict[str, int]:
    """Count observations with special tokens in their text, by the side that wrote them."""
    counts: Counter[str] = Counter()
    for trial in trials:
        side = "opponent" if is_policy(trial.task.member) else "environment"
        counts[INJECTIONS[side]] += trial.num_injections
    return dict(+counts)  # `+` leaves out counts of 0


def injections_by_source(
    records: Collection[Mapping[str, Any]], environment: str
) -> dict[str, int]:
    """Sum the counts of injections over steps, by name of the source; a source without any is left
    out.
    """
    sources = {"environment": environment, "opponent": f"{environment}, opponent"}
    counts = {
        source: sum(record.get(INJECTIONS[side], 0) for record in records)
        for side, source in sources.items()
    }
    return {source: count for source, count in counts.items() if count}


def _reuse_by_episode(trials: Sequence[Trial]) -> dict[str, float]:
    """Return the reused prompt tokens of each episode, as a share and as a mean over trials.

    Episodes that no trial played are left out.
    """
    prompt, reused = Counter[int](), Counter[int]()
    for turn in (turn for trial in trials for turn in trial.turns):
        # All tokens of the context before the completion are the prompt of its turn.
        prompt[turn.episode + 1] += turn.start
        reused[turn.episode + 1] += turn.num_reused
    shares = {
        f"prefix_hit_rate_episode_{episode}": reused[episode] / max(1, prompt[episode])
        for episode in sorted(prompt)
    }
    return shares | {
        f"reused_prompt_tokens_episode_{episode}": reused[episode] / len(trials)
        for episode in sorted(prompt)
    }


def _provenance_shares(trials: Sequence[Trial]) -> dict[str, float]:
    """Return the shares of sampled tokens by the way in which their version is known."""
    counts = Counter(dict.fromkeys(PROVENANCES, 0))
    for segment in (segment for trial in trials for segment in trial.segments):
        counts.update(tokens_by_provenance(segment.versions, segment.is_sampled))
    total = max(1, counts.total())
    return {f"{name}_version_share": count / total for name, count in counts.items()}


def trial_counts(counts: LedgerCounts) -> dict[str, int]:
    """Return the counts of trials; granted = trained + dropped + in_flight."""
    trials = counts.trials
    return {
        "granted": trials.granted,
        "acknowledged": counts.acknowledged,
        "trained": trials.trained,
        "dropped": trials.dropped,
        "in_flight": trials.in_flight,
        "duplicate": counts.duplicate,
    }


def check_names(record: Mapping[str, object], own: Collection[str] = ()) -> None:
    """Check that each metric of a record is explained, in `METRICS` or by a method.

    Args:
        own: Names of metrics that a user's own methods compute.

    Raises:
        DeterministicFailure: a metric is explained nowhere, for example because a method of a
            user's own computes it and does not declare it.
    """
    for name in record:
        # Remove the suffixes: "staleness_mean_episode_1_in_rps" is explained as "staleness_mean".
        stem = name.split(IN, 1)[0].rsplit("_episode_", 1)[0].rsplit("_age_", 1)[0]
        if not {name, stem} & (METRICS.keys() | metrics_of_methods().keys() | set(own)):
            raise DeterministicFailure(
                f"metric {name!r} has no unit and no meaning: declare both in `metrics` of the "
                "method that computes it"
            )


def explanation_of(name: str) -> tuple[str, str]:
    """Return the unit and the meaning of a metric; both empty for one of a user's own method."""
    return METRICS.get(name) or metrics_of_methods().get(name, ("", ""))


# The functions below compute metrics that warn of a fault outside of learning; the doctor reads
# them. Counts by member or by actor are left out of a step if they are empty.

WAITING = ("no grant", "no fresh weights")
"""States in which an actor has nothing to play."""
Seconds = Mapping[str, Mapping[str, float]]
"""Seconds by state of each process."""


def truncated_share(groups: Sequence[Group], most_tokens: int | None) -> float:
    """Return the share of actions that used up their tokens and are invalid.

    Args:
        most_tokens: Largest number of tokens of an action; None if the transcript closes the tags
            of an action itself, so that no action is cut off and the share is 0.
    """
    if most_tokens is None:
        return 0.0
    trials = [trial for group in groups for trial in group.trials]
    cut = sum(turn.is_cut_at(most_tokens) for trial in trials for turn in trial.turns)
    return cut / max(1, sum(trial.num_actions() for trial in trials))


def over_bound_by_actor(
    groups: Sequence[Group], actors: Mapping[int, str], *, version: int, bound: int
) -> dict[str, float]:
    """Return the sampled tokens staler than `bound`, as a share of all, by actor.

    Args:
        actors: Actor that finished each group, by grant; groups of unknown actors are left out.
        version: Policy version that is being trained.
        bound: Largest staleness that is allowed, in steps.
    """
    found: Counter[str] = Counter()
    for group in groups:
        if group.grant in actors:
            found[actors[group.grant]] += sum(
                _tokens_before(segment, version - bound)
                for trial in group.trials
                for segment in trial.segments
            )
    total = sum(trial.num_sampled() for group in groups for trial in group.trials)
    return {actor: count / max(1, total) for actor, count in sorted(found.items()) if count}


def idle_share(before: Seconds, now: Seconds) -> float | None:
    """Return the share of time that actors waited for a grant or for weights.

    Args:
        before: Seconds of each actor by state, at the last step.
        now: Seconds of each actor by state, at this step.

    Returns:
        The share of the time in between; `None` if no actor has reported any.
    """
    spent: Counter[str] = Counter()
    for name, states in now.items():
        earlier = before.get(name, {})
        passed = {state: seconds - earlier.get(state, 0.0) for state, seconds in states.items()}
        if min(passed.values(), default=0.0) >= 0.0:  # a negative time: the actor was restarted
            spent.update(passed)
    total = sum(spent.values())
    return sum(spent[state] for state in WAITING) / total if total > 0 else None


def _tokens_before(segment: Segment, version: int) -> int:
    """Count the sampled tokens that versions below `version` sampled."""
    runs = segment.versions
    if not runs or oldest(runs) >= version:
        return 0
    stops = [*(run.start for run in runs[1:]), len(segment.tokens)]
    return sum(
        int(segment.is_sampled[run.start : stop].sum())
        for run, stop in zip(runs, stops, strict=True)
        if run.policy < version
    )
