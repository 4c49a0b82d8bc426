"""Whole small runs from Python."""

import asyncio
import json
import os
import signal
import sys
import threading
import time
from functools import partial

import pytest

import mage_async as mage
from mage_async.assembly import environment_of
from mage_async.doctor import examine
from mage_async.errors import ConfigError, Halted
from mage_async.policy.tiny_tokenizer import build_tokenizer, save_tokenizer
from mage_async.results.run_directory import RunDirectory
from mage_async.results.run_files import read_records
from mage_services.actor import preflight
from mage_services.actor.actor import note_edits
from mage_services.api import start_to_report, training
from mage_services.api.start_to_report import EXIT_HALTED, start_run
from mage_services.api.training import Relay
from tests.end_to_end.conftest import SMALL

KEYS = dict(each.split("=") for each in SMALL)


def small(**more):
    keys = {key: float(value) if "." in value else int(value) for key, value in KEYS.items()}
    return mage.configure(keys={**keys, "learner.steps": 4, **more})


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def test_keys_instead_of_a_configuration_are_answered_with_how_to_make_one():
    with pytest.raises(mage.MageError, match=r"got \{'learner.steps': 3\}: mage.train\(mage.conf"):
        mage.train({"learner.steps": 3})


def test_no_actor_is_an_error_in_the_words_of_python(tmp_path):
    with pytest.raises(mage.MageError, match=r"^actors must be at least 1, got 0$"):
        mage.train(small(), run_dir=tmp_path / "run", actors=0, progress=False)


@pytest.mark.parametrize("on_step", [3, asyncio.sleep])
def test_a_callback_that_cannot_be_called_is_refused_before_any_process_starts(on_step, tmp_path):
    with pytest.raises(mage.MageError, match=r"^on_step must be a function, without `async`"):
        mage.train(small(), run_dir=tmp_path / "run", on_step=on_step)
    with pytest.raises(TypeError, match="'str' object cannot be interpreted as an integer"):
        mage.train(small(), run_dir=tmp_path / "run", actors="2")
    assert not (tmp_path / "run").exists()


class Enough(Exception):
    pass


def test_a_run_that_was_ended_says_why_and_not_what_the_doctor_found_behind_it(
    tmp_path, monkeypatch, capsys
):
    def start_run(config, *, view, **given):
        view.line("why; go on with --resume")
        view.close({})
        view.line("doctor: something else")
        return RunDirectory(tmp_path), EXIT_HALTED

    def follow(*given):
        raise Enough

    monkeypatch.setattr(training, "start_run", start_run)
    with pytest.raises(Halted, match=r"^why; go on with --resume$"):
        mage.train(small(), progress=False)
    monkeypatch.setattr(training, "_follow", follow)
    capsys.readouterr()
    with pytest.raises(Enough):
        mage.train(small(), progress=False)
    assert capsys.readouterr().err == "ending the run\nwhy; go on with --resume\n"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_is_trained_beside_a_running_loop_stopped_by_a_callback_and_resumed(tmp_path):
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    ticks, seen = [], []

    def on_step(metrics):
        seen.append(metrics["step"])
        if metrics["step"] == 2:
            raise Enough

    async def tick():
        while True:
            ticks.append(asyncio.get_running_loop().time())
            await asyncio.sleep(0.2)

    async def main():
        ticking = asyncio.create_task(tick())
        with pytest.raises(Enough):
            await asyncio.to_thread(
                mage.train, small(), run_dir=tmp_path / "run", actors=1, on_step=on_step
            )
        ticking.cancel()

    asyncio.run(main())
    assert seen == [1, 2]
    assert len(ticks) > 10
    run = mage.load(tmp_path / "run")
    again = run.resume(on_step=lambda metrics: seen.append(metrics["step"]), progress=False)
    assert seen[-1] == 4
    assert again.summary["complete"]
    assert {number: signal.getsignal(number) for number in handlers} == handlers


def test_a_run_that_ends_while_it_is_stopped_raises_nothing():
    """Otherwise the exception of `on_step`, for which it is stopped, would be lost."""

    class Ending(asyncio.SelectorEventLoop):
        def call_soon_threadsafe(self, *given, **more):
            self.close()
            return super().call_soon_threadsafe(*given, **more)

    class Unending:
        async def supervise(self):
            await asyncio.Event().wait()

    relay, loop = Relay(), Ending()
    task = loop.create_task(relay.until_stopped(Unending()))
    loop.call_soon(loop.stop)
    loop.run_forever()  # begins the task
    relay.stop()
    assert loop.is_closed()
    task._log_destroy_pending = False


@pytest.mark.parametrize("says_which", [True, False])
def test_more_actors_than_cores_that_may_be_used_are_warned_of(tmp_path, monkeypatch, says_which):
    monkeypatch.setattr(os, "cpu_count", lambda: 64 if says_which else 2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 5})
    if not says_which:  # as on systems other than Linux
        monkeypatch.delattr(os, "sched_getaffinity")

    def say(line):
        raise Enough(line)  # before anything is played

    run = tmp_path / "run"
    with pytest.raises(Enough, match="6 actors: each computes, and this process may use 2 c"):
        start_run(small(), run_dir=run, actors=6, is_resumed=False, cluster="", say=say)
    run.mkdir()
    (run / "launch.json").write_text('{"actors": 7}')
    with pytest.raises(Enough, match="7 actors: each computes"):
        start_run(small(), run_dir=run, actors=None, is_resumed=True, cluster="", say=say)


def test_a_class_that_was_edited_since_the_last_start_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "edited_doors.py").write_text(
        "class Doors:\n"
        "    rules = 'Take the left or the right door.'\n"
        "    legal_actions = words = ('left', 'right')\n"
        "    def reset(self, seed, task): return 'left right'\n"
        "    def step(self, action): return 'left', 1.0 * (action == 'left'), True\n"
    )

    def say(line):
        if "was edited" in line:
            raise Enough(line)

    monkeypatch.setattr(start_to_report, "run_to_end", lambda *given, **more: 0)
    config = small(**{"environment.name": "edited_doors:Doors"})
    start = partial(start_run, config, run_dir=tmp_path / "run", actors=1, cluster="", say=say)
    start(is_resumed=False)
    start(is_resumed=True)
    source = tmp_path / "edited_doors.py"
    source.write_text(source.read_text().replace("1.0", "10.0"))
    with pytest.raises(Enough, match=r"^edited_doors:Doors was edited since the last start of th"):
        start(is_resumed=True)
    notes = []
    note_edits(tmp_path / "run" / "launch.json", notes.append)
    (note,) = notes  # of an actor that is started again while the run goes on
    assert note.startswith("edited_doors:Doors was edited since the last start of this run")
    assert "processes that were not started again play it as it was" in note


def test_a_stopped_run_of_an_own_class_that_is_solved_has_no_entropy_collapse(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "bounded_doors.py").write_text(
        "class Doors:\n"
        "    rules = 'Take the left or the right door.'\n"
        "    legal_actions = words = ('left', 'right')\n"
        "    min_return, max_return = 0.0, 1.0\n"
        "    def reset(self, seed, task): return 'left right'\n"
        "    def step(self, action): return 'left', 1.0 * (action == 'left'), True\n"
    )
    monkeypatch.setattr(start_to_report, "run_to_end", lambda *given, **more: 0)
    config = small(**{"environment.name": "bounded_doors:Doors"})
    start_run(config, run_dir=tmp_path / "run", actors=1, is_resumed=False, say=lambda line: None)
    # Reading the run must not load the class.
    (tmp_path / "bounded_doors.py").unlink()
    run = RunDirectory(tmp_path / "run")

    def found(last):
        """Return the findings of steps that earn 0, 0 and `last` and have next to no entropy."""
        known = {"trials_per_s": 1.0, "generated_tokens_per_s": 3.0}
        steps = [
            {"step": step, "entropy": 1e-5, "return_by_episode": [0.0, 0.0, last], **known}
            for step in range(1, 31)
        ]
        run.metrics.write_text("".join(json.dumps(step) + "\n" for step in steps))
        return {each.name for each in examine(read_records(run))}

    assert "entropy_collapse" in found(0.5)
    assert "entropy_collapse" not in found(1.0)


def test_words_that_the_tiny_policy_of_a_resumed_run_lacks_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(start_to_report, "run_to_end", lambda *given, **more: 0)
    start = partial(start_run, small(), run_dir=tmp_path, actors=1, cluster="", say=lambda line: 0)
    start(is_resumed=False)
    (tmp_path / "policy").mkdir()
    save_tokenizer(build_tokenizer(["rock", "paper"]), tmp_path / "policy")
    with pytest.raises(ConfigError, match="this tiny policy was not built with, such as"):
        start(is_resumed=True)


def test_a_directory_that_holds_a_run_is_refused_before_anything_is_played(tmp_path, monkeypatch):
    def play(*given):
        raise Enough

    monkeypatch.setattr(start_to_report, "rehearse_all", play)
    (tmp_path / "config.toml").write_text("")
    with pytest.raises(mage.MageError, match="holds a run already: add --resume"):
        mage.train(small(), run_dir=tmp_path, progress=False)
    with pytest.raises(Enough):
        mage.train(small(), run_dir=tmp_path / "other", progress=False)


WANDERING = """
import os, tempfile

class Wandering:
    "Say yes."
    legal_actions = words = ("yes", "no")
    max_turns = 2

    def reset(self, seed, task):
        self.folder = tempfile.TemporaryDirectory()
        os.chdir(self.folder.name)
        return "no"

    def step(self, action):
        return action, 1.0, True

    def close(self):
        self.folder.cleanup()
"""


def test_processes_start_where_the_command_did_whatever_a_class_does(tmp_path, monkeypatch):
    def start(*given):
        raise Enough(os.getcwd())

    (tmp_path / "wandering.py").write_text(WANDERING)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(start_to_report, "run_preflight", start)
    rehearse = start_to_report.rehearse_all

    def rehearse_all(config, *given):
        rehearse(config, *given)
        assert environment_of(config).rules() == "Say yes."  # although its folder is deleted

    monkeypatch.setattr(start_to_report, "rehearse_all", rehearse_all)
    config = small(**{"environment.name": "wandering:Wandering"})
    with pytest.raises(Enough, match=f"^{tmp_path}$"):
        mage.train(config, progress=False)


HANGING = """
import pathlib, threading

class Hanging:
    "Say yes."
    legal_actions = words = ("yes", "no")
    max_turns = 2

    def reset(self, seed, task):
        pathlib.Path(__file__).with_name("begun").touch()
        threading.Event().wait()

    def step(self, action):
        raise AssertionError

class Pondering(Hanging):
    def reset(self, seed, task):
        return "no"

    def step(self, action):
        return action, 1.0, True

    def script(self, source):
        return lambda observation: Hanging.reset(self, 0, 0)
"""
SILENT_CHILD = """
import os, pathlib, threading
pathlib.Path(__file__).with_name("begun").touch()
threading.Event().wait()
"""


@pytest.mark.parametrize("where", ["rehearsal", "script", "preflight"])
def test_ctrl_c_ends_what_is_played_before_the_run(tmp_path, monkeypatch, capsys, where):
    def interrupt():
        while not (tmp_path / "begun").exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    (tmp_path / "hanging.py").write_text(HANGING)
    monkeypatch.delitem(sys.modules, "hanging", raising=False)
    (tmp_path / "silent_child.py").write_text(SILENT_CHILD)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(preflight, "MODULE", "silent_child")
    keys = {"learner.device": "cuda"}
    if where != "preflight":
        name = {"rehearsal": "Hanging", "script": "Pondering"}[where]
        keys = {"environment.name": f"hanging:{name}", "environment.step_deadline_s": 1000.0}
    began = time.monotonic()
    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        mage.train(small(**keys), run_dir=tmp_path / "run", progress=False)
    assert time.monotonic() - began < 60
    assert capsys.readouterr().err == "ending the run\n"
    assert not (tmp_path / "run").exists()


def test_a_mistake_is_raised_before_any_process_starts(tmp_path):
    with pytest.raises(mage.MageError, match="at least 1"):
        mage.train(small(), run_dir=tmp_path / "run", actors=0, progress=False)
    assert not (tmp_path / "run").exists()
