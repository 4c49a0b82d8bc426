"""Problems for ALFWorld's engine, made from what its package ships: rooms, goals, the domain.

The package has the rooms of 120 houses (receptacles and kinds of objects), the goals' texts and the
rules of the household, but no problems: those are downloads. Here objects are put at random where
they may be, and a goal is drawn that is not met yet. The engine's planner then says whether it can
be met.
"""

import importlib
import json
import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from mage_async.errors import EnvironmentFault

NEEDS = {
    "pick_and_place_simple": ("", ""),
    "pick_clean_then_place_in_recep": ("Cleanable", "SinkBasin"),
    "pick_heat_then_place_in_recep": ("Heatable", "Microwave"),
    "pick_cool_then_place_in_recep": ("Coolable", "Fridge"),
    "pick_two_obj_and_place": ("", ""),
    "look_at_obj_in_light": ("", ""),
}
"""Kinds of goals: what the object must be fit for, and the receptacle that does it."""
_TRAITS = {
    "Heatable": "heatable",
    "Coolable": "coolable",
    "Cleanable": "cleanable",
    "Toggleable": "toggleable",
}
_LAMP, _UNDER_LAMPS = "DeskLamp", ("Desk", "SideTable", "Dresser", "Shelf", "CoffeeTable")
_NUM_OBJECTS = 12
_MOST_TRIES = 60


@dataclass(frozen=True, slots=True)
class Room:
    """What stands in a room, and what else it could hold."""

    receptacles: dict[str, str]
    """Kinds by name."""
    objects: tuple[str, ...]
    """Kinds of what can be carried."""
    has_lamp: bool


@dataclass(frozen=True, slots=True)
class _Goal:
    kind: str
    thing: str
    place: str


class Household:
    """The package's data."""

    def __init__(self) -> None:
        module = importlib.import_module("alfworld")
        self._folder = Path(str(module.__file__)).parent
        constants = importlib.import_module("alfworld.gen.constants")
        self._holds: dict[str, set[str]] = constants.VAL_RECEPTACLE_OBJECTS
        self._fit: dict[str, set[str]] = constants.VAL_ACTION_OBJECTS
        self._openable: set[str] = constants.OPENABLE_CLASS_SET
        self._goals: dict[str, Any] = importlib.import_module("alfworld.gen.goal_library").gdict
        self.domain = (self._folder / "data" / "alfred.pddl").read_text()
        self.grammar = (self._folder / "data" / "alfred.twl2").read_text()
        self.room = cache(self._room)

    def plans(self) -> list[str]:
        """Names of the rooms."""
        files = (self._folder / "gen" / "layouts").glob("FloorPlan*-objects.json")
        return sorted(file.name.removesuffix("-objects.json") for file in files)

    def problem(self, plan: str, source: random.Random) -> dict[str, str]:
        """A problem in a room: what the engine loads, and its kind under `kind`.

        Raises:
            EnvironmentFault: no goal fits the room.
        """
        room = self.room(plan)
        for kind in source.sample(tuple(NEEDS), len(NEEDS)):
            for _ in range(_MOST_TRIES):
                goal = self._goal(room, kind, source)
                if goal is not None:
                    return self._written(room, goal, source)
        raise EnvironmentFault(f"alfworld: no goal fits the room {plan!r}")

    def _room(self, plan: str) -> Room:
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

    def _goal(self, room: Room, kind: str, source: random.Random) -> _Goal | None:
        """A goal of a kind that the room has the things for, if the drawn one is such."""
        thing = source.choice(room.objects)
        fit, by = NEEDS[kind]
        places = sorted(set(room.receptacles.values()))
        if fit and (thing not in self._fit[fit] or by not in places):
            return None
        if kind == "look_at_obj_in_light":
            return _Goal(kind, thing, "") if room.has_lamp else None
        holding = [place for place in places if thing in self._holds.get(place, ())]
        return _Goal(kind, thing, source.choice(holding)) if len(holding) > 1 else None

    def _written(self, room: Room, goal: _Goal, source: random.Random) -> dict[str, str]:
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
            facts += [f"({_TRAITS[fit]} {name})" for fit in _TRAITS if kind in self._fit[fit]]
        words = {"obj": goal.thing, "recep": goal.place, "toggle": _LAMP}
        told = source.choice(self._goals[goal.kind]["templates"])
        target = self._goals[goal.kind]["pddl"].format(**words).replace("#", "-")
        spoken = told.format(**{key: value.lower() for key, value in words.items()})
        lists = f"(:objects {' '.join(objects)})\n(:init {' '.join(facts)})"
        return {
            "kind": goal.kind,
            "pddl_domain": self.domain,
            "pddl_problem": f"(define (problem made) (:domain alfred)\n{lists}\n{target}",
            "grammar": self.grammar.replace("UNKNOWN GOAL", spoken),
        }

    def _things(self, room: Room, goal: _Goal, source: random.Random) -> dict[str, tuple[str, str]]:
        """Kind and receptacle by name; the goal's objects are not where they have to go."""
        num = min(_NUM_OBJECTS, len(room.objects))
        kinds = [*source.sample(room.objects, num), *[goal.thing] * 2]
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
