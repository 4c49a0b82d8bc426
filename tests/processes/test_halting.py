"""The doctor of a supervised run: a line for what is found, and an end where that is asked."""

import json
import subprocess
from typing import Any

from mage_async.config import config_file
from mage_services.api.start_to_report import EXIT_HALTED
from tests.helpers.made_up_runs import make_run
from tests.helpers.status_events import step
from tests.helpers.supervised_runs import PATIENCE_S, Site, resume

HALT = 'doctor.halt=["truncation"]'


def events(first: int, last: int, share: float = 0.5) -> list[dict[str, Any]]:
    """Steps whose actions are cut off."""
    found = [step(number)[1] for number in range(first, last + 1)]
    for event in found:
        event["metrics"]["truncated_action_share"] = share
    return found


def run(site: Site, *more: str) -> "subprocess.CompletedProcess[str]":
    """Resume a run whose learner says its events, and whose other processes end at once."""
    site.plan("learner", "says")
    for name in ("actor-0", "evaluator"):
        site.plan(name, "ends")
    site.run.config.write_text(config_file.dump(config_file.load(config_file.find(None), [])))
    command = [*resume(site.run), *(word for each in more for word in ("--set", each))]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)


def test_a_finding_is_a_line_and_changes_nothing(site: Site) -> None:
    site.says("learner", *events(1, 8))
    ended = run(site)
    assert ended.returncode == 0, ended.stderr
    line, again = [line for line in ended.stdout.splitlines() if "truncation" in line]
    assert "doctor: truncation since step 1: 50% of actions used up their 1 tokens" in line
    assert again.endswith(
        "doctor: found during the run: truncation since step 1; what to do: `mage doctor "
        f"{site.run.root}`"
    )


def test_a_resumed_run_starts_its_processes_with_the_arguments_of_a_new_run(site: Site) -> None:
    site.says("learner", *events(1, 2, share=0.0))
    assert run(site).returncode == 0
    assert [each.split()[::2] for each in site.lives("learner")] == [["--address"]]


def test_a_named_signature_ends_the_run_with_a_sentence_and_a_status(site: Site) -> None:
    site.says("learner", *events(1, 2, share=0.0), *events(3, 8))
    ended = run(site, HALT)
    assert ended.returncode == EXIT_HALTED == 3, ended.stderr
    (line,) = [line for line in ended.stdout.splitlines() if "the doctor halted the run" in line]
    assert "truncation since step 3" in line
    assert line.endswith(f"Go on with `mage train --resume --run-dir {site.run.root}`")
    assert site.run.summary.is_file()
    assert site.run.report.is_file()


def test_what_was_found_before_a_run_is_resumed_does_not_end_it_again(site: Site) -> None:
    make_run(site.run, steps=4, finished=False)
    lines = [json.loads(line) for line in site.run.metrics.read_text().splitlines()]
    sick = [line | {"truncated_action_share": 0.5} for line in lines]
    site.run.metrics.write_text("".join(json.dumps(line) + "\n" for line in sick))
    site.says("learner", *events(5, 8))
    ended = run(site, HALT)
    assert (ended.returncode, "halted" in ended.stdout) == (0, False), ended.stdout + ended.stderr


def test_a_run_with_damaged_metrics_is_resumed_and_the_damage_is_said(site: Site) -> None:
    make_run(site.run, steps=4, finished=False)
    whole, *others = site.run.metrics.read_bytes().splitlines(keepends=True)
    # As a loss of power leaves them: these lines are not synced.
    site.run.metrics.write_bytes(b"".join([whole, bytes(40), b"\n", *others, b"\xff\n"]))
    site.says("learner", *events(5, 6, share=0.0))
    ended = run(site)
    lines = [line.split("/")[-1] for line in ended.stdout.splitlines() if "l, line " in line]
    assert [line.split(":")[0] for line in lines] == [
        "metrics.jsonl, line 2",
        "metrics.jsonl, line 6",
    ]
    assert all(line.endswith("; the learner removes this line") for line in lines)
    assert len(site.lives("learner")) == 1
