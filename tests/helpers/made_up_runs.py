"""A run directory made up by code: the right files and formats, with known numbers."""

import json
import math
import random
from dataclasses import asdict

from mage_async.assembly import environment_of, trial_config_of
from mage_async.config import config_file
from mage_async.inference.chat_files import load_chat
from mage_async.policy.tiny_tokenizer import build_tokenizer, save_tokenizer
from mage_async.trajectory import trial_as_dict
from mage_async.trials.scripted_play import random_task, scripted_trial

LEARNED = {
    "train": (0.04, 0.68, 0.79),
    "heldout": (-0.02, 0.66, 0.75),
    "heldout_blind": (-0.01, 0.02, 0.03),
    "heldout_swapped": (-0.02, 0.65, -0.04),
}
STEP_S = 0.5


def make_run(run, *, steps=60, finished=True, seed=0, settings=()):
    """Fill `run` with what `steps` steps of the quickstart leave behind, and return its config."""
    run.root.mkdir(parents=True, exist_ok=True)
    assignments = [f"learner.steps={steps}", f"seed={seed}", *settings]
    config = config_file.load(config_file.find(None), assignments)
    source, environment = random.Random(seed), environment_of(config)
    run.config.write_text(config_file.dump(config))
    _write_lines(run.metrics, [_metrics(step, source, config) for step in range(1, steps + 1)])
    _write_lines(run.curve, [_point(v, source, environment) for v in range(0, steps, 10)])
    _write_lines(run.samples, _samples(run, config, environment, source, finished))
    if finished:
        run.learner.write_text(json.dumps(_learner(steps)))
        run.evaluation.write_text(json.dumps(_evaluation(steps, source, environment)))
        booked = {"process starting": 4.0, "processes": 40.0, "view": 1.0, "ending": 0.5}
        run.supervisor.write_text(json.dumps({"blocked_s": booked}))
    return config


def _write_lines(file, records):
    file.write_text("".join(json.dumps(record) + "\n" for record in records))


def _skill(step):
    return 1 / (1 + math.exp(-(step - 20) / 5))


def _returns(name, skill, source, noise):
    start = (0.0,) * 3
    pairs = zip(start, LEARNED[name], strict=True)
    return [a + (b - a) * skill + source.gauss(0, noise) for a, b in pairs]


def _metrics(step, source, config):
    skill = _skill(step)
    stale = min(step - 1, config.admission.max_staleness)
    known = {"logprob_mismatch_mean": 3e-8, "logprob_mismatch_max": 9e-7} if step == 1 else {}
    return {
        "step": step,
        "time_s": step * STEP_S,
        "return_by_episode": _returns("train", skill, source, 0.03),
        "invalid_actions_per_trial": 0.5 * (1 - skill) + 0.05,
        "trials_per_s": 144 / STEP_S,
        "generated_tokens_per_s": 144 * 12 / STEP_S,
        "trained_tokens_per_s": 144 * 102 / STEP_S,
        "trial_s": 0.4 + source.random() / 10,
        "extension_faults": 0,
        "prefix_hit_rate": 0.86,
        "prefix_reuse_rate": 1.0,
        "staleness_mean": 0.6 * stale,
        "staleness_max": float(stale),
        **{f"staleness_mean_episode_{k}": stale * (1.0 - 0.2 * k) for k in (1, 2, 3)},
        **dict.fromkeys(("over_bound_share", "masked_share"), 0.0),
        "k3_mean": 1e-3,
        "effective_share": 0.99,
        f"token_share_age_{stale}": 1.0,
        **{f"token_share_age_{stale}_episode_{k}": 1.0 for k in (1, 2, 3)},
        "loss": source.gauss(0, 0.01),
        "entropy": 1.1 - 0.8 * skill + source.gauss(0, 0.01),
        "clipped_share": 0.02 + 0.05 * skill,
        "mean_weight": 1 + source.gauss(0, 0.01),
        "grad_norm": 0.2 + source.random() / 10,
        "learning_rate": 1e-3 * (1 - 0.8 * step / 60),
        "logprob_gap_mean": 0.05,
        "equal_version_tokens": 1728.0 if step == 1 else 0.0,
        **known,
        "train_s": 0.36,
        "waiting_s": 0.02,
        "groups_in_flight": 36,
    }


def _point(version, source, environment):
    sets = {n: _score(n, _skill(version), source, environment, 240) for n in ("train", "heldout")}
    return {"version": version, "time_s": version * STEP_S, "sets": sets}


def _score(name, skill, source, environment, num_trials):
    members = environment.members("train" if name == "train" else "heldout")
    families = sorted({environment.family(member) for member in members})
    return {
        "num_trials": num_trials,
        "return_by_episode": _returns(name, skill, source, 0.01),
        "ci95_by_episode": [1.96 * 0.5 / math.sqrt(num_trials)] * 3,
        "by_family": {family: _returns(name, skill, source, 0.1) for family in families},
        "by_member": {member: _returns(name, skill, source, 0.15) for member in members},
        "invalid_actions_per_trial": 0.07,
        "best_within": [0.1, 0.7, 0.8],
        "won_by_episode": [0.3, 0.6, 0.7],
        "won_bounds_by_episode": [(0.27, 0.33), (0.57, 0.63), (0.67, 0.73)],
        "parts": {"seat": {"0": _part(num_trials)}},
        "cut_short": 0.0,
        "won_within": [0.3, 0.7, 0.9],
        "lost_by_episode": [0.4, 0.2, 0.1],
        "probes_by_episode": [0.0, 0.0, 0.0],
    }


def _part(num_trials):
    return {
        "num_trials": num_trials,
        "return_by_episode": [0.0, 0.5, 0.7],
        "ci95_by_episode": [0.01] * 3,
        "won_by_episode": [0.3, 0.6, 0.7],
        "won_within": [0.3, 0.7, 0.9],
        "lost_by_episode": [0.4, 0.2, 0.1],
    }


def _evaluation(version, source, environment):
    return {
        "version": version,
        "sets": {name: _score(name, 1.0, source, environment, 1024) for name in LEARNED},
        "references": {s: environment.references(s, 3) for s in ("train", "heldout")},
        "environment": asdict(environment.facts),
    }


def _learner(steps):
    actor = {"engine": 18.0, "environment": 3.0, "no grant": 8.5, "no fresh weights": 0.5}
    return {
        "version": steps,
        "warm_start_s": 14.7,
        "train_s": steps * STEP_S,
        "totals": {
            "trials": 144 * steps,
            "generated_tokens": 1728 * steps,
            "trained_tokens": 14688 * steps,
            "prompt_tokens": 90000 * steps,
            "reused_tokens": 77400 * steps,
            "repeated_tokens": 0,
            "invalid_actions": 20 * steps,
            "extension_faults": 0,
            "train_s": 0.36 * steps,
        },
        "parity": {
            "equal_version_tokens": 1728.0,
            "logprob_mismatch_mean": 5e-8,
            "logprob_mismatch_max": 8e-7,
        },
        "trials": {
            "granted": 144 * steps + 288,
            "acknowledged": 144 * steps + 200,
            "trained": 144 * steps,
            "dropped": 0,
            "in_flight": 288,
            "duplicate": 0,
        },
        "dropped_by_reason": {},
        "granted_again": 0,
        "blocked_s": {
            "learner": {
                "training": 22.0,
                "batch not full": 5.5,
                "publishing": 2.0,
                "log-prob check": 0.5,
            },
            **{f"actor-{number}": actor for number in range(4)},
        },
    }


def _samples(run, config, environment, source, finished):
    """Trials a script played, in the tiny model's chat."""
    run.policy.mkdir(exist_ok=True)
    save_tokenizer(build_tokenizer(environment.facts.words), run.policy)
    chat = load_chat(run.policy)
    rules = trial_config_of(config, environment, chat, config.trial.episodes)

    def sample(split, version):
        task = random_task(environment, split, source)
        return trial_as_dict(
            scripted_trial(environment, task, 0, rules, chat), chat.decode, version
        )

    early = [sample("train", version) for version in range(6, config.learner.steps + 1, 6)]
    late = [sample("heldout", config.learner.steps) | {"split": "heldout"} for _ in range(6)]
    return [*early, *(late if finished else [])]
