"""What a run's processes went through is written down beside what the terminal shows."""

import json

from mage_async.results.run_directory import RunDirectory
from mage_async.results.run_files import read_lines, run_history, run_state
from mage_services.processes.supervisor import RecordedView


class Terminal:
    """Remembers what it was shown."""

    def __init__(self):
        self.shown, self.lines, self.closed = [], [], []

    def event(self, process, event):
        self.shown.append((process, event["event"]))

    def line(self, text):
        self.lines.append(text)

    def close(self, summary):
        self.closed.append(summary)


def recorded(folder, *events, times=None):
    """What is written of events that come a second apart."""
    clock, terminal = iter(times or range(1, 99)), Terminal()
    run = RunDirectory(folder)
    view = RecordedView(terminal, run, lambda: float(next(clock)))
    for process, event in events:
        view.event(process, event)
    view.close(None)
    assert terminal.shown == [(process, event["event"]) for process, event in events]
    assert terminal.closed == [None]
    return run, terminal


def step(number, faults=()):
    """A status line of a learner's step."""
    seconds = {"learner": {"training": float(number)}}
    return "learner", {
        "event": "step",
        "metrics": {"step": number},
        "trials": {"granted": number},
        "blocked_s": seconds,
        "faults": list(faults),
    }


EVENTS = (
    ("supervisor", {"event": "started", "text": "learner"}),
    ("supervisor", {"event": "started", "text": "actor-0"}),
    ("learner", {"event": "ready"}),
    ("actor-0", {"event": "failed", "reason": "no memory", "at": 9.9}),
    ("supervisor", {"event": "restarting", "text": "actor-0 ended with exit code 1: no memory"}),
    ("supervisor", {"event": "started", "text": "actor-0"}),
)


def test_a_process_of_an_earlier_start_of_the_run_has_ended(tmp_path):
    resumed = [
        ("supervisor", {"event": "started", "text": name}) for name in ("learner", "actor-0")
    ]
    ready = ("actor-1", {"event": "ready"})
    run, _ = recorded(tmp_path, *EVENTS, ready, *resumed)
    lives = run_history(read_lines(run.events)).processes
    assert lives["actor-0"].state == lives["learner"].state == "starting"
    assert lives["actor-1"].state == "ended, at an earlier start of the run"
    # A learner that is started again within a run leaves the actors alone.
    again = [("supervisor", {"event": "restarting", "text": "learner ended with exit code 1"})]
    folder = tmp_path / "again"
    folder.mkdir()
    run, _ = recorded(folder, *EVENTS, ready, *again, resumed[0])
    assert run_history(read_lines(run.events)).processes["actor-1"].state == "ready"


def test_lives_restarts_and_failure_lines_can_be_told_from_the_file(tmp_path):
    run, _ = recorded(tmp_path, *EVENTS)
    lives = run_history(read_lines(run.events))
    said = {life.name: (life.state, life.num_starts) for life in lives.processes.values()}
    assert said == {"learner": ("ready", 1), "actor-0": ("starting", 2)}
    assert [sentence for _, sentence in lives.notes] == [
        "actor-0 ended with exit code 1: no memory",
        "actor-0: no memory",
    ]
    assert [run_state(is_alive, False, lives) for is_alive in (True, False, None)] == [
        "running",
        "stopped",
        "not finished",
    ]
    assert run_state(False, True, lives) == "finished"


def test_times_are_written_once_a_second_and_a_fault_once(tmp_path):
    events = [step(1, ["too old"]), step(2, ["too old"]), step(3, ["too old", "late"])]
    events = [(name, event | {"event": "view"}) for name, event in events]
    run, _ = recorded(tmp_path, *events, times=[10.0, 10.5, 11.0])
    times = json.loads(run.times.read_text())
    assert times["at"] == 11.0
    assert times["blocked_s"] == {"learner": {"training": 3.0}}
    assert [line["text"] for line in read_lines(run.events)] == ["too old", "late"]


def test_the_counts_after_the_last_step_are_written_however_soon_the_run_is_stopped(tmp_path):
    run, _ = recorded(tmp_path, step(1), step(2), times=[10.0, 10.5])
    assert json.loads(run.times.read_text())["trials"] == {"granted": 2}


def test_a_disk_that_takes_no_more_is_said_once_and_stops_nothing(tmp_path):
    (tmp_path / "events.jsonl").mkdir()
    run, terminal = recorded(tmp_path, *EVENTS)
    assert terminal.lines == [f"{run.events} cannot be written: Is a directory. It is tried again"]


def test_what_a_full_disk_did_not_take_is_written_when_there_is_space_again(tmp_path):
    run, terminal = RunDirectory(tmp_path), Terminal()
    view = RecordedView(terminal, run)
    run.events.mkdir()
    run.times.mkdir()
    for process, event in (step(0), *EVENTS[:-1]):
        view.event(process, event)
    assert len(terminal.lines) == 2
    run.events.rmdir()
    view.event("learner", {"event": "beat"})
    view.event(*EVENTS[-1])
    run.times.rmdir()
    view.event(*step(1))
    assert terminal.lines[2:] == [f"{run.events} is written again", f"{run.times} is written again"]
    written = [(line["process"], line["event"]) for line in read_lines(run.events)]
    assert written == [(process, event["event"]) for process, event in EVENTS]
    assert json.loads(run.times.read_text())["trials"] == {"granted": 1}


def test_times_are_written_on_after_the_clock_was_set_back(tmp_path):
    event = {key: value for key, value in step(1)[1].items() if key != "metrics"}
    events = [("learner", event | {"event": "waiting", "trials": {"n": n}}) for n in range(3)]
    run, _ = recorded(tmp_path, *events, times=[9000, 100, 102])
    assert json.loads(run.times.read_text())["trials"] == {"n": 2}
