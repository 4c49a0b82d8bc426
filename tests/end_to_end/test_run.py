"""A whole small run: what it leaves behind, and how it goes on."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mage_services.cli.main import main

Start = Callable[..., "subprocess.Popen[str]"]
RECORDS = ("learner.json", "summary.json")


def test_every_granted_trial_is_trained_dropped_or_in_flight(summary: dict[str, Any]) -> None:
    trials = summary["trials"]
    assert trials["granted"] == trials["trained"] + trials["dropped"] + trials["in_flight"]
    assert trials["trained"] == 4 * 4 * 4
    assert trials["dropped"] == trials["duplicate"] == 0


def test_staleness_stays_within_its_bound(summary: dict[str, Any]) -> None:
    assert summary["staleness"]["max"] <= 1
    assert len(summary["staleness"]["mean_by_episode"]) == 3


def test_the_engine_and_the_learner_agree_on_log_probs(summary: dict[str, Any]) -> None:
    assert summary["logprob_mismatch"]["max_abs"] <= 1e-3


def test_every_step_says_of_weights_that_they_arrived(finished: tuple[Path, str]) -> None:
    lines = (finished[0] / "metrics.jsonl").read_text().splitlines()
    steps = [step for step in map(json.loads, lines) if "receipts" in step]
    assert sum(step["receipts"] for step in steps) >= 2  # two actors, and perhaps the evaluator
    assert all(step["receipt_retries"] == 0 for step in steps)
    apart = [step["receipt_difference"] for step in steps if "receipt_difference" in step]
    assert apart
    assert max(apart) < 1e-4


def test_no_context_token_is_computed_twice_but_for_evictions(summary: dict[str, Any]) -> None:
    assert summary["prefix_cache"]["reuse_rate"] >= 0.95


def test_every_set_is_evaluated_over_every_episode(summary: dict[str, Any]) -> None:
    assert summary["evaluation"].keys() == {"train", "heldout", "heldout_blind", "heldout_swapped"}
    for score in summary["evaluation"].values():
        assert score["num_trials"] == 36
        assert len(score["return_by_episode"]) == len(score["ci95_by_episode"]) == 3


def test_the_controls_share_the_first_episode(summary: dict[str, Any]) -> None:
    first = {
        name: score["return_by_episode"][0]
        for name, score in summary["evaluation"].items()
        if name.startswith("heldout")
    }
    assert len(set(first.values())) == 1


def test_the_report_stands_alone(finished: tuple[Path, str]) -> None:
    page = (finished[0] / "report.html").read_text()
    assert "<svg" in page
    assert 'src="http' not in page


def test_where_the_time_of_each_process_went_is_known(finished: tuple[Path, str]) -> None:
    learner = json.loads((finished[0] / "learner.json").read_text())
    evaluation = json.loads((finished[0] / "evaluation.json").read_text())
    booked = learner["blocked_s"]
    assert "learner" in booked  # so short a run may end before anybody else has spoken
    known = learner["warm_start_s"] + learner["train_s"]
    assert sum(booked["learner"].values()) == pytest.approx(known, rel=0.2, abs=2.0)
    life = sum(evaluation["blocked_s"].values())
    assert life >= sum(booked.get("evaluator", {}).values())
    assert 0 < evaluation["blocked_s"]["playing"] <= life
    watched = json.loads((finished[0] / "supervisor.json").read_text())["blocked_s"]
    assert sum(watched.values()) >= known


def test_nothing_of_a_finished_run_lives_on(
    finished: tuple[Path, str], processes_of: Callable[[Path], list[int]]
) -> None:
    assert processes_of(finished[0]) == []


def test_a_checkpoint_is_a_huggingface_folder(finished: tuple[Path, str]) -> None:
    folder = sorted((finished[0] / "checkpoints").glob("step_*"))[-1]
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("<|user|> episode 1<|assistant|><action>", return_tensors="pt").input_ids
    assert model(ids).logits.isfinite().all()
    assert tokenizer.decode(ids[0]) == "<|user|> episode 1<|assistant|><action>"
    assert json.loads((folder / "config.json").read_text())["rope_theta"] == 100.0
    assert model.get_input_embeddings().weight.dtype == torch.float32


def test_evaluate_plays_more_episodes_than_training_did(finished: tuple[Path, str]) -> None:
    threads = torch.get_num_threads()
    assert main(["evaluate", str(finished[0]), "--trials", "8", "--episodes", "6"]) == 0
    torch.set_num_threads(threads)
    document = json.loads((finished[0] / "episodes_6" / "evaluation.json").read_text())
    assert len(document["sets"]["heldout"]["return_by_episode"]) == 6
    assert document["sets"]["heldout"]["cut_short"] == 0  # there is room for twice as many


@pytest.mark.slow
def test_a_resumed_run_goes_on_where_it_stopped(
    finished: tuple[Path, str], environment: dict[str, str]
) -> None:
    before = [json.loads((finished[0] / name).read_text()) for name in RECORDS]
    command = [sys.executable, "-m", "mage_async.launch", "--resume", "--actors", "1"]
    command += ["--run-dir", str(finished[0]), "--set", "learner.steps=6"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = [
        json.loads(line)["step"]
        for line in (finished[0] / "metrics.jsonl").read_text().splitlines()
    ]
    assert steps == [1, 2, 3, 4, 5, 6]
    learner, summary = (json.loads((finished[0] / name).read_text()) for name in RECORDS)
    assert learner["warm_start_s"] == before[0]["warm_start_s"]
    assert summary["wall_s"] > before[1]["wall_s"]
