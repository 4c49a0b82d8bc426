"""Define environments as a new user would write them who has read only the README.

The first six are for the tiny model, which needs `words`; the other five are for a pretrained
model, and so is the first one, which is the README's. `bench/learning/first_hour.py` trains on them
with the README's two commands.
"""

import random


class GuessNumber:
    """Guess a number from 1 to 12. You are told whether it is higher or lower."""

    legal_actions = tuple(map(str, range(1, 13)))
    words = (*legal_actions, "guess", "higher", "lower", "right")
    max_turns = 3

    def reset(self, seed, task):
        self.number = random.Random(task).randint(1, 12)
        return "guess"

    def step(self, action):
        guess = int(action)
        said = "higher" if guess < self.number else "lower" if guess > self.number else "right"
        return said, float(said == "right"), said == "right"


class Password:
    """One of six words opens the gate. You may say two of them."""

    legal_actions = ("apple", "river", "candle", "wolf", "silver", "thunder")
    words = (*legal_actions, "who", "no", "welcome")
    max_turns = 2

    def reset(self, seed, task):
        self.word = random.Random(task).choice(self.legal_actions)
        return "who"

    def step(self, action):
        is_right = action == self.word
        return "welcome" if is_right else "no", float(is_right), is_right


class Crossroads:
    """Walk past four crossings to the village. At each, one of three ways is the road."""

    legal_actions = ("left", "straight", "right")
    words = (*legal_actions, "crossing", "1", "2", "3", "4", "road", "swamp", "village")
    max_turns = 4

    def reset(self, seed, task):
        self.way = random.Random(task).choices(self.legal_actions, k=4)
        self.at = 0
        return "crossing 1"

    def step(self, action):
        is_road = action == self.way[self.at]
        self.at += 1
        place = "village" if self.at == 4 else f"crossing {self.at + 1}"
        return f"{'road' if is_road else 'swamp'} {place}", float(is_road), self.at == 4


class Workshop:
    """Three things are broken. Each needs one of four tools, always the same."""

    legal_actions = ("hammer", "saw", "drill", "glue")
    words = (*legal_actions, "chair", "lamp", "door", "done", "fixed", "broken")
    max_turns = 3

    def reset(self, seed, task):
        self.needed = random.Random(task).choices(self.legal_actions, k=3)
        self.things = ["chair", "lamp", "door", "done"]
        return self.things.pop(0)

    def step(self, action):
        fits = action == self.needed[3 - len(self.things)]
        said = f"{'fixed' if fits else 'broken'} {self.things.pop(0)}"
        return said, float(fits), not self.things


class Garden:
    """Water one of five plants on each of ten days. Only one of them grows."""

    legal_actions = ("rose", "lily", "fern", "moss", "ivy")
    words = (*legal_actions, "day", "grows", "nothing")
    max_turns = 10

    def reset(self, seed, task):
        self.plant, self.day = random.Random(task).choice(self.legal_actions), 0
        return "day"

    def step(self, action):
        self.day += 1
        grows = action == self.plant
        return "grows" if grows else "nothing", float(grows), self.day == 10


class Clinic:
    """A patient has one of four diseases. Tests are noisy and cost 0.1 each. Treat the right
    disease."""

    # The tests, and the chance of a positive result of each by disease.
    tests = ("blood", "xray", "swab")
    diseases = ("flu", "measles", "anemia", "gout")
    positive = ((0.3, 0.2, 0.9), (0.8, 0.2, 0.8), (0.9, 0.1, 0.1), (0.4, 0.9, 0.1))
    legal_actions = (*(f"test {each}" for each in tests), *(f"treat {each}" for each in diseases))
    observations = ("patient", "positive", "negative", "cured", "worse")
    words = ("test", "treat", *tests, *diseases, *observations)
    max_turns = 5

    def reset(self, seed, task):
        self.chance = random.Random(seed)
        self.disease = random.Random(task).choice(self.diseases)
        return "patient"

    def step(self, action):
        verb, what = action.split()
        if verb == "test":
            chances = self.positive[self.diseases.index(self.disease)]
            is_positive = self.chance.random() < chances[self.tests.index(what)]
            return "positive" if is_positive else "negative", -0.1, False
        return ("cured", 1.0, True) if what == self.disease else ("worse", -0.5, True)


class Bar:
    """Serve four guests a drink each. A guest always wants the same drink, and says which one if it
    gets another."""

    guests = ("ann", "bob", "cid", "dan")
    legal_actions = ("tea", "milk", "beer", "wine", "juice", "water")
    words = (*guests, *legal_actions, "serve", "thanks", "no", "end")
    max_turns, min_return, max_return = 4, 0.0, 4.0

    def reset(self, seed, task, episode):
        source = random.Random(task)
        self.wants = {guest: source.choice(self.legal_actions) for guest in self.guests}
        self.left = random.Random(f"{seed}-{episode}").sample(self.guests, 4)
        return f"serve {self.left[0]}"

    def step(self, action):
        wanted = self.wants[self.left.pop(0)]
        said = "thanks" if action == wanted else f"no {wanted}"
        following = f"serve {self.left[0]}" if self.left else "end"
        return f"{said} {following}", float(action == wanted), not self.left


class Price:
    """Guess what the vase costs, from 1 to 9 coins. After each guess the seller says: too low, too
    high, or sold."""

    legal_actions = tuple(map(str, range(1, 10)))
    max_turns = 2

    def reset(self, seed, task):
        self.price = random.Random(task).randint(1, 9)
        return "What do you offer for the vase?"

    def step(self, action):
        offer = int(action)
        if offer == self.price:
            return "Sold!", 1.0, True
        return "Too low." if offer < self.price else "Too high.", 0.0, False


class Language:
    """You are in a country whose language you do not speak. You are asked for a word of it, and
    told the right one afterwards."""

    legal_actions = ("blik", "dorn", "vash", "mepo")
    max_turns = 3

    def reset(self, seed, task):
        self.answers = random.Random(task).sample(self.legal_actions, 3)
        self.asked = 0
        return "What is their word for bread?"

    def step(self, action):
        word = self.answers[self.asked]
        self.asked += 1
        is_over = self.asked == 3
        what = (
            "Goodbye."
            if is_over
            else f"What is their word for {('water', 'salt')[self.asked - 1]}?"
        )
        said = "Yes." if action == word else f"No, it is {word}."
        return f"{said} {what}", float(action == word), is_over


class Courier:
    """Bring each of three parcels to the right city. The same parcel goes to the same city in each
    round."""

    legal_actions = ("Paris", "Rome", "Oslo")
    max_turns = 3

    def reset(self, seed, task):
        cities = random.Random(task).choices(self.legal_actions, k=3)
        self.city = {"red": cities[0], "green": cities[1], "blue": cities[2]}
        self.left = list(self.city)
        return "The red parcel."

    def step(self, action):
        parcel = self.left.pop(0)
        is_right = action == self.city[parcel]
        said = "Delivered." if is_right else "Nobody knows it here."
        more = f" The {self.left[0]} parcel." if self.left else " That was all."
        return said + more, float(is_right), not self.left


class Library:
    """Find the book with the recipe. Use the tools: search for a word, or read a book. Reading the
    right one ends the search and earns 1."""

    books = ("atlas", "novel", "diary", "manual")
    legal_actions = ("search recipe", *(f"read {book}" for book in books))
    max_turns = 2

    def reset(self, seed, task):
        self.book = random.Random(task).choice(self.books)
        return "The library is open."

    def step(self, action):
        if action == "search recipe":
            return f"The word is in the {self.book}.", 0.0, False
        is_found = action == f"read {self.book}"
        return "Here is the recipe." if is_found else "No recipe in it.", float(is_found), is_found


class Mine:
    """Dig eight times. One of the four shafts has gold, the same one in every round."""

    legal_actions = ("north", "south", "east", "west")
    max_turns = 8

    def reset(self, seed, task):
        self.shaft, self.dug = random.Random(task).choice(self.legal_actions), 0
        return "Where do you dig?"

    def step(self, action):
        self.dug += 1
        has_gold = action == self.shaft
        return "Gold." if has_gold else "Stones.", float(has_gold), self.dug == 8


# Tasks by kind of model.
TINY = (GuessNumber, Password, Crossroads, Workshop, Garden, Clinic, Bar)
PRETRAINED = (GuessNumber, Price, Language, Courier, Library, Mine)
