"""Niceness, of real processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mage_services.processes.cores_and_memory import ACTOR, EVALUATOR, WATCHER

LOWER = """
import os, sys
from mage_services.processes.cores_and_memory import lower_priority
os.setpriority(os.PRIO_PROCESS, 0, int(sys.argv[1]))
lower_priority(int(sys.argv[2]))
print(os.getpriority(os.PRIO_PROCESS, 0))
"""
AUTOGROUP = Path("/proc/self/autogroup")


def niceness_of_a_child(own: int, wanted: int, then: str = "") -> str:
    """What it prints when it starts with `own` and gives way by `wanted`."""
    command = [sys.executable, "-c", LOWER + then, str(own), str(wanted)]
    return subprocess.run(
        command, check=True, capture_output=True, text=True, start_new_session=True
    ).stdout


def test_a_process_becomes_as_nice_as_wanted_and_never_less_nice() -> None:
    most = 19
    assert niceness_of_a_child(most, ACTOR) == f"{most}\n"
    assert niceness_of_a_child(most - 1, most) == f"{most}\n"


@pytest.mark.parametrize(("module", "niceness"), [("actor", ACTOR), ("evaluator", EVALUATOR)])
def test_a_process_that_plays_gives_way_while_it_imports_torch(
    tmp_path: Path, module: str, niceness: int
) -> None:
    said = "import os; print(os.getpriority(os.PRIO_PROCESS, 0), flush=True); os._exit(0)"
    (tmp_path / "torch.py").write_text(said)
    command = [sys.executable, "-m", f"mage_services.actor.{module}"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    output = subprocess.run(command, env=environment, check=True, capture_output=True).stdout
    assert int(output) == max(niceness, os.getpriority(os.PRIO_PROCESS, 0))


@pytest.mark.skipif(not AUTOGROUP.exists(), reason="the kernel does not weigh sessions")
def test_its_session_is_as_nice() -> None:
    said = niceness_of_a_child(15, EVALUATOR, f"print(open({str(AUTOGROUP)!r}).read())")
    assert said.split()[-1] == "15"


@pytest.mark.skipif(not AUTOGROUP.exists(), reason="the kernel does not weigh sessions")
def test_a_session_weighs_as_any_other_once_nothing_has_to_be_given_way_to() -> None:
    name = "restore_priority"
    then = f"from mage_services.processes.cores_and_memory import {name}; {name}()\n"
    said = niceness_of_a_child(0, WATCHER, f"{then}print(open({str(AUTOGROUP)!r}).read())")
    assert (said.split()[0], said.split()[-1]) == (str(WATCHER), "0")


THREAD = """
import subprocess, threading, time
from mage_services.processes.cores_and_memory import lower_priority, restore_priority

def niceness():
    return [os.getpriority(os.PRIO_PROCESS, each) for each in (thread.native_id, child.pid)]

lower_priority(15)
thread = threading.Thread(target=time.sleep, args=(3600,), daemon=True)
thread.start()
with subprocess.Popen(["sleep", "3600"]) as child:
    before = niceness()
    restore_priority()
    print(before, niceness())
    child.kill()
"""


def test_with_privileges_threads_and_children_that_began_meanwhile_are_as_nice_as_before() -> None:
    command = [sys.executable, "-c", f"import os\n{THREAD}"]
    try:
        niceness = os.getpriority(os.PRIO_PROCESS, 0)
        os.setpriority(os.PRIO_PROCESS, 0, min(19, niceness + 1))
        os.setpriority(os.PRIO_PROCESS, 0, niceness)
    except PermissionError:
        pytest.skip("this process may not lower a niceness")
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert said == f"{[max(15, niceness)] * 2} {[niceness] * 2}\n"


def test_the_evaluator_gives_way_to_actors_too() -> None:
    assert 0 < ACTOR < EVALUATOR <= WATCHER < 20
