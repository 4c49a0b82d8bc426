"""Check before a run's processes start that its policy fits the machine, and can play.

A child process loads a pretrained policy once and plays a few turns. It is a process of its own
because the supervisor imports no torch, and so that the model's memory is free before the run
begins.
"""

import asyncio
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from mage_async.config import config_file
from mage_async.config.schema import Config, Pretrained, Tiny, local_policy
from mage_async.errors import CallFault, DeterministicFailure, MageError
from mage_async.plan.does_it_fit import (
    Contexts,
    Size,
    check_files,
    check_outline,
    check_shared_memory,
    check_size,
    tiny_size,
    with_deadlines,
)
from mage_async.plan.forecast import Pace, forecast, idle_cores, smaller_batch
from mage_async.results.run_directory import SHARED_MEMORY
from mage_async.trials.duels import TrialInProgress
from mage_services.actor.rollout import make_calls
from mage_services.environments.call_runner import CallRunner
from mage_services.processes.child_process import (
    OUT_OF_MEMORY,
    BlockingChannel,
    BlockingChild,
    channel_to_parent,
    end_in_words,
    ending_descendants,
    last_line,
    module_command,
    waiting_notice,
)
from mage_services.processes.cores_and_memory import memory_bytes, num_cores
from mage_services.processes.process import Runner, in_time

MODULE = "mage_services.actor.preflight"
"""This module, which the child process runs."""
SMALLER_POLICY = (
    "take a smaller policy, or lower engine.max_contexts or learner.max_tokens_per_microbatch"
)
"""Advice to a user whose policy did not fit into memory."""


def run_preflight(
    config: Config, num_actors: int, say: Callable[[str], None], run: Runner = asyncio.run
) -> Config:
    """Check the policy of a run, play its first turns, and raise deadlines that it would miss.

    Args:
        say: called with lines for the user.
        run: runs a coroutine to its end, as `asyncio.run` does. If it cancels the coroutine, the
            child process is ended.

    Returns:
        The configuration, with longer deadlines and a smaller batch where they are needed.

    Raises:
        ConfigError, PolicyError: the model's files say that it cannot be trained or served as
            configured.
        DeterministicFailure: the child process found that the policy or the GPU cannot be used, or
            it failed.
    """
    if isinstance(config.policy, Tiny):
        size = tiny_size(config.policy)
        _check_memory(config, size, num_actors)
        if config.learner.device != "cpu":
            _preflight_in_child(config, num_actors, say, run)
        return config
    assert isinstance(config.policy, Pretrained)
    directory = local_policy(config.policy.source)
    if directory is not None:  # files on this machine are checked without a process
        check_model_files(config, directory, num_actors)
    say("policy: loading it once, to check it")
    findings = _preflight_in_child(config, num_actors, say, run)
    contexts = findings.contexts
    assert contexts is not None
    if contexts.lost:
        say(f"policy: {contexts.lost}")
    if contexts.longest > config.engine.max_tokens:
        say(
            f"policy: a trial may take up to {contexts.longest} tokens, more than "
            f"engine.max_tokens = {config.engine.max_tokens}: an episode that has used its share "
            "of the context is cut"
        )
    if not findings.sentence:  # no turn was played, so nothing was measured
        return config
    turn_s = findings.turn_s
    say(f"policy: {findings.sentence}")
    say(f"policy: a turn of {config.admission.trials_per_group} trials took {turn_s:.1f} s")
    config, notes = with_deadlines(config, turn_s=turn_s, num_turns=contexts.num_turns)
    for note in notes:
        say(f"policy: {note}")
    return _with_forecast(config, findings.pace, num_actors, say)


def _with_forecast(
    config: Config, pace: Pace | None, num_actors: int, say: Callable[[str], None]
) -> Config:
    """Make the batch smaller if a step would take too long, and say how long the run will take."""
    if pace is None or config.learner.device != "cpu":
        return config
    cores = num_cores()
    config, why = smaller_batch(config, pace, num_actors=num_actors, num_cores=cores)
    if why:
        say(f"forecast: {why}")
    expected = forecast(config, pace, num_actors=num_actors, num_cores=cores)
    say(f"forecast: {expected.sentence(config)}")
    if hint := idle_cores(config, expected, num_actors=num_actors, num_cores=cores):
        say(f"forecast: {hint}")
    return config


def check_model_files(config: Config, directory: Path, num_actors: int) -> Contexts:
    """Check a model's type, memory, tokenizer and chat template from the files of its directory,
    without torch; `mage check` does so too. Return how long contexts may become.

    Raises:
        ConfigError, PolicyError: the model cannot be trained or served as configured.
    """
    outline = check_outline(config, directory)
    size = Size(outline.num_weights, outline.num_in_matrices, outline.kv_token_bytes)
    _check_memory(config, size, num_actors)
    return check_files(config, directory)


def _check_memory(config: Config, size: Size, num_actors: int) -> None:
    """Check that a policy fits into the memory of this machine.

    Raises:
        ConfigError: the policy does not fit.
    """
    check_size(config, size, num_actors=num_actors, memory_bytes=memory_bytes())
    if SHARED_MEMORY.is_dir():
        total = shutil.disk_usage(SHARED_MEMORY).total
        check_shared_memory(config, size.num_weights, total)


class PreflightOrder(msgspec.Struct, frozen=True):
    """Order the child to check a policy."""

    tables: dict[str, Any]
    """The resolved configuration, as `config_file.as_tables` returns it."""
    num_actors: int
    started_at: float
    """When the child was started, by the machine's monotonic clock."""


class PreflightReport(msgspec.Struct, frozen=True):
    """Report from the child: a note on its progress, or, as the last message, its findings."""

    doing: str = ""
    """Note for the user on what has been done and comes next; "" in the last message."""
    failed: str = ""
    """Why the policy cannot be used; "" if it can."""
    contexts: Contexts | None = None
    """Lengths of contexts by the model's tokenizer; None for a tiny policy."""
    sentence: str = ""
    """The first turns in words; "" if none was played."""
    turn_s: float = 0.0
    """Seconds of a turn of all trials of a group."""
    pace: Pace | None = None
    """Seconds of turns and of training that were measured; None if none was played."""


def _preflight_in_child(
    config: Config, num_actors: int, say: Callable[[str], None], run: Runner
) -> PreflightReport:
    """Let a child process load the policy and play its first turns; return its findings.

    Ctrl-C ends the child, and this process.

    Raises:
        DeterministicFailure: the child failed, or found that the policy cannot be used.
    """
    with TemporaryDirectory(prefix="mage-preflight-") as folder:
        log = Path(folder) / "log"
        child = BlockingChild[PreflightReport](
            module_command(MODULE),
            PreflightReport,
            variables={"OMP_NUM_THREADS": str(config.engine.threads)},
            log=log,
        )
        try:
            order = PreflightOrder(config_file.as_tables(config), num_actors, time.monotonic())
            with suppress(OSError):  # the child has ended already, which `_findings` notices
                child.channel.send(order)
            report: PreflightReport | None = run(_findings(child, say))
            code = child.process.wait()
        except KeyboardInterrupt:
            sys.exit(128 + signal.SIGINT)
        finally:
            child.kill()
        if report is None or code:
            raise DeterministicFailure(
                f"the check of the policy before the start failed: {_end_of_child(code, log)}"
            )
    if report.failed:
        raise DeterministicFailure(report.failed)
    return report


async def _findings(
    child: BlockingChild[PreflightReport], say: Callable[[str], None]
) -> PreflightReport | None:
    """Return the last report of the child, None if the child ended without it. Pass the notes of
    earlier reports to `say`.
    """
    while True:
        with waiting_notice("the check of the policy"):
            report = await child.channel.receive_async()
        if report is None or not report.doing:
            return report
        say(f"policy: {report.doing}")


def _end_of_child(code: int, log: Path) -> str:
    """Return why the child process ended without findings, by its exit code and its log."""
    if code == -signal.SIGKILL:  # then the log's last line is a warning that came long before
        return f"it {end_in_words(code)}{OUT_OF_MEMORY}: {SMALLER_POLICY}"
    line = last_line(log)
    if code > 0 and line:  # the error that ended it
        return line
    return f"it {end_in_words(code)}" + (f": {line}" if line else "")


def _preflight(order: PreflightOrder, report: Callable[[str], None]) -> PreflightReport:
    """Check the policy in the child process, and play its first turns if it is pretrained."""
    from mage_async.plan.first_turns import play_first_turns
    from mage_async.plan.plan import check_gpu
    from mage_async.policy.initial_policy import source_directory

    config, num_actors = config_file.from_tables(order.tables), order.num_actors
    if config.learner.device != "cpu":
        check_gpu(config, num_actors, machine_bytes=memory_bytes())
    if not isinstance(config.policy, Pretrained):
        return PreflightReport()
    directory = source_directory(config.policy, config.engine)
    contexts = check_model_files(config, directory, num_actors)
    importing_s = time.monotonic() - order.started_at
    with asyncio.Runner() as runner:
        workers, begun = CallRunner(config.environment), list[TrialInProgress]()

        async def settle_all(trials: Sequence[TrialInProgress]) -> None:
            began, waiting = time.monotonic(), [make_calls(trial, workers) for trial in trials]
            ends = zip(trials, await asyncio.gather(*waiting, return_exceptions=True), strict=True)
            failed = [(trial, end) for trial, end in ends if isinstance(end, BaseException)]
            hangs = time.monotonic() - began >= config.environment.step_deadline_s
            for trial, fault in failed:
                # After a fault of a network or a server an actor plays the trial again. Here the
                # other trials go on without it.
                is_passing = isinstance(fault, CallFault) and not fault.mistake and not hangs
                if not is_passing or len(failed) == len(trials):
                    raise fault
                trial.cut_short()

        def settle(trials: Sequence[TrialInProgress]) -> None:
            begun[:] = trials
            runner.run(settle_all(trials))

        async def end() -> None:
            for trial in begun:
                workers.close_in_background(trial.abandon())
            await workers.close()

        try:
            turns = play_first_turns(config, directory, time.monotonic, settle, report, in_time)
        except CallFault as fault:
            if fault.mistake:
                raise
            report(f"the first turns were not measured, after a fault that may pass: {fault}")
            turns = None
        finally:
            runner.run(end())
    if turns is None:
        return PreflightReport(contexts=contexts)
    pace = turns.pace
    if pace is not None:
        pace = msgspec.structs.replace(pace, load_s=importing_s + pace.load_s)
    return PreflightReport(
        contexts=contexts, sentence=turns.sentence(), turn_s=turns.turn_s, pace=pace
    )


def main() -> None:
    """Serve one `PreflightOrder`; the child process ends with its report."""
    parent: BlockingChannel[PreflightOrder] = channel_to_parent(PreflightOrder)
    order = parent.receive()
    if order is None:
        return
    try:
        with ending_descendants():
            findings = _preflight(order, lambda done: parent.send(PreflightReport(doing=done)))
    except MageError as error:
        findings = PreflightReport(failed=str(error))
    parent.send(findings)


if __name__ == "__main__":
    main()
