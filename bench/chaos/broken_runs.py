"""Define the cases of `bench/chaos/first_hours.py`: runs of the tiny model that must fail.

For each case, the terminal has to print a line that matches the pattern `cause`, and one that
matches `cure`. A broken environment is a number lock with one fault. `mage train` plays a few
turns of a class before it starts the run's processes; `IN_RUN` is false in this rehearsal.
"""

import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from bench.lib.processes import command_lines

ROOT = Path(__file__).resolve().parents[2]
STEPS = "learner.steps=100000"
"""So many steps that no case ends by reaching the last one."""
# Source of `task.py`, the file of a case's environment; a case adds a class `Task` with its fault.
CLASS = '''
import asyncio, ctypes, os, random, re, signal, socket, subprocess, sys, threading, time
from itertools import permutations

def is_of_a_run(pid):
    return b"--name" in open(f"/proc/{pid}/cmdline", "rb").read().split(b"\\0")

IN_RUN = is_of_a_run(os.getpid()) or is_of_a_run(os.getppid())

class NumberLock:
    """A lock opens with three different digits from 1 to 6. Guess them, such as: 1 2 3."""

    rules = __doc__
    legal_actions = tuple(map(" ".join, permutations("123456", 3)))
    words = (*"0123456", "in", "place", "closed")
    max_turns = 4

    def reset(self, seed, task):
        self.code, self.turn = random.Random(task).sample("123456", 3), 0
        return "closed"

    def step(self, action):
        self.turn += 1
        right = sum(one == other for one, other in zip(action.split(), self.code))
        return f"{right} in place", float(right == 3), right == 3

'''


class Sandbox:
    """The folder of a case, and the processes, mounts and sockets to end after it."""

    def __init__(self, folder: Path, variables: dict[str, str]) -> None:
        self.folder, self.run = folder, folder / "run"
        self.variables = variables
        self.max_file_bytes = 0
        self.is_over = threading.Event()
        self.port = 0
        self._undo: list[Callable[[], object]] = []

    def write_class(self, code: str) -> None:
        """Write `task.py`: a number lock, and `Task` with the methods in `code`."""
        (self.folder / "task.py").write_text(
            f"{CLASS}\nclass Task(NumberLock):\n{code or '    pass'}\n"
        )

    def command(self, case: "Case") -> list[str]:
        """Return the command line of a case."""
        settings = [
            "environment.name=task:Task",
            "warm_start=none",
            STEPS,
            "evaluation.every=0",
            "evaluation.final_trials=16",
            *(each.format(sandbox=self) for each in case.settings),
        ]
        more = [each.format(sandbox=self) for each in case.arguments]
        start = [sys.executable, "-m", "mage_async.launch", "--actors", "2"]
        start += ["--run-dir", str(self.run), *more]
        return [*start, *(f"--set={each}" for each in settings)]

    def limit_file_size(self) -> None:
        """Limit the size of files that this process may write to `max_file_bytes`, if not 0."""
        if self.max_file_bytes:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.max_file_bytes,) * 2)

    def at_end(self, undo: Callable[[], object]) -> None:
        """Call `undo` when the case is over."""
        self._undo.append(undo)

    def start(self, command: Sequence[str], log: str) -> "subprocess.Popen[bytes]":
        """Start a process beside the run. It is killed when the case is over."""
        with (self.folder / log).open("wb") as out:
            process = subprocess.Popen(command, cwd=self.folder, stdout=out, stderr=out)
        self.at_end(process.kill)
        return process

    def pids(self, name: str) -> list[int]:
        """Return the ids of the run's processes with a name, such as "learner"."""
        wanted = {str(self.run), "--name", name}
        return [pid for pid, words in command_lines() if wanted <= set(words)]

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        """Send a signal to the run's processes with a name."""
        for pid in self.pids(name):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def clean_up(self) -> None:
        """Make the calls of `at_end`, the latest first."""
        for undo in reversed(self._undo):
            undo()


def do_nothing(_: object) -> None:
    """Change nothing: the preparation of most cases."""


@dataclass(frozen=True)
class Case:
    """A run that must fail, and what the terminal has to say about it."""

    name: str
    cause: str
    """Regular expression of the cause in the terminal's output."""
    cure: str
    """Regular expression of the advice in the terminal's output."""
    ends: bool = True
    """Whether the command has to end by itself."""
    code: str = ""
    """Methods of the environment's class, as source text."""
    settings: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    prepare: Callable[[Sandbox], None] = do_nothing
    harm: Callable[[Sandbox], None] | None = None
    """Called once during the run, after a line of output that matches `harm_after`."""
    harm_after: str = r"step=\d"


# Preparations (before the run starts) and harms (while it runs).


def small_file_system(
    size: str, then: Callable[[Sandbox], None] = do_nothing
) -> Callable[[Sandbox], None]:
    """Return a preparation: mount a tmpfs of `size` as the run's folder, then call `then`."""

    def mount(sandbox: Sandbox) -> None:
        sandbox.run.mkdir()
        small = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(sandbox.run)]
        is_mounted = subprocess.run(small, check=False).returncode == 0
        if not is_mounted:  # only root may mount: limit the size of each file instead
            sandbox.max_file_bytes = 200_000
            return
        sandbox.at_end(lambda: subprocess.run(["umount", "-l", str(sandbox.run)], check=False))
        then(sandbox)

    return mount


def remount_read_only(sandbox: Sandbox) -> None:
    """Remount the file system of the run's folder read-only."""
    subprocess.run(["mount", "-o", "remount,ro", str(sandbox.run)], check=False)


def start_another_run(sandbox: Sandbox) -> None:
    """Start another run in the same folder, and wait until its learner runs."""
    case = Case("other", "", "")
    sandbox.start(sandbox.command(case), "other.txt")
    while not sandbox.pids("learner"):
        time.sleep(0.2)


def prepare_silent_server(sandbox: Sandbox) -> None:
    """Listen at a port without ever answering, and make the model directory `model`."""
    occupy_port(sandbox)
    copy_good_model(sandbox)


def occupy_port(sandbox: Sandbox) -> None:
    """Listen on a port, whose number becomes `sandbox.port`, and never answer."""
    listening = socket.create_server(("127.0.0.1", 0))
    sandbox.at_end(listening.close)
    sandbox.port = listening.getsockname()[1]


def kill_often(name: str, every_s: float) -> Callable[[Sandbox], None]:
    """Return a harm: kill the processes with a name every `every_s` seconds."""

    def kill(sandbox: Sandbox) -> None:
        while not sandbox.is_over.is_set():
            sandbox.kill(name)
            sandbox.is_over.wait(every_s)

    return kill


def delete_folder(sandbox: Sandbox) -> None:
    """Delete the run's folder."""
    shutil.rmtree(sandbox.run, ignore_errors=True)


def copy_good_model(sandbox: Sandbox) -> Path:
    """Copy a tiny pretrained model to the case's `model`, and return that directory."""
    shared = sandbox.folder.parent / ".model"
    if not (shared / "model.safetensors").exists():
        from mage_async.config.schema import Tiny
        from mage_async.policy.load import build_tiny

        build_tiny(Tiny(), [*"0123456", "in", "place", "closed"], 0, shared)
    return Path(shutil.copytree(shared, sandbox.folder / "model"))


def with_model(change: Callable[[Path], object]) -> Callable[[Sandbox], None]:
    """Return a preparation: make the model directory `model`, then call `change` on it."""

    def prepare(sandbox: Sandbox) -> None:
        change(copy_good_model(sandbox))

    return prepare


def with_chat_template(text: str) -> Callable[[Sandbox], None]:
    """Return a preparation: make the model directory `model` with this chat template."""

    def change(folder: Path) -> None:
        (folder / "chat_template.jinja").write_text(text)
        file = folder / "tokenizer_config.json"
        known = json.loads(file.read_text())
        known.pop("chat_template", None)
        file.write_text(json.dumps(known))

    return with_model(change)


def write_70_billion_weights(folder: Path) -> None:
    """Replace the weights by a sparse file of 280 GB: 70 billion values of float32."""
    shape = [70_000, 1_000_000]
    entry = {"dtype": "F32", "shape": shape, "data_offsets": [0, 4 * shape[0] * shape[1]]}
    header = json.dumps({"model.embed_tokens.weight": entry}).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + entry["data_offsets"][1])


def with_file(name: str, text: str) -> Callable[[Sandbox], None]:
    """Return a preparation: write a file into the case's folder."""

    def write(sandbox: Sandbox) -> None:
        (sandbox.folder / name).write_text(text)

    return write


def method(name: str, text: str) -> str:
    """Return a method that runs `text` first and then does what the number lock does."""
    parameters = "seed, task" if name == "reset" else "action"
    call = f"super().{name}({parameters})"
    return f"    def {name}(self, {parameters}):\n        {text}\n        return {call}"


def run_step(text: str) -> str:
    """Return a `step` that runs `text` first in every call, except in the rehearsal."""
    return method("step", f"if IN_RUN: {text}")


# Keys, causes, cures and statements of several cases.
SOURCE = ("policy.source={sandbox.folder}/model",)
LINE = r"task\.py, line \d+"
"""The advice for an error that the class raises: the line that raised it."""
RETRIED = r"played again with fresh objects.*environment\.retries"
DEADLINE = r"environment\.step_deadline_s"
HANGS = r"step\(.* has not returned for 10 s"
DICE = "raise ValueError('no dice')"
LOST = "raise OSError('no route to host')"
THREAD = "threading.Thread(target=time.sleep, args=(3600,), name='poller', daemon=False).start()"

_CASES = [
    # Faults of the class that the rehearsal before the run finds.
    Case(
        "no_module",
        r"No module named 'nosuchlib'",
        r"task\.py, line 1",
        prepare=with_file("task.py", "import nosuchlib\n"),
    ),
    Case(
        "syntax_error",
        r"SyntaxError: '\(' was never closed",
        r"task\.py, line 2",
        prepare=with_file("task.py", "class Task:\n    def reset(self, seed, task:\n"),
    ),
    Case(
        "wrong_signature",
        r"reset\(self\) of Task",
        r"must be def reset\(self, seed, task\)",
        code="    def reset(self): return 'closed'",
    ),
    Case("reset_raises", r"reset\(\) raised ValueError: no dice", LINE, code=method("reset", DICE)),
    Case(
        "observation_is_no_text",
        r"reset\(\).* got a value of type dict",
        r"must return text as observation",
        code="    def reset(self, seed, task): return {'board': 1}",
    ),
    Case(
        "reward_is_nan",
        r"step\(.* got nan",
        r"must return a finite reward",
        code="    def step(self, action): return 'closed', float('nan'), False",
    ),
    Case(
        "no_legal_action",
        r"legal_actions lists no action",
        r"list one, end the episode, or return None",
        code="    legal_actions = ()",
    ),
    Case(
        "begins_differently",
        r"restarted with the same seed, and reset gave",
        r"draw everything from `seed`",
        code="    def reset(self, seed, task):\n"
        "        super().reset(seed, task)\n"
        "        return ' '.join(random.sample('123456', 3))",
    ),
    Case(
        "step_hangs_at_once",
        r"step has taken \d+ s so far",
        DEADLINE,
        code=method("step", "time.sleep(3600)"),
    ),
    # Faults of the class that appear in the actors only.
    Case(
        "reset_raises_in_run",
        r"reset\(\) raised OSError: no route",
        RETRIED,
        ends=False,
        code=method("reset", f"if IN_RUN: {LOST}"),
    ),
    Case(
        "step_raises_late",
        r"turn 3: step\(.*raised KeyError",
        LINE,
        ends=False,
        code=method("step", "if IN_RUN and self.turn == 2: raise KeyError('door')"),
    ),
    Case(
        "reset_raises_sometimes",
        r"reset\(\) raised OSError",
        RETRIED,
        ends=False,
        code=method("reset", f"if IN_RUN and random.random() < 0.05: {LOST}"),
    ),
    Case("step_hangs", HANGS, DEADLINE, ends=False, code=run_step("time.sleep(3600)")),
    Case(
        "reset_hangs",
        HANGS.replace("step", "reset"),
        DEADLINE,
        ends=False,
        code=method("reset", "if IN_RUN: time.sleep(3600)"),
    ),
    Case(
        "some_steps_hang",
        HANGS,
        DEADLINE,
        ends=False,
        code=run_step("random.random() < 0.02 and time.sleep(3600)"),
    ),
    Case(
        "coroutine_hangs",
        HANGS,
        DEADLINE,
        ends=False,
        code="    async def step(self, action):\n"
        "        if IN_RUN: await asyncio.sleep(3600)\n"
        "        return super().step(action)",
    ),
    Case(
        "step_blocks_interpreter",
        r"actor-\d:? (sent no heartbeat for too long and was killed|still silent).*task\.py",
        r"environment\.workers",
        ends=False,
        code=run_step("re.match('(a+)+$', 'a' * 60 + 'b')"),
    ),
    Case(
        "slow_steps",
        r"step\(.*has not returned for 10 s",
        r"raise engine\.max_contexts",
        ends=False,
        code=run_step("time.sleep(12)"),
    ),
    Case(
        "os_exit_0",
        r"actor-\d ended with exit code 0",
        r"os\._exit",
        code=run_step("os._exit(0)"),
    ),
    Case(
        "crashes",
        r"actor-\d was killed by SIGSEGV: it was at .*task\.py",
        r"environment\.workers",
        code=run_step("ctypes.string_at(0)"),
    ),
    Case(
        "worker_dies",
        r"step\(.*worker process of the episode was killed by SIGKILL",
        RETRIED,
        ends=False,
        code=run_step("os.kill(os.getpid(), signal.SIGKILL)"),
        settings=("environment.workers=1",),
    ),
    Case(
        "endless_thread",
        r"threads do not end.*'poller'",
        r"daemon=True",
        settings=("learner.steps=2",),
        code=method("reset", f"IN_RUN and {THREAD}"),
    ),
    Case(
        "forks",
        r"actor-\d: left processes behind",
        r"end them in its `close\(\)`",
        settings=("learner.steps=2",),
        code=method(
            "reset", "if IN_RUN and random.random() < 0.02 and not os.fork(): time.sleep(3600)"
        ),
    ),
    Case(
        "closes_descriptors",
        r"reset\(\) closed descriptors",
        r"close only your own",
        code=method("reset", "if IN_RUN: os.closerange(3, 64)"),
    ),
    Case(
        "floods_log",
        r"actor-\d has printed 50 MB",
        r"let it print less",
        ends=False,
        code=run_step("print('x' * 100_000)"),
    ),
    Case(
        "floods_observation",
        r"step\(.* at most 100,000 characters|characters",
        r"[Ss]horten|at most",
        ends=False,
        code="    def step(self, action):\n"
        "        return ('1 ' * 60_000) if IN_RUN else 'closed', 0.0, False",
    ),
    Case(
        "outgrows_context",
        r"needs up to about [\d,]+ tokens of engine\.max_tokens = 160",
        r"lower the class's max_turns",
        ends=False,
        code="    def step(self, action): return '1 in place ' * 20, 0.0, False",
    ),
    Case(
        "never_pays",
        r"earned no reward at all",
        r"easier tasks in environment\.options",
        ends=False,
        code="    def step(self, action): return 'closed', 0.0, False",
    ),
    Case(
        "pays_alike",
        r"all returns are alike",
        r"sampling\.temperature|environment\.options",
        ends=False,
        code="    def step(self, action): return 'closed', 1.0, False",
    ),
    Case(
        "talks_nonsense",
        r"no action was valid",
        r"sampling\.restricted = true",
        ends=False,
        settings=(
            "sampling.restricted=false",
            "transcript.forced_tags=none",
            "transcript.max_action_tokens=3",
        ),
    ),
    # Servers of environments.
    Case(
        "dead_server",
        r"Cannot connect to host 127\.0\.0\.1:9",
        r"start the server",
        settings=("environment.name=openenv:http://127.0.0.1:9", *SOURCE),
        prepare=with_model(do_nothing),
    ),
    Case(
        "silent_server",
        r"reset has taken \d+ s so far",
        DEADLINE,
        settings=("environment.name=openenv:http://127.0.0.1:{sandbox.port}", *SOURCE),
        prepare=prepare_silent_server,
    ),
    # Models.
    Case(
        "no_weights",
        r"no model\.safetensors",
        r"name a directory with a model",
        settings=SOURCE,
        prepare=with_model(lambda folder: (folder / "model.safetensors").unlink()),
    ),
    Case(
        "weights_cut_short",
        r"model\.safetensors: .* may be cut short",
        r"copy it again",
        settings=SOURCE,
        prepare=with_model(lambda folder: os.truncate(folder / "model.safetensors", 100_000)),
    ),
    Case(
        "too_big",
        r"needs [\d.]+ GB.* but this machine has",
        r"set policy\.lora\.rank = 16, or fewer --actors",
        settings=(*SOURCE, "policy.lora=none"),
        prepare=with_model(write_70_billion_weights),
    ),
    Case(
        "broken_template",
        r"the chat template cannot be read: unexpected end",
        r"mend it in chat_template\.jinja",
        settings=SOURCE,
        prepare=with_chat_template("{% for message in messages %}{{ message.content "),
    ),
    Case(
        "forgetful_template",
        r"the chat template drops or changes",
        r"let chat_template\.jinja write",
        settings=SOURCE,
        prepare=with_chat_template("{{ messages[-1].content | length }}"),
    ),
    # The machine.
    Case(
        "disk_full_at_start",
        r"No space left on device",
        r"[Mm]ake room",
        prepare=small_file_system("16k"),
    ),
    Case(
        "disk_full_in_run",
        r"(no result is accepted|learner).*No space left on device",
        r"[Mm]ake room",
        ends=False,
        prepare=small_file_system("3m"),
    ),
    Case(
        "run_dir_read_only",
        r"cannot be written: Read-only file system",
        r"--run-dir",
        prepare=small_file_system("1m", remount_read_only),
    ),
    Case(
        "two_runs_in_one_folder",
        r"is being run|runs already|is running|another process",
        r"--run-dir|wait|end it",
        prepare=start_another_run,
    ),
    Case(
        "port_taken",
        r"is in use",
        r"choose another port",
        settings=("transport.address=tcp://127.0.0.1:{sandbox.port}",),
        prepare=occupy_port,
    ),
    Case("folder_deleted", r"was deleted while", r"start a new run", harm=delete_folder),
    Case(
        "actor_killed_often",
        r"actor-0 was killed by SIGKILL",
        r"start fewer --actors",
        ends=False,
        harm=kill_often("actor-0", 5.0),
    ),
    Case(
        "actor_stopped",
        r"actor-0.* (silent|sent no heartbeat)",
        r"supervision\.silence_s|started again",
        ends=False,
        harm=lambda sandbox: sandbox.kill("actor-0", signal.SIGSTOP),
    ),
    # The configuration.
    Case(
        "not_toml",
        r"own\.toml: not TOML",
        r"at line 1, column",
        arguments=("--config", "own.toml"),
        prepare=with_file("own.toml", "[learner\nsteps = 3\n"),
    ),
    Case(
        "unknown_key",
        r"unknown key `learner\.stepz`",
        r"did you mean `learner\.steps`",
        settings=("learner.stepz=3",),
    ),
    Case(
        "contradiction",
        r"engine\.max_contexts must be at least admission\.trials_per_group = 8",
        r"must be at least .*, got 2",
        settings=("engine.max_contexts=2",),
    ),
    Case(
        "no_gpu",
        r"PyTorch finds no GPU",
        r'set learner\.device = "cpu"',
        settings=("learner.device=cuda",),
    ),
    Case(
        "rate_too_high",
        r"not_finite",
        r"learner\.learning_rate",
        ends=False,
        settings=(
            "learner.learning_rate=1e30",
            "learner.final_learning_rate=1e30",
            "learner.grad_clip=1e30",
        ),
    ),
]
CASES = {case.name: case for case in _CASES}
