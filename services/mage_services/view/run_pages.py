"""The pages of a run by their address. Each gathers its data in a thread and fills its template."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from markupsafe import Markup

from mage_async.assembly import environment_of
from mage_async.config import config_file
from mage_async.config.schema import Config
from mage_async.doctor import Doctor, Finding
from mage_async.environments.catalogue import names
from mage_async.errors import MageError, RunError
from mage_async.inference.chat_files import load_chat
from mage_async.pages.overview import (
    MAX_POINTS,
    RunState,
    evaluation_page,
    memory_page,
    overview_page,
)
from mage_async.pages.processes import processes_page
from mage_async.pages.report import seconds_by_state
from mage_async.pages.run_lists import config_page
from mage_async.pages.templating import Frame, Link, progress_note, run_address
from mage_async.pages.trial_lists import (
    ListedTrial,
    SearchHit,
    SearchResult,
    TrialFilter,
    select,
    step_page,
    trials_page,
)
from mage_async.pages.turns import TurnCredit, group_page, shown_tokens, shown_trial, turn_page
from mage_async.results.run_directory import RunDirectory
from mage_async.results.run_files import RunRecords, read_document, read_lines
from mage_async.trials.trial_as_dict import Decode
from mage_services.view.credit_process import CreditCache
from mage_services.view.index import RunReader
from mage_services.view.run_watcher import changed_at, history_of, state_of

MAX_CONSIDERED = 5_000
"""Trials that a filter is applied to, the newest ones."""


@dataclass(frozen=True, slots=True)
class PageRequest:
    """A request for a page of a run."""

    base: str
    runs: Mapping[str, RunDirectory]
    name: str
    """Name of the run."""
    numbers: Mapping[str, int]
    """Numbers in the address by name: a step, a group, a trial, a turn."""
    query: Mapping[str, str]
    credits: CreditCache
    """Returns and advantages of turns."""
    fault: str = ""
    """Why the run's index no longer grows; empty if it does."""
    change: int = 0
    """Number of the last change that the page may show."""

    @property
    def run(self) -> RunDirectory:
        """Directory of the run."""
        return self.runs[self.name]

    def frame(
        self,
        reader: RunReader | None,
        title: str,
        tab: str | None = None,
        above: Sequence[tuple[str, str]] = (),
        before: str = "",
        after: str = "",
    ) -> Frame:
        """Return the frame of the page.

        Args:
            reader: index of the run, whose progress the page mentions; `None`: no mention.
            title: title of the page.
            tab: key of `TABS`; `None` if the page is below a tab.
            above: label and address of the pages between the run's and this one.
            before: address of the page before; all addresses are below the run's.
            after: address of the page after.
        """
        home = run_address(self.name)
        crumbs = [] if tab == "" else [Link(self.name, home)]
        crumbs += [Link(label, home + address) for label, address in above]
        note = self.fault or (progress_note(reader.progress()) if reader else "")
        before, after = (home + address if address else "" for address in (before, after))
        return Frame(self.base, title, self.name, tab, crumbs, before, after, note, self.change)

    def number(self, name: str, default: int) -> int:
        """Return a whole number of the query.

        Raises:
            RunError: the text is no whole number.
        """
        text = self.query.get(name, "")
        if not text:
            return default
        if not text.isascii() or not text.isdecimal() or len(text) > 15:
            raise RunError(f"{name} is a whole number of at most 15 digits, got {text[:40]!r}")
        return int(text)

    def trial_filter(self, first: int, last: int) -> TrialFilter:
        """Return the filter in the query; by default all trials of the steps `first` to `last`."""
        has_bin = bool(self.query.get("bin"))
        return TrialFilter(
            first=self.number("first", first),
            last=self.number("last", last),
            episode=self.number("episode", 0),
            bin=self.number("bin", 0) if has_bin else None,
            member=self.query.get("member", ""),
            only_invalid=bool(self.query.get("only_invalid")),
            text=self.query.get("text", "").strip(),
            skip=self.number("skip", 0),
        )


def config_of(run: RunDirectory) -> Config:
    """Read the configuration of a run, unless it was read before and has not changed.

    Raises:
        RunError: there is no configuration.
        ConfigError: it is not one of this version.
    """
    if not run.config.is_file():
        raise RunError(f"{run.root} is no run directory any more: it has no {run.config.name}")
    state = run.config.stat()
    return _config(run.config, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=8)
def _config(file: Path, _changed_ns: int, _size: int) -> Config:
    return config_file.load_recorded(file, imports=False)


def units_of(run: RunDirectory, config: Config) -> int | None:
    """Return the units of an episode, by which returns are divided; `None` if they are not known.

    A user's environment is not loaded: reading a run must not execute its code.
    """
    summary: dict[str, Any] = read_document(run.summary)
    if summary:
        return summary["environment"]["units"]
    return environment_of(config).facts.units if config.environment.name in names() else None


def decoder_of(run: RunDirectory) -> tuple[Decode, str]:
    """Return the decoder of a run's tokens, and why it gives only their ids, or ""."""
    file = run.policy / "tokenizer.json"
    return _decode(run.policy, changed_at(file))


@lru_cache(maxsize=8)
def _decode(policy: Path, _changed_at: float) -> tuple[Decode, str]:
    try:
        return load_chat(policy).decode, ""
    except MageError as error:
        return _token_ids, f"Tokens are shown by their numbers: {error}"


def _token_ids(tokens: Sequence[int]) -> str:
    return " ".join(f"⟨{token}⟩" for token in tokens)


# From a step down to the tokens of a turn, and the search in the text of trials.

MAX_SIDE_BY_SIDE = 64
"""Trials of a group on its page."""


def step(request: PageRequest) -> Markup:
    """Return the page of a step: its groups, and the rewards of their trials."""
    number = max(1, request.numbers["step"])
    with RunReader(request.run) as reader:
        last = reader.last_step()
        if number > max(1, last):
            raise RunError(f"there is no step {number} yet; the newest is {last}")
        frame = request.frame(
            reader,
            f"step {number}",
            before=f"step/{number - 1}" if number > 1 else "",
            after=f"step/{number + 1}" if number < last else "",
        )
        groups = reader.groups_of(number)
        listed = reader.trials_of([group.number for group in groups])
        wanted = replace(request.trial_filter(0, 0), first=number, last=number)
        return step_page(frame, reader.step(number), groups, listed, wanted)


def trials(request: PageRequest) -> Markup:
    """Return the page of the trials of some steps, narrowed by reward, member and text."""
    with RunReader(request.run) as reader:
        wanted = request.trial_filter(1, reader.last_step())
        listed = reader.trials_between(wanted.first, wanted.last, MAX_CONSIDERED)
        frame = request.frame(reader, "trials", "trials")
        selection = select(listed, wanted, f"{frame.home}trials")
        result = None
        if wanted.text:
            decode, fault = decoder_of(request.run)
            if fault:
                raise RunError(f"text cannot be searched. {fault}")
            result = search(reader, selection.trials, decode, wanted.text, wanted.skip or 0)
        is_cut = len(listed) == MAX_CONSIDERED
        return trials_page(frame, listed, selection, wanted, result, is_cut=is_cut)


def group(request: PageRequest) -> Markup:
    """Return the page of a group, with its trials side by side."""
    number = request.numbers["group"]
    decode, fault = decoder_of(request.run)
    missing = [fault] if fault else []
    with RunReader(request.run) as reader:
        found = reader.group(number)
        credit, unknown = _credit(request, found.step)
        shown = []
        for listed in reader.trials_of([number])[:MAX_SIDE_BY_SIDE]:
            try:
                trial = reader.load(number, listed.number)
                known = credit.get(f"{number}/{listed.number}", ())
                shown.append(shown_trial(trial, decode, found.step, known))
            except RunError as error:
                missing.append(str(error))
        neighbours = reader.groups_of(found.step) if found.step is not None else []
        numbers = [each.number for each in neighbours]
        place = numbers.index(number) if number in numbers else 0
        frame = request.frame(
            reader,
            f"group {number}",
            above=_step_above(found.step),
            before=f"group/{numbers[place - 1]}" if place > 0 else "",
            after=f"group/{numbers[place + 1]}" if place + 1 < len(numbers) else "",
        )
        marked = request.number("trial", -1) if "trial" in request.query else None
        missing += [unknown] if unknown else []
        return group_page(frame, found, shown, list(dict.fromkeys(missing)), marked)


def turn(request: PageRequest) -> Markup:
    """Return the page of one turn with its tokens."""
    number, index, place = (request.numbers[name] for name in ("group", "trial", "turn"))
    decode, _ = decoder_of(request.run)
    with RunReader(request.run) as reader:
        step = reader.group(number).step
        trial = reader.load(number, index)
        if place >= len(trial.turns):
            raise RunError(f"trial {index} of group {number} has {len(trial.turns)} turns")
        credit, unknown = _credit(request, step)
    shown = shown_trial(trial, decode, step, credit.get(f"{number}/{index}", ()))
    turns = [turn for episode in shown.episodes for turn in episode.turns]
    segment = trial.segments[trial.turns[place].segment]
    tokens = list(shown_tokens(trial.turns[place], segment, decode, step))
    address = f"group/{number}/trial/{index}/turn/"
    frame = request.frame(
        None,
        f"trial {index}, turn {place + 1}",
        above=[*_step_above(step), (f"group {number}", f"group/{number}?trial={index}")],
        before=f"{address}{place - 1}" if place else "",
        after=f"{address}{place + 1}" if place + 1 < len(turns) else "",
    )
    here, first = f"{frame.home}{address}{place}", request.number("first", 0)
    return turn_page(frame, shown, turns[place], tokens, first, here, unknown)


def _step_above(step: int | None) -> list[tuple[str, str]]:
    return [(f"step {step}", f"step/{step}")] if step is not None else []


def _credit(request: PageRequest, step: int | None) -> tuple[dict[str, list[TurnCredit]], str]:
    """Return the credit of a step's turns by trial, and why it is not known."""
    if step is None:
        return {}, ""
    found, fault = request.credits.get(request.run, step)
    return {name: [TurnCredit(*pair) for pair in pairs] for name, pairs in found.items()}, fault


PART_S = 0.15
"""Seconds of one part of a search; its page links to the next part."""
MAX_HITS = 50
CONTEXT = 60
"""Characters shown on either side of a hit."""


def search(
    reader: RunReader, trials: Sequence[ListedTrial], decode: Decode, text: str, skip: int
) -> SearchResult:
    """Search `trials[skip:]` for a text, in any case, for at most `PART_S` seconds."""
    hits: list[SearchHit] = []
    missing, number, until = "", skip, time.monotonic() + PART_S
    while number < len(trials) and len(hits) < MAX_HITS and time.monotonic() < until:
        trial = trials[number]
        number += 1
        try:
            segments = reader.load(trial.group, trial.number).segments
        except RunError as error:
            missing = str(error)
            continue
        for segment in segments:
            whole = decode(segment.tokens.tolist())
            if (start := whole.lower().find(text.lower())) >= 0:
                stop = start + len(text)
                before, after = whole[max(0, start - CONTEXT) : start], whole[stop : stop + CONTEXT]
                hits.append(SearchHit(trial, before, whole[start:stop], after))
                break
    return SearchResult(hits, number - skip, number if number < len(trials) else None, missing)


# The run as a whole.

MAX_GROUPS = 8
"""Groups in flight that the overview shows."""
MAX_RESTARTS = 5
"""Restarts of processes that the overview shows."""
LOG_BYTES = 4000
"""Bytes at the end of each log that the page of processes shows."""


def overview(request: PageRequest) -> Markup:
    """Return the first page of a run."""
    run = request.run
    with RunReader(run) as reader:
        config, times = config_of(run), read_document(run.times)
        records = _records(reader, config)
        history = history_of(run)
        groups = reader.groups_in_flight(MAX_GROUPS)
        state = RunState(
            records=records,
            state=state_of(run, history),
            step=reader.last_step(),
            seconds_by_state=_seconds_by_state(run, records),
            trials=times.get("trials") or records.learner.get("trials") or {},
            findings=examined(reader, records),
            restarts=history.restarts[:MAX_RESTARTS],
            groups=groups,
            listed=reader.trials_of([group.number for group in groups]),
            units=units_of(run, config),
        )
        return overview_page(request.frame(reader, request.name, ""), state)


def evaluation(request: PageRequest) -> Markup:
    """Return the page of evaluations."""
    with RunReader(request.run) as reader:
        records = _records(reader, config_of(request.run))
        summary = read_document(request.run.summary)
        frame = request.frame(reader, "evaluation", "evaluation")
        return evaluation_page(frame, records, summary)


def memory(request: PageRequest) -> Markup:
    """Return the page of one version of the graph memory."""
    lines = {line["version"]: line for line in read_lines(request.run.memory)}
    last = max(lines, default=0)
    version = request.number("version", last)
    if lines and version not in lines:
        raise RunError(f"there is no version {version} of the memory; the newest is {last}")
    before, after = (
        f"memory?version={near}" if near in lines else "" for near in (version - 1, version + 1)
    )
    frame = request.frame(None, "memory", "memory", before=before, after=after)
    return memory_page(frame, lines.get(version), last)


def processes(request: PageRequest) -> Markup:
    """Return the page of a run's processes."""
    run = request.run
    with RunReader(run) as reader:
        history = history_of(run)
        return processes_page(
            request.frame(None, "processes", "processes"),
            state_of(run, history),
            history,
            _seconds_by_state(run, _records(reader, config_of(run))),
            _log_tails(run),
            time.time(),
        )


def config(request: PageRequest) -> Markup:
    """Return the page of a run's configuration, next to another run's if one was chosen."""
    others = [name for name in request.runs if name != request.name]
    other = request.query.get("other", "")
    if other and other not in others:
        raise RunError(f"there is no run {other!r} here")
    against = config_of(request.runs[other]) if other else None
    frame = request.frame(None, "configuration", "config")
    return config_page(frame, config_of(request.run), others, other, against)


PAGES: dict[str, Callable[[PageRequest], Markup]] = {
    "": overview,
    "step/{step}": step,
    "group/{group}": group,
    "group/{group}/trial/{trial}/turn/{turn}": turn,
    "trials": trials,
    "evaluation": evaluation,
    "memory": memory,
    "processes": processes,
    "config": config,
}
"""Pages by address; the parts in braces are numbers."""


def _records(reader: RunReader, config: Config) -> RunRecords:
    """Read the records of a run with at most `MAX_POINTS` steps and evaluations, from its index."""
    run = reader.run
    return RunRecords(
        config,
        reader.metrics(MAX_POINTS),
        reader.curve(MAX_POINTS),
        read_document(run.evaluation),
        read_document(run.learner),
        [],
        read_document(run.supervisor),
    )


def _seconds_by_state(run: RunDirectory, records: RunRecords) -> dict[str, dict[str, float]]:
    """Return the seconds of each process by state: final ones, or newer ones of the last step."""
    final = seconds_by_state(records)
    if changed_at(run.times) <= changed_at(run.supervisor):
        return final
    return final | read_document(run.times)["blocked_s"]


def _log_tails(run: RunDirectory) -> dict[str, str]:
    """Return the end of each process's log."""
    logs = {}
    for file in sorted(run.logs.glob("*.log")):
        with file.open("rb") as source:
            source.seek(max(0, source.seek(0, 2) - LOG_BYTES))
            logs[file.stem] = source.read().decode(errors="replace").strip()
    return logs


# The doctor keeps what it has found in each run, so that a page examines only new steps.

MAX_EXAMINED = 2000
"""Steps, the newest ones, that the doctor examines of a run whose page is opened first."""


@dataclass(slots=True)
class _Examination:
    doctor: Doctor
    began: tuple[float, bool]
    """Time of the configuration, and whether the run has ended: they tell the run from another one
    in its place, and an ended run from one that goes on."""
    num_evaluations: int = -1
    """Evaluations that the doctor has examined; -1: it has not looked for any."""


_examinations: dict[Path, _Examination] = {}
_lock = threading.Lock()
"""Held while the doctor works: pages are made in threads, and two of one run share a doctor."""


def examined(reader: RunReader, records: RunRecords) -> list[Finding]:
    """Return all findings of a run so far, after examining its new steps and evaluations."""
    with _lock:
        known = _examination(reader, records)
        new = reader.last_step() - known.doctor.last_step
        for record in reader.newest_metrics(min(new, MAX_EXAMINED)):
            known.doctor.step(record)
        if len(records.curve) != known.num_evaluations:
            known.num_evaluations = len(records.curve)
            known.doctor.conclude(records)
        return list(known.doctor.findings)


def _examination(reader: RunReader, records: RunRecords) -> _Examination:
    """Return the examination of a run; a new one if the run began anew, was cut or has ended."""
    run = reader.run
    began = (changed_at(run.config), bool(records.evaluation))
    known = _examinations.get(run.root)
    if known is None or known.began != began or reader.last_step() < known.doctor.last_step:
        known = _examinations[run.root] = _Examination(Doctor.recorded(records), began)
    return known
