"""Play a family of small text games: a new game is generated for each task.

Rules: a task draws one of eleven structures (a hidden mapping, an arm that pays, an opponent with a
pattern, …), its size, its words for things, actions and answers, its phrasing and layout, and
whether a reply names the right action or only says right or wrong. These, and the hidden object,
stay the same in all episodes of a task. A policy memorises everything that all tasks share, so the
tasks share as little as possible. A return lies between 0 and 1. There is no chance.

Held-out tasks differ from training tasks in one of three ways, by the option `heldout`: other words
and phrasings, other sizes, or three structures that no training task has.
"""

import itertools
import random
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple, get_args

from mage_async.environments.environment import (
    Chance,
    Outcome,
    Split,
    Splits,
    check_one_of,
    check_texts,
    check_whole,
    named,
)
from mage_async.environments.games.game import Game, SoloPlay, TrialScript, facts_of, num_equal
from mage_async.errors import ConfigError, EnvironmentFault
from mage_async.trajectory import Task

Heldout = Literal["words", "sizes", "structures"]
Feedback = Literal["both", "told", "right_or_wrong"]
Hidden = tuple[Any, ...]
"""What a game hides, as a tuple whose meaning depends on the structure: actions, things, or an
index.
"""

# Words and phrases of the tasks: those of training, and those of the held-out split `words`.


def _words(text: str) -> tuple[str, ...]:
    """Split a text into its words."""
    return tuple(text.split())


THINGS = {
    "train": _words(
        "red green blue gold pink grey brown black white orange door box cup lamp book chair table "
        "window bell clock coin ring key drum flag"
    ),
    "words": _words(
        "river hill lake forest tower bridge castle garden apple bread milk corn rice salt ship "
        "train"
    ),
}
"""Words for the things of a task. Tasks of the held-out split `words` use the set "words", and all
other tasks the set "train".
"""
ACTIONS = {
    "train": _words("left right up down push pull open close lift drop turn hold"),
    "words": _words("north south east west sing dance run sleep"),
}
"""Words for actions, by set, as in `THINGS`."""
ANSWERS = {
    "train": (
        ("yes", "no"),
        ("right", "wrong"),
        ("good", "bad"),
        ("true", "false"),
        ("hit", "miss"),
        ("warm", "cold"),
        ("correct", "mistaken"),
        ("done", "failed"),
        ("fine", "poor"),
        ("light", "dark"),
    ),
    "words": (("win", "lose"), ("success", "failure"), ("sugar", "salt"), ("up it goes", "alas")),
}
"""Pairs of words for a right and a wrong action, by set, as in `THINGS`.

Some of them are things or actions too ("right", "salt", "light"), so the meaning of a word depends
on the rules of the game alone.
"""
LISTS = {
    "train": ("Actions: {}.", "Choose {}.", "You can say {}.", "[{}]"),
    "words": ("Possible: {}.", "Say one of {}."),
}
"""Forms in which the legal actions are listed, by set, as in `THINGS`."""
JOINTS = {"train": (" ", " | ", " ... ", " - "), "words": (" / ", " => ")}
"""Texts between the parts of an observation, by set, as in `THINGS`."""
INVALID = "invalid"
MAX_TURNS = 16
"""Upper bound of the number of turns of an episode, over all structures."""
TWIN = "~"
"""Suffix of the name of a task variant's twin: the same game with another hidden object."""


class Turn(NamedTuple):
    """Hold the reply to the last action, its reward, and the next question with its legal
    actions.
    """

    reply: str
    question: str
    legal: Sequence[str]
    reward: float


Episode = Generator[Turn, str, None]
"""Yields turns and is sent actions; the last turn has no legal action."""


@dataclass(frozen=True, slots=True)
class Look:
    """Hold the words, the phrasing and the size of a task."""

    things: tuple[str, ...]
    """Words for the things of the task."""
    actions: tuple[str, ...]
    answers: tuple[str, str]
    """Words for a right and for a wrong action."""
    list_form: str
    """Sentence that lists the actions, with `{}` for them."""
    joint: str
    """Text between the parts of an observation."""
    phrasing: int
    """Index of the task's wording in `Structure.phrasings`."""
    tells: bool
    """Whether the reply to a wrong action names the right one."""

    def reply_to(self, is_right: bool, right: str = "") -> str:
        """Return the reply to an action.

        Args:
            is_right: Whether the action was right.
            right: Text that names the right action; "" if the structure never names it.
        """
        right_word, wrong_word = self.answers
        answer = right_word if is_right else wrong_word
        return f"{answer}, {right}" if self.tells and right else answer

    def listed(self, words: Sequence[str]) -> str:
        """Return the sentence that lists actions."""
        return self.list_form.format(", ".join(words))


@dataclass(frozen=True, slots=True)
class Structure:
    """Describe a kind of game."""

    phrasings: tuple[str, str, str]
    """The rules in three wordings, the last one for the split `words`; `{}` stands for the
    things.
    """
    hidden: Callable[[Look], Sequence[Hidden]]
    """Returns everything that a game of this look may hide."""
    episode: Callable[[Look, Hidden], Episode]
    """Begins an episode of a game that hides a given object."""
    sizes: dict[str, tuple[tuple[int, int], ...]]
    """Possible numbers of things and of actions, in training and in the split `sizes`."""


def _codes(look: Look) -> list[Hidden]:
    """Return every assignment of one action to each thing."""
    return list(itertools.product(look.actions, repeat=len(look.things)))


def _one_action(look: Look) -> list[Hidden]:
    """Return every single action."""
    return [(action,) for action in look.actions]


def _ask_each(
    look: Look, questions: Sequence[str], rights: Sequence[str], legal: Sequence[Sequence[str]]
) -> Episode:
    """Ask one question after the other, each with one right action.

    Args:
        questions: Texts of the questions.
        rights: Right action of each question.
        legal: Legal actions of each question.
    """
    reply, reward = "", 0.0
    for question, right, actions in zip(questions, rights, legal, strict=True):
        action = yield Turn(reply, question, actions, reward)
        reply, reward = look.reply_to(action == right, right), (action == right) / len(questions)
    yield Turn(reply, "", (), reward)


def _mapping(look: Look, hidden: Hidden) -> Episode:
    """Play "mapping": the agent names the right action of each thing."""
    questions = [f"{thing}:" for thing in look.things]
    return _ask_each(look, questions, hidden, [look.actions] * len(questions))


def _arm(look: Look, hidden: Hidden) -> Episode:
    """Play "arm": one action pays in every turn."""
    # The answer never names the right arm, because it is the same in all turns.
    reply, reward, turns = "", 0.0, len(look.things)
    for number in range(turns):
        action = yield Turn(reply, f"{number + 1}:", look.actions, reward)
        reply, reward = look.reply_to(action == hidden[0]), (action == hidden[0]) / turns
    yield Turn(reply, "", (), reward)


def _trap(look: Look, hidden: Hidden) -> Episode:
    """Play "trap": every action but one pays."""
    reply, reward, turns = "", 0.0, len(look.things)
    for number in range(turns):
        action = yield Turn(reply, f"{number + 1}:", look.actions, reward)
        pays = action in look.actions and action != hidden[0]
        reply, reward = look.reply_to(pays), pays / turns
    yield Turn(reply, "", (), reward)


def _opponent(look: Look, hidden: Hidden) -> Episode:
    """Play "opponent": the agent answers a fixed sequence of moves."""
    # Each action beats the one before it in the list, the first one beats the last.
    beats = {action: look.actions[place - 1] for place, action in enumerate(look.actions)}
    wins = {beaten: action for action, beaten in beats.items()}
    reply, reward = "", 0.0
    for number, move in enumerate(hidden, 1):
        action = yield Turn(reply, f"{number}:", look.actions, reward)
        is_won = action == wins[move]
        reply, reward = look.reply_to(is_won, f"it played {move}"), is_won / len(hidden)
    yield Turn(reply, "", (), reward)


def _order(look: Look, hidden: Hidden) -> Episode:
    """Play "order": the agent names the thing at each place."""
    questions = [f"place {number}:" for number in range(1, len(hidden) + 1)]
    return _ask_each(look, questions, hidden, [look.things] * len(questions))


def _code(look: Look, hidden: Hidden) -> Episode:
    """Play "code": the agent enters the signs of a code, and sees the number of right ones at the
    end.
    """
    # Each sign of the code is paid at once, but the observation reports it only at the end.
    right, reward = 0, 0.0
    for number, sign in enumerate(hidden, 1):
        action = yield Turn("", f"sign {number}:", look.actions, reward)
        right, reward = right + (action == sign), (action == sign) / len(hidden)
    reply = f"{right} of {len(hidden)} {look.answers[0]}"
    yield Turn(reply, "", (), reward)


def _places(look: Look) -> dict[str, list[str]]:
    """Return the neighbours of each place. The places form a ring; with five places or more there
    is a shortcut across it.
    """
    things = look.things
    ways = {thing: [things[n - 1], things[(n + 1) % len(things)]] for n, thing in enumerate(things)}
    if len(things) > 4:
        ways[things[0]].append(things[2])
        ways[things[2]].append(things[0])
    return ways


def _distance(look: Look, start: str, goal: str) -> int:
    """Return the number of steps on the shortest way, by breadth-first search."""
    ways, found, waiting = _places(look), {start: 0}, deque([start])
    while waiting:
        place = waiting.popleft()
        for other in ways[place]:
            if other not in found:
                found[other] = found[place] + 1
                waiting.append(other)
    return found[goal]


def _maze(look: Look, hidden: Hidden) -> Episode:
    """Play "maze": the agent walks to a hidden place; each step over the shortest way costs
    reward.
    """
    ways, place, most = _places(look), look.things[0], 2 * len(look.things)
    shortest = _distance(look, place, hidden[0])
    reply = ""
    for steps in range(1, most + 1):
        action = yield Turn(reply, f"you are at {place}:", ways[place], 0.0)
        place = action if action in ways[place] else place
        if place == hidden[0]:
            yield Turn(look.reply_to(True), "", (), 1 - (steps - shortest) / most)
            return
        reply = look.reply_to(False)
    yield Turn(reply, "", (), 0.0)


def _category_rules(look: Look) -> list[Hidden]:
    """Return every rule: which word of a pair matters, 0 for the first or 1 for the second, and
    then the action for each value of that word. Rules with one action for all values are left out.
    """
    # Half of the things are the values of the first word, the others those of the second.
    actions = itertools.product(look.actions[:2], repeat=len(look.things) // 2)
    every = [each for each in actions if len(set(each)) > 1]
    return [(place, *each) for place in (0, 1) for each in every]


def _category(look: Look, hidden: Hidden) -> Episode:
    """Play "category": one word of each pair decides which action is right."""
    middle = len(look.things) // 2
    words = look.things[:middle], look.things[middle:]
    pairs = list(itertools.product(*words))
    questions = [f"{first} {second}:" for first, second in pairs]
    place, *actions = hidden
    rights = [actions[words[place].index(pair[place])] for pair in pairs]
    return _ask_each(look, questions, rights, [look.actions[:2]] * len(questions))


def _partners(look: Look) -> list[Hidden]:
    """Return every way to give each thing another thing as its partner."""
    return [
        each
        for each in itertools.permutations(look.things)
        if all(one != other for one, other in zip(each, look.things, strict=True))
    ]


def _pairs(look: Look, hidden: Hidden) -> Episode:
    """Play "pairs": the agent names the partner of each thing."""
    questions = [f"{thing} wants:" for thing in look.things]
    legal = [[other for other in look.things if other != thing] for thing in look.things]
    return _ask_each(look, questions, hidden, legal)


def _lock(look: Look, hidden: Hidden) -> Episode:
    """Play "lock": the agent presses a hidden sequence of buttons, and a wrong button sends it back
    to the start. Each position of the sequence is paid when it is reached for the first time.
    """
    done, best, turns = 0, 0, 2 * len(hidden)
    reply = ""
    reward = 0.0
    for _ in range(turns):
        action = yield Turn(reply, f"{done} pressed:", look.actions, reward)
        is_right = action == hidden[done]
        done = done + 1 if is_right else 0
        reply, reward = look.reply_to(is_right), max(0, done - best) / len(hidden)
        best = max(best, done)
        if done == len(hidden):
            break
    yield Turn(reply, "", (), reward)


def _search(look: Look, hidden: Hidden) -> Episode:
    """Play "search": the agent guesses the hidden thing of a row, and learns on which side of its
    guess the thing lies.
    """
    turns = len(look.things)
    reply = ""
    for number in range(turns):
        action = yield Turn(reply, f"guess {number + 1}:", look.things, 0.0)
        place = look.things.index(action) if action in look.things else -1
        if place == hidden[0]:
            yield Turn(look.reply_to(True), "", (), 1 - number / turns)
            return
        reply = look.reply_to(False)
        if place >= 0:  # an invalid action has no side
            reply += ", after it" if place < hidden[0] else ", before it"
    yield Turn(reply, "", (), 0.0)


# Numbers of things and of actions, for the structures below.
_FLAT: dict[str, tuple[tuple[int, int], ...]] = {
    "train": ((3, 2), (3, 3), (4, 2)),
    "sizes": ((5, 2), (4, 3), (5, 3)),
}
_FEW: dict[str, tuple[tuple[int, int], ...]] = {
    "train": ((3, 2), (3, 3), (4, 3)),
    "sizes": ((4, 4), (5, 5), (6, 4)),
}
_ROW: dict[str, tuple[tuple[int, int], ...]] = {
    "train": ((3, 2), (4, 2)),
    "sizes": ((5, 2),),
}
STRUCTURES = {
    "mapping": Structure(
        (
            "Each of {} wants one action, always the same.",
            "For each thing one action is right and stays right: {}.",
            "There are {}; every one of them has its own action.",
        ),
        _codes,
        _mapping,
        _FLAT,
    ),
    "arm": Structure(
        (
            "One action always pays, the others never do.",
            "Exactly one of the actions earns something.",
            "Find the only action that is worth anything.",
        ),
        _one_action,
        _arm,
        _FEW,
    ),
    "opponent": Structure(
        (
            "Another player repeats its moves in every episode. Each move beats the one listed "
            "before it, and the first beats the last.",
            "Beat a player who always plays the same row of moves. A move wins against its "
            "neighbour to the left in the list, the first against the last.",
            "Your rival never changes its sequence. Every move defeats the one before it in the "
            "list; the first defeats the last.",
        ),
        _codes,
        _opponent,
        {"train": ((3, 3), (2, 3)), "sizes": ((4, 3), (3, 4))},
    ),
    "order": Structure(
        (
            "The things {} stand in a hidden order.",
            "Say in which order {} come.",
            "A queue is made of {}; who stands where?",
        ),
        lambda look: list(itertools.permutations(look.things)),
        _order,
        _ROW,
    ),
    "code": Structure(
        (
            "A code of signs is hidden; after the last one you are told how many were right.",
            "Write the secret signs one by one. Only their number of hits is told, at the end.",
            "Guess the whole secret; the count of matches follows its last sign.",
        ),
        _codes,
        _code,
        _FLAT,
    ),
    "maze": Structure(
        (
            "You walk between places, and one of them is the goal.",
            "Find the goal. Name the place you go to next.",
            "Somewhere among the places lies a treasure; walk there.",
        ),
        lambda look: [(place,) for place in look.things[1:]],  # all places but the start
        _maze,
        {"train": ((4, 2), (5, 2)), "sizes": ((6, 2), (7, 2))},
    ),
    "category": Structure(
        (
            "Either the first or the second word of a thing decides which action is right.",
            "One of the two words of each thing matters, and says what to do.",
            "Things have two words; just one of them tells the action.",
        ),
        _category_rules,
        _category,
        {"train": ((4, 2),), "sizes": ((6, 2),)},
    ),
    "pairs": Structure(
        (
            "Each of {} wants another one of them, always the same.",
            "Every thing belongs to another: {}. Find which.",
            "There are {}; who goes with whom?",
        ),
        _partners,
        _pairs,
        _ROW,
    ),
    "search": Structure(
        (
            "One thing of the row {} is hidden.",
            "Something lies at one of {}, which stand in this row.",
            "From first to last: {}. Where is it?",
        ),
        lambda look: [(index,) for index in range(len(look.things))],
        _search,
        {"train": ((4, 2), (5, 2)), "sizes": ((7, 2),)},
    ),
    "lock": Structure(
        (
            "Press the right buttons one after the other; a wrong one sends you back to the start.",
            "A lock opens to one row of buttons. A mistake begins it anew.",
            "Enter the combination; every slip costs all that was entered.",
        ),
        _codes,
        _lock,
        _FLAT,
    ),
    "trap": Structure(
        (
            "One action is a trap, all others pay.",
            "Avoid the only action that earns nothing.",
            "All actions but one are worth the same; find out which to leave alone.",
        ),
        _one_action,
        _trap,
        _FEW,
    ),
}
HELD_OUT = ("search", "lock", "trap")
"""Structures that are trained on only if the option `structures` names them."""
TRAINED = tuple(name for name in STRUCTURES if name not in HELD_OUT)
"""Structures to train on by default."""


@dataclass(frozen=True)
class SmallGame:
    """Describe one task: a structure, its look, and the hidden object."""

    structure: str
    look: Look
    hidden: Hidden

    @property
    def rules(self) -> str:
        """The rules, in the task's own words."""
        look, structure = self.look, STRUCTURES[self.structure]
        text = structure.phrasings[look.phrasing].format(", ".join(look.things))
        # If actions differ from turn to turn, the question lists them instead.
        return text if self.lists_each_turn else f"{text} {look.listed(self.listed_actions)}"

    @property
    def lists_each_turn(self) -> bool:
        """Whether each turn has actions of its own."""
        return self.structure in ("maze", "pairs")

    @property
    def listed_actions(self) -> Sequence[str]:
        """The actions of all turns."""
        return next(self.begin(self.hidden)).legal

    def begin(self, hidden: Hidden) -> Episode:
        """Begin an episode of this game in which `hidden` is hidden."""
        return STRUCTURES[self.structure].episode(self.look, hidden)

    def every_hidden(self) -> Sequence[Hidden]:
        """Return everything that may be hidden in this game."""
        return STRUCTURES[self.structure].hidden(self.look)


@lru_cache(maxsize=8192)
def game_of(member: str, feedback: Feedback = "both") -> SmallGame:
    """Return the game of a task variant, such as `train-mapping-17` or `sizes-arm-3`. A name that
    ends with `~` is the same game with something else hidden, as different as possible.

    Raises:
        EnvironmentFault: there is no such variant.
    """
    split, name = _parts(member)
    structure, source = STRUCTURES[name], random.Random(f"family/{member.removesuffix(TWIN)}")
    pool = "words" if split == "words" else "train"
    num_things, num_actions = source.choice(
        structure.sizes["sizes" if split == "sizes" else "train"]
    )
    # One number is drawn whatever `feedback` is, so all other draws of a task stay the same.
    tells = {"told": True, "right_or_wrong": False, "both": source.random() < 0.5}[feedback]
    look = Look(
        tuple(source.sample(THINGS[pool], num_things)),
        tuple(source.sample(ACTIONS[pool], num_actions)),
        source.choice(ANSWERS[pool]),
        source.choice(LISTS[pool]),
        source.choice(JOINTS[pool]),
        2 if pool == "words" else source.randrange(2),
        tells,
    )
    every = structure.hidden(look)
    hidden = source.choice(every)
    if member.endswith(TWIN):
        agree = {each: num_equal(each, hidden) for each in every if each != hidden}
        least = min(agree.values())
        hidden = source.choice([each for each, equal in agree.items() if equal == least])
    return SmallGame(name, look, hidden)


def _parts(member: str) -> tuple[str, str]:
    """Return the split and the structure of a task variant.

    Raises:
        EnvironmentFault: there is no such variant.
    """
    split, _, rest = member.removesuffix(TWIN).partition("-")
    name, _, number = rest.partition("-")
    if name not in STRUCTURES or split not in ("train", *get_args(Heldout)) or not number.isdigit():
        raise EnvironmentFault(f"family: no game is called {member!r}; one is called 'train-arm-0'")
    return split, name


class FamilyPlay(SoloPlay):
    """Play one episode of a small game. The anchor, which is equal for equal states, is the number
    of the turn, and the question.
    """

    def __init__(self, game: SmallGame, chance: Chance) -> None:
        self.game, self.chance = game, chance
        self._episode = game.begin(game.hidden)
        self._turn = next(self._episode)
        self.done: list[str] = []
        """Actions so far."""
        self.seen = [self._turn]
        """Turns so far."""
        self.observation = f"{game.rules} {self._question_text()}"

    @property
    def anchor(self) -> str:
        """The number of the turn, and its question."""
        return f"{len(self.done)} {self._turn.question}"

    def actions(self) -> Sequence[str]:
        """Return the actions of this turn."""
        return tuple(self._turn.legal)

    def apply(self, action: str) -> Outcome:
        """Take an action; an invalid one counts as a wrong one."""
        is_valid = action in self._turn.legal
        self._turn = self._episode.send(action if is_valid else INVALID)
        self.done.append(action if is_valid else INVALID)
        self.seen.append(self._turn)
        is_done = not self._turn.legal
        parts = [INVALID] if not is_valid else []
        parts += [self._turn.reply] if self._turn.reply else []
        parts += [] if is_done else [self._question_text()]
        text = self.game.look.joint.join(parts)
        return Outcome(text, self._turn.reward, is_valid, is_done)

    def _question_text(self) -> str:
        """Return the question of this turn, with its actions if they differ from turn to turn."""
        question = self._turn.question
        if self.game.lists_each_turn:
            return f"{question} {self.game.look.listed(self._turn.legal)}"
        return question


@dataclass(slots=True)
class FamilyScript(TrialScript[FamilyPlay]):
    """Play by inference: collect the candidates, which are the hidden objects that agree with the
    replies so far, and take the action with the largest mean reward over a sample of 64 of them.

    A maze, a search and a code pay late: for each of them `action` has a rule of its own.
    """

    remembers: bool = True
    """Whether the replies of earlier episodes count too."""
    slip: float = 0.0
    """Probability of taking a random legal action instead."""

    def action(self, play: FamilyPlay) -> str:
        """Return the next action."""
        legal = play.legal_actions()
        if self.source.random() < self.slip:
            return self.source.choice(legal)
        seen = self.plays if self.remembers else [play]
        candidates = [
            hidden
            for hidden in play.game.every_hidden()
            if all(_agrees(each, hidden) for each in seen)
        ]
        # There may be many candidates; 64 are enough to choose an action.
        candidates = self.source.sample(candidates, min(len(candidates), 64))
        if play.game.structure == "maze":
            return self._way(play, legal, [hidden[0] for hidden in candidates])
        if play.game.structure == "search":
            # After a guess at the middle place, at most half of the candidates are left.
            places: list[int] = sorted(hidden[0] for hidden in candidates)
            return play.game.look.things[places[len(places) // 2]]
        if play.game.structure == "code":
            return self._fitting(play, candidates)
        worth = {
            action: sum(_pays(play, hidden, action) for hidden in candidates) for action in legal
        }
        most = max(worth.values())
        return self.source.choice([action for action in legal if worth[action] == most])

    def _fitting(self, play: FamilyPlay, candidates: Sequence[Hidden]) -> str:
        """Return the next sign of a candidate that begins with the signs of this episode."""
        begun = tuple(play.done)
        fits = [each for each in candidates if each[: len(begun)] == begun] or candidates
        return str(self.source.choice(fits)[len(begun)])

    def _way(self, play: FamilyPlay, legal: Sequence[str], goals: Sequence[str]) -> str:
        """Return the first step to the nearest place that may be the goal."""
        look = play.game.look
        return min(
            self.source.sample(legal, len(legal)),
            key=lambda place: min(_distance(look, place, goal) for goal in goals),
        )


def _agrees(play: FamilyPlay, hidden: Hidden) -> bool:
    """Return whether this hidden object explains the replies of an episode so far."""
    episode = play.game.begin(hidden)
    turn = next(episode)
    # Rewards (the last field of a turn) are not compared: the agent does not see them.
    for action, seen in zip(play.done, play.seen[1:], strict=True):
        if not turn.legal:
            return False
        turn = episode.send(action)
        if turn[:3] != seen[:3]:
            return False
    return True


def _pays(play: FamilyPlay, hidden: Hidden, action: str) -> float:
    """Return the reward of an action if the task hides this object."""
    episode = play.game.begin(hidden)
    next(episode)
    for done in play.done:
        episode.send(done)
    return episode.send(action).reward


class Family(Game[str]):
    """Play small games, a new one in each task; the task variant is its name, such as
    `train-mapping-17`.

    Args:
        structures: Number of structures that are trained on, from 1 to 8, in the order of
            `STRUCTURES`; or their names, which may be those of held-out structures too.
        heldout: What differs in held-out tasks from training tasks: the `words` and phrasings, the
            `sizes`, or the `structures`, which are then those of `HELD_OUT` that are not trained
            on.
        feedback: Whether the reply to each action names the right one (`told`) or not
            (`right_or_wrong`), in structures that may name it; `both` draws it for each task.
        games: Number of training games of each structure; a quarter as many are held out. Each game
            makes two tasks: itself, and its twin with another hidden object.

    Raises:
        ConfigError: an option is out of its range, or `structures` is empty or names one twice.
    """

    num_reference_trials = 64

    def __init__(
        self,
        structures: int | Sequence[str] = len(TRAINED),
        heldout: Heldout = "words",
        feedback: Feedback = "both",
        games: int = 512,
    ) -> None:
        check_one_of("family", "heldout", heldout, get_args(Heldout))
        check_one_of("family", "feedback", feedback, get_args(Feedback))
        check_whole("family", "games", games, 8, 1_000_000)
        if isinstance(structures, int):
            check_whole("family", "structures", structures, 1, len(TRAINED))
            structures = TRAINED[:structures]
        check_texts("family", "structures", structures)
        for name in structures:
            check_one_of("family", "structures", name, tuple(STRUCTURES))
        if not structures or len(set(structures)) < len(structures):
            raise ConfigError(
                "environment family: structures must name at least one, and each once, got "
                f"{list(structures)}"
            )
        self._feedback: Feedback = feedback
        trained = tested = tuple(structures)
        if heldout == "structures":
            tested = tuple(name for name in HELD_OUT if name not in trained)
            if not tested:
                raise ConfigError(
                    'environment family: with heldout = "structures", structures must leave out '
                    f"one of {', '.join(HELD_OUT)}, got {', '.join(structures)}"
                )
        splits: Splits[str] = {
            "train": named(_names("train", trained, games)),
            "heldout": named(_names(heldout, tested, games // 4)),
        }
        facts = facts_of("family", MAX_TURNS, _every_word(), threshold=0.75, has_open_text=True)
        super().__init__(facts, splits, "game")

    def family(self, member: str) -> str:
        """Return the structure of a task variant."""
        return _parts(member)[1]

    def game(self, member: str) -> SmallGame:
        """Return the game of a task variant."""
        return game_of(member, self._feedback)

    def rules(self) -> str:
        """Return the rules that all games share; each states its own at its beginning."""
        return (
            "Small games in plain words. Each episode begins with its rules. You are told how each "
            "action turns out. What is hidden stays the same in all episodes."
        )

    def begin(self, task: Task, episode: int) -> FamilyPlay:
        """Start an episode; all episodes of a task begin the same way."""
        return FamilyPlay(self.game(task.member), Chance(task.seed, episode))

    def script(self, source: random.Random) -> FamilyScript:
        """Return a script that infers the hidden object, and takes random actions in 5 % or 20 % of
        its turns.
        """
        return FamilyScript(source, slip=source.choice((0.05, 0.2)))

    def best_script(self, source: random.Random) -> FamilyScript:
        """Return a script without slips."""
        return FamilyScript(source)

    def swaps(self, member: str, split: Split) -> tuple[str, ...]:
        """Return the twin: the same game with another hidden object, as different as possible."""
        return (member[:-1] if member.endswith(TWIN) else member + TWIN,)

    def references(self, split: Split, num_episodes: int) -> dict[str, tuple[float, ...]]:
        """Return returns per episode, in the mean over the first 64 games of the split.

        `random` takes any action, and `known` knows the hidden object; these returns are exact for
        those games. `without_memory` and `with_memory` are means over one trial of `FamilyScript`
        in each of the games.
        """
        members = self.members(split)[: self.num_reference_trials]
        random_return = sum(_random_return(self.game(each)) for each in members) / len(members)
        return {
            "random": (random_return,) * num_episodes,
            **self.measured(
                split,
                num_episodes,
                without_memory=partial(FamilyScript, remembers=False),
                with_memory=partial(FamilyScript, remembers=True),
            ),
            "known": (1.0,) * num_episodes,
        }


def _names(split: str, structures: Sequence[str], count: int) -> tuple[str, ...]:
    """Return the names of a split's games: one of each structure in turn, and the twins at the
    end.
    """
    names = [f"{split}-{name}-{n}" for n in range(count) for name in structures]
    return (*names, *(f"{name}{TWIN}" for name in names))


def _every_word() -> tuple[str, ...]:
    """Return all single words of things and actions. The words of answers, lists and phrasings are
    left out. Only tiny models read `facts.words`, and these cannot play open text.
    """
    pools = (ACTIONS, THINGS)
    words = (word for pool in pools for each in pool.values() for word in each)
    return tuple(dict.fromkeys((*words, INVALID)))


def _random_return(game: SmallGame) -> float:
    """Return the exact expected return of uniform actions."""
    known: dict[tuple[int, str, float], float] = {}

    def value(done: tuple[str, ...], earned: float, turn: Turn) -> float:
        """Return the expected reward of all turns after the actions `done`."""
        # Later turns depend on nothing but the question and the rewards so far.
        state = len(done), turn.question, round(earned, 9)
        if not turn.legal:
            return 0.0
        if state not in known:
            total = 0.0
            for action in turn.legal:
                after = _turn_after(game, (*done, action))
                total += after.reward + value((*done, action), earned + after.reward, after)
            known[state] = total / len(turn.legal)
        return known[state]

    return value((), 0.0, _turn_after(game, ()))


def _turn_after(game: SmallGame, done: Sequence[str]) -> Turn:
    """Return the turn after some actions."""
    episode = game.begin(game.hidden)
    turn = next(episode)
    for action in done:
        turn = episode.send(action)
    return turn
