"""The pages from a step down to the tokens of a turn, and the search."""

from dataclasses import replace

from markupsafe import Markup

from mage_async.errors import RunError
from mage_async.pages.group_page import group_page, turn_page
from mage_async.pages.trial_lists import select, step_page, trials_page
from mage_async.pages.turns import ShownTrial, TurnCredit, shown_tokens, shown_trial
from mage_services.view.asked import MOST_CONSIDERED, Asked, decode_of
from mage_services.view.index.run_reader import RunReader
from mage_services.view.text_search import search

MOST_BESIDE = 64
"""Trials of a group that are laid side by side."""


def step(asked: Asked) -> Markup:
    """A step: its groups and the rewards of their trials."""
    number = max(1, asked.numbers["step"])
    with RunReader(asked.run) as reader:
        last = reader.last_step()
        if number > max(1, last):
            raise RunError(f"there is no step {number} yet; the newest is {last}")
        frame = asked.frame(
            reader,
            f"step {number}",
            before=f"step/{number - 1}" if number > 1 else "",
            after=f"step/{number + 1}" if number < last else "",
        )
        groups = reader.groups_of(number)
        listed = reader.trials_of([group.number for group in groups])
        choice = replace(asked.choice(0, 0), first=number, last=number)
        return step_page(frame, reader.step(number), groups, listed, choice)


def trials(asked: Asked) -> Markup:
    """Trials of many steps, narrowed by reward, member and text."""
    with RunReader(asked.run) as reader:
        choice = asked.choice(1, reader.last_step())
        listed = reader.trials_between(choice.first, choice.last, MOST_CONSIDERED)
        frame = asked.frame(reader, "trials", "trials")
        chosen = select(listed, choice, f"{frame.home}trials")
        found = None
        if choice.text:
            decode, fault = decode_of(asked.run)
            if fault:
                raise RunError(f"text cannot be searched. {fault}")
            found = search(reader, chosen.trials, decode, choice.text, choice.behind or 0)
        is_cut = len(listed) == MOST_CONSIDERED
        return trials_page(frame, listed, chosen, choice, found, is_cut=is_cut)


def group(asked: Asked) -> Markup:
    """The trials of a group side by side."""
    number = asked.numbers["group"]
    decode, fault = decode_of(asked.run)
    missing = [fault] if fault else []
    with RunReader(asked.run) as reader:
        of = reader.group(number)
        credit, unknown = _credit(asked, of.step)
        shown: list[ShownTrial] = []
        for listed in reader.trials_of([number])[:MOST_BESIDE]:
            try:
                trial = reader.load(number, listed.number)
                made = credit.get(f"{number}/{listed.number}", ())
                shown.append(shown_trial(trial, decode, of.step, made))
            except RunError as error:
                missing.append(str(error))
        beside = reader.groups_of(of.step) if of.step is not None else []
        numbers = [each.number for each in beside]
        place = numbers.index(number) if number in numbers else 0
        frame = asked.frame(
            reader,
            f"group {number}",
            above=[(f"step {of.step}", f"step/{of.step}")] if of.step is not None else [],
            before=f"group/{numbers[place - 1]}" if place > 0 else "",
            after=f"group/{numbers[place + 1]}" if place + 1 < len(numbers) else "",
        )
        marked = asked.number("trial", -1) if "trial" in asked.query else None
        missing += [unknown] if unknown else []
        return group_page(frame, of, shown, list(dict.fromkeys(missing)), marked)


def turn(asked: Asked) -> Markup:
    """One turn with its tokens."""
    number, index, place = (asked.numbers[name] for name in ("group", "trial", "turn"))
    decode, _ = decode_of(asked.run)
    with RunReader(asked.run) as reader:
        of = reader.group(number)
        trial = reader.load(number, index)
        if place >= len(trial.turns):
            raise RunError(f"trial {index} of group {number} has {len(trial.turns)} turns")
        found = trial.turns[place]
        credit, unknown = _credit(asked, of.step)
        shown = shown_trial(trial, decode, of.step, credit.get(f"{number}/{index}", ()))
        above = [(f"group {number}", f"group/{number}?trial={index}")]
        if of.step is not None:
            above.insert(0, (f"step {of.step}", f"step/{of.step}"))
        address = f"group/{number}/trial/{index}/turn/"
        frame = asked.frame(
            None,
            f"trial {index}, turn {place + 1}",
            above=above,
            before=f"{address}{place - 1}" if place else "",
            after=f"{address}{place + 1}" if place + 1 < len(trial.turns) else "",
        )
        tokens = list(shown_tokens(found, trial.segments[found.segment], decode, of.step))
        this = next(turn for row in shown.episodes for turn in row if turn.number == place)
        here = f"{frame.home}{address}{place}"
        return turn_page(frame, shown, this, tokens, asked.number("first", 0), here, unknown)


def _credit(asked: Asked, step: int | None) -> tuple[dict[str, list[TurnCredit]], str]:
    """What a step made of its trials' turns, and why that is not known."""
    if step is None:
        return {}, ""
    found, fault = asked.credits.ask(asked.run, step)
    return {name: [TurnCredit(*pair) for pair in pairs] for name, pairs in found.items()}, fault
