"""Play ALFWorld: household tasks in text, on ALFWorld's own engine.

Rules: one command a turn, such as `open fridge 1`; reaching the goal pays 1. The places of things
are hidden; household and goal are the same in all episodes. Problems are generated here, or read
from a folder of the published ones. A step takes about a tenth of a second, most of it to list the
possible commands.
"""

import importlib
import json
import os
import random
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from mage_async.environments.environment import HELDOUT_EVERY, Split, check_whole, numbered
from mage_async.environments.games.text_game import TextGames
from mage_async.environments.loaders.loader import IsolatedRandomState, library
from mage_async.errors import ConfigError, EnvironmentFault

NEEDS = {
    "pick_and_place_simple": ("", ""),
    "pick_clean_then_place_in_recep": ("Cleanable", "SinkBasin"),
    "pick_heat_then_place_in_recep": ("Heatable", "Microwave"),
    "pick_cool_then_place_in_recep": ("Coolable", "Fridge"),
    "pick_two_obj_and_place": ("", ""),
    "look_at_obj_in_light": ("", ""),
}
"""For each kind of goal: the trait that the object must have, and the receptacle that acts on it;
"" if the goal needs neither.
"""
_TRAITS = ("Heatable", "Coolable", "Cleanable", "Toggleable")
"""Traits of objects by ALFWorld's name; the problem's file writes them in lower case."""
_LAMP, _UNDER_LAMPS = "DeskLamp", ("Desk", "SideTable", "Dresser", "Shelf", "CoffeeTable")
"""Kind of the lamp that goals use, and kinds of receptacles on which it may stand."""
_NUM_OBJECTS = 12
"""Number of kinds of objects that are placed in a room, besides the goal's."""
_MOST_TRIES = 60
"""Number of draws of a goal, and of a room, before the generator gives up."""
_SPLITS: dict[Split, tuple[str, ...]] = {
    "train": ("train",),
    "heldout": ("valid_seen", "valid_unseen"),
}
"""Folders of the published problems that each split uses."""
_NOT_SUPPORTED = ("movable", "Sliced")
"""Words in the paths of problems that the engine does not support, according to its own loader."""


class _Session:
    """Play one game on ALFWorld's engine."""

    def __init__(self, engine: Any, wrapper: Any, file: Path) -> None:
        self._random_state = IsolatedRandomState(0)
        requested = engine.EnvInfos(admissible_commands=True, won=True)
        with self._random_state:
            self._game = engine.start(str(file), requested, wrappers=[wrapper()])
            self._state = self._game.reset()
        # The first text begins with a banner that ends in "=-".
        self.observation = self._state.feedback.partition("=-\n")[2] or self._state.feedback

    def legal(self) -> Sequence[str]:
        """Return the possible commands, except `help`."""
        return [each for each in self._state["admissible_commands"] if each != "help"]

    def step(self, action: str) -> tuple[str, float, bool]:
        """Take a command; return the observation, the reward (1 if the goal is reached, else 0),
        and whether the game is over.
        """
        with self._random_state:
            self._state, _, is_over = self._game.step(action)
        return self._state.feedback, float(self._state["won"]), bool(is_over)


class AlfWorld(TextGames):
    """Play ALFWorld; the task variant is a problem.

    Args:
        data: Folder of the published problems (`$ALFWORLD_DATA/json_2.1.1`), on which papers
            report; "" for problems generated here, whose rooms differ between the splits.
        games: Number of generated problems, a quarter of them held out.
        turns: Largest number of turns in an episode.
        heldout_kinds: Kinds of goals (`NEEDS`) that are never trained on; the held-out split then
            has these kinds only. LaMer holds out two. If empty, both splits have all kinds.

    Raises:
        ConfigError: there are no problems in the folder, an option is out of range, or ALFWorld is
            not installed.
    """

    def __init__(
        self,
        data: str = "",
        games: int = 256,
        turns: int = 10,
        heldout_kinds: Sequence[str] = (),
    ) -> None:
        check_whole("alfworld", "games", games, 8, 1_000_000)
        check_whole("alfworld", "turns", turns, 1, 1000)
        self._kinds = kinds_of_splits(heldout_kinds)
        alfred = library("alfworld.agents.environment.alfred_tw_env", "alfworld")
        self._engine, self._wrapper = library("textworld", "alfworld"), alfred.AlfredDemangler
        self._data = Path(os.path.expandvars(data)).expanduser() if data else None
        self._household = Household()
        self._problem_of = lru_cache(maxsize=1024)(self._generate)
        listed = (
            numbered("game", games)
            if self._data is None
            else listed_problems(self._data, self._kinds)
        )
        super().__init__("alfworld", listed, turns, "look")

    def session(self, game: str) -> _Session:
        """Start a game."""
        if self._data is not None:
            return _Session(self._engine, self._wrapper, self._data / game / "game.tw-pddl")
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / f"{game}.tw-pddl"
            file.write_text(json.dumps(self._problem_of(game)))
            return _Session(self._engine, self._wrapper, file)

    def kind(self, game: str) -> str:
        """Return the kind of a problem's goal, such as `pick_heat_then_place_in_recep`."""
        if self._data is not None:
            return _kind_of(game)
        return self._problem_of(game)["kind"]

    def rules(self) -> str:
        """Return the rules in plain words; the first observation states the goal."""
        return (
            "You are in a household. Answer with one command, such as go to fridge 1, open fridge "
            "1, take apple 1 from fridge 1, move apple 1 to countertop 1, heat apple 1 with "
            "microwave 1, clean, cool, use desklamp 1, examine, inventory, look. Completing "
            f"your task counts 1. An episode ends after {self._turns} turns. The household and the "
            "task are the same in all episodes."
        )

    def _generate(self, member: str) -> dict[str, str]:
        """Generate a problem. Held-out problems use one room in four, training ones the other
        three.
        """
        source = random.Random(f"alfworld/{member.removeprefix('game-')}")
        is_heldout = member in self._splits["heldout"]
        plans = [
            plan
            for number, plan in enumerate(self._household.plans())
            if (number % HELDOUT_EVERY == 0) == is_heldout
        ]
        kinds = self._kinds["heldout" if is_heldout else "train"]
        for _ in range(_MOST_TRIES):  # a room may lack what the kinds need
            problem = self._household.problem(source.choice(plans), source, kinds)
            if problem is not None:
                return problem
        raise EnvironmentFault(f"alfworld: no room fits a goal of {', '.join(kinds)}")


def kinds_of_splits(heldout_kinds: Sequence[str]) -> dict[Split, tuple[str, ...]]:
    """Return the kinds of goals in each split.

    Raises:
        ConfigError: a kind is unknown, or no kind is left to train on.
    """
    known = ", ".join(NEEDS)
    if unknown := [kind for kind in heldout_kinds if kind not in NEEDS]:
        raise ConfigError(f"alfworld: `heldout_kinds` has {unknown[0]!r}; known kinds: {known}")
    trained = tuple(kind for kind in NEEDS if kind not in heldout_kinds)
    if not trained:
        raise ConfigError(f"alfworld: `heldout_kinds` leaves no kind to train on; known: {known}")
    return {"train": trained, "heldout": tuple(heldout_kinds) or trained}


def _kind_of(member: str) -> str:
    """Return the kind of goal of a published problem, from its path."""
    return Path(member).parts[1].partition("-")[0]


def listed_problems(
    data: Path, kinds: Mapping[Split, Sequence[str]]
) -> dict[Split, tuple[str, ...]]:
    """Return the solvable problems of the published folder, by split, of the split's kinds."""
    listed: dict[Split, tuple[str, ...]] = {
        split: tuple(
            str(file.parent.relative_to(data))
            for part in parts
            for file in sorted((data / part).glob("**/game.tw-pddl"))
            if not any(word in str(file) for word in _NOT_SUPPORTED)
            and _kind_of(str(file.relative_to(data))) in kinds[split]
            and json.loads(file.read_text()).get("solvable")
        )
        for split, parts in _SPLITS.items()
    }
    lacking = [split for split, members in listed.items() if len(members) < 2]
    if lacking:
        parts = " or ".join(_SPLITS[lacking[0]])
        raise ConfigError(
            f"alfworld: found fewer than two solvable game.tw-pddl below {data} in {parts}; "
            "`data` is the folder that holds them, such as $ALFWORLD_DATA/json_2.1.1"
        )
    return listed


# The code below generates problems from data of the alfworld package: the rooms of 120 houses
# (receptacles and kinds of objects), the goals' texts and the household's rules. Objects are placed
# at random, each in a receptacle that may hold it, and a goal is drawn that is not reached yet.


@dataclass(frozen=True, slots=True)
class Room:
    """Describe a room: its receptacles, and the objects that it may hold."""

    receptacles: dict[str, str]
    """Kind of each receptacle, by name."""
    objects: tuple[str, ...]
    """Kinds of objects that can be carried."""
    has_lamp: bool


@dataclass(frozen=True, slots=True)
class _Goal:
    """Describe a goal: its kind, the kind of object, and the kind of receptacle to put it into (""
    if none).
    """

    kind: str
    thing: str
    place: str


class Household:
    """Generate problems from the data that the alfworld package ships."""

    def __init__(self) -> None:
        module = importlib.import_module("alfworld")
        self._folder = Path(str(module.__file__)).parent
        constants = importlib.import_module("alfworld.gen.constants")
        self._holds: dict[str, set[str]] = constants.VAL_RECEPTACLE_OBJECTS
        """For each kind of receptacle, the kinds of objects that it may hold."""
        self._fit: dict[str, set[str]] = constants.VAL_ACTION_OBJECTS
        """For each trait, such as `Heatable`, the kinds of objects that have it."""
        self._openable: set[str] = constants.OPENABLE_CLASS_SET
        self._goal_library: dict[str, Any] = importlib.import_module(
            "alfworld.gen.goal_library"
        ).gdict
        self.domain = (self._folder / "data" / "alfred.pddl").read_text()
        self.grammar = (self._folder / "data" / "alfred.twl2").read_text()
        self.room = cache(self._read_room)

    def plans(self) -> list[str]:
        """Return the names of the rooms, such as `FloorPlan1`."""
        files = (self._folder / "gen" / "layouts").glob("FloorPlan*-objects.json")
        return sorted(file.name.removesuffix("-objects.json") for file in files)

    def problem(
        self, plan: str, source: random.Random, kinds: Sequence[str]
    ) -> dict[str, str] | None:
        """Return a problem in a room: the files for the engine, and the problem's kind under
        `kind`; None if no goal of these kinds fits the room.
        """
        room = self.room(plan)
        for kind in source.sample(kinds, len(kinds)):
            for _ in range(_MOST_TRIES):
                goal = self._draw_goal(room, kind, source)
                if goal is not None:
                    return self._problem_files(room, goal, source)
        return None

    def _read_room(self, plan: str) -> Room:
        """Read a room from the package's files.

        A receptacle is named like `Cabinet_bar_3`: ALFWorld writes "|" as `_bar_`. Its key in the
        file is like `Sink|-1.2|0.8|2.0|SinkBasin`: kind and position, and for a basin the kind
        again.
        """
        layouts = self._folder / "gen" / "layouts"
        places = json.loads((layouts / f"{plan}-openable.json").read_text())
        receptacles = {}
        for number, place in enumerate(sorted(places), 1):
            first, *_, last = place.split("|")
            is_basin = last.endswith("Basin")
            name = f"{first}_bar_{number}" + (f"_bar_{last}" if is_basin else "")
            receptacles[name] = last if is_basin else first
        kinds = json.loads((layouts / f"{plan}-objects.json").read_text())
        held = set().union(*self._holds.values())
        carried = tuple(sorted(set(kinds) & held - set(receptacles.values())))
        has_lamp = _LAMP in kinds and bool(set(_UNDER_LAMPS) & set(receptacles.values()))
        return Room(receptacles, carried, has_lamp)

    def _draw_goal(self, room: Room, kind: str, source: random.Random) -> _Goal | None:
        """Draw a goal of a kind; return None if the room lacks what the goal needs."""
        thing = source.choice(room.objects)
        trait, receptacle = NEEDS[kind]
        places = sorted(set(room.receptacles.values()))
        if trait and (thing not in self._fit[trait] or receptacle not in places):
            return None
        holding = [place for place in places if thing in self._holds.get(place, ())]
        if kind == "look_at_obj_in_light":
            return _Goal(kind, thing, "") if room.has_lamp and holding else None
        # `_things` puts the thing elsewhere than where it has to go, so two places are needed.
        return _Goal(kind, thing, source.choice(holding)) if len(holding) > 1 else None

    def _problem_files(self, room: Room, goal: _Goal, source: random.Random) -> dict[str, str]:
        """Return the files of a problem for the engine, written in PDDL, and its kind under
        `kind`.
        """
        things = self._things(room, goal, source)
        objects, facts = ["agent1 - agent", "loc_start - location"], ["(= (total-cost) 0)"]
        facts.append("(atLocation agent1 loc_start)")
        kinds = {kind for kind, _ in things.values()}
        objects += [f"{kind}Type - otype" for kind in sorted(kinds)]
        objects += [f"{kind}Type - rtype" for kind in sorted(set(room.receptacles.values()))]
        for name, kind in room.receptacles.items():
            objects += [f"{name} - receptacle", f"loc_{name} - location"]
            facts += [f"(receptacleType {name} {kind}Type)"]
            facts += [f"(receptacleAtLocation {name} loc_{name})"]
            facts += [f"(openable {name})"] if kind in self._openable else []
        for kind in sorted(set(room.receptacles.values())):
            holds = sorted(kinds & self._holds.get(kind, set()))
            facts += [f"(canContain {kind}Type {each}Type)" for each in holds]
        for name, (kind, place) in things.items():
            objects.append(f"{name} - object")
            facts += [f"(objectType {name} {kind}Type)", f"(inReceptacle {name} {place})"]
            facts += [f"(objectAtLocation {name} loc_{place})"]
            facts += [] if kind == _LAMP else [f"(pickupable {name})"]
            facts += [f"({fit.lower()} {name})" for fit in _TRAITS if kind in self._fit[fit]]
        words = {"obj": goal.thing, "recep": goal.place, "toggle": _LAMP}
        template = source.choice(self._goal_library[goal.kind]["templates"])
        # ALFWorld's goals have "#" where PDDL has "-", and end with the problem's parenthesis.
        target = self._goal_library[goal.kind]["pddl"].format(**words).replace("#", "-")
        task = template.format(**{key: value.lower() for key, value in words.items()})
        lists = f"(:objects {' '.join(objects)})\n(:init {' '.join(facts)})"
        return {
            "kind": goal.kind,
            "pddl_domain": self.domain,
            "pddl_problem": f"(define (problem made) (:domain alfred)\n{lists}\n{target}",
            # ALFWorld's grammar has these words where a game states its goal.
            "grammar": self.grammar.replace("UNKNOWN GOAL", task),
        }

    def _things(self, room: Room, goal: _Goal, source: random.Random) -> dict[str, tuple[str, str]]:
        """Place objects at random; return the kind and the receptacle of each, by name.

        The goal's objects are not where they have to go.
        """
        num_kinds = min(_NUM_OBJECTS, len(room.objects))
        # The goal's kind of object is placed twice, because `pick_two_obj_and_place` needs two.
        kinds = [*source.sample(room.objects, num_kinds), *[goal.thing] * 2]
        kinds += [_LAMP] if room.has_lamp else []
        things = {}
        for number, kind in enumerate(kinds, 1):
            places = [
                name
                for name, place in room.receptacles.items()
                if (kind in self._holds.get(place, ()) or (kind == _LAMP and place in _UNDER_LAMPS))
                and not (kind == goal.thing and place == goal.place)
            ]
            if places:
                things[f"{kind}_bar_{number}"] = (kind, source.choice(places))
        return things
