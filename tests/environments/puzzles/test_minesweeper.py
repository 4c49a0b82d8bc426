"""MineSweeper: its turns, its boards and what can be known of them."""

import itertools
import random

import pytest

from mage_async.environments.environment import Split
from mage_async.environments.games.game import cells_of
from mage_async.environments.games.minesweeper import (
    MINE,
    MineSweeper,
    MineSweeperPlay,
    MineSweeperScript,
    board_of,
    cell_names,
    mine_chances,
)
from mage_async.errors import ConfigError
from mage_async.trajectory import Task

SPLITS: tuple[Split, ...] = ("train", "heldout")


def begin(member: str, seed: int = 0, **options) -> MineSweeperPlay:
    return MineSweeper(**options).begin(Task("minesweeper", member, seed), 0)


def small() -> MineSweeper:
    return MineSweeper(size=4, mines=2)


def wall() -> MineSweeperPlay:
    """Mines at `ab` and `bb`, opened at `cb`, which shows one:   aa[ab]ac ad / ba[bb]bc bd / …"""
    environment = small()
    member = "ab-bb"
    seed = next(
        seed
        for seed in itertools.count()
        if environment.begin(Task("minesweeper", member, seed), 0).opened == 1 << 9
    )
    return environment.begin(Task("minesweeper", member, seed), 0)


def test_a_board_shows_closed_cells_by_name_and_open_ones_by_number() -> None:
    play = wall()
    assert play.observation == "aa ab ac ad ba bb bc bd ca one cc cd da db dc dd"
    outcome = play.act("ac")
    assert outcome.observation == "aa ab two ad ba bb bc bd ca one cc cd da db dc dd"
    assert (outcome.reward, outcome.is_done) == (0.5, False)


def test_a_clear_cell_opens_everything_around_it() -> None:
    play = wall()
    outcome = play.act("dd")
    assert outcome.observation == (
        "aa ab two clear ba bb two clear one one one clear clear clear clear clear"
    )
    assert outcome.reward == 2.0


def test_opening_all_but_the_mines_wins_whatever_the_last_cell_is_worth() -> None:
    play = wall()
    rewards = [play.act(action).reward for action in ("dd", "aa")]
    outcome = play.act("ba")
    assert (*rewards, outcome.reward) == (2.0, 0.5, 10.0)
    assert outcome.is_done
    assert outcome.observation.endswith("clear win")


def test_a_mine_loses_and_shows_itself_alone() -> None:
    outcome = wall().act("bb")
    assert outcome.observation == "aa ab ac ad ba mine bc bd ca one cc cd da db dc dd lose"
    assert (outcome.reward, outcome.is_valid, outcome.is_done) == (-0.1, True, True)


@pytest.mark.parametrize("action", ["cb", "one", "zz", ""])
def test_what_is_no_closed_cell_costs_and_uses_up_the_turn(action: str) -> None:
    play = wall()
    outcome = play.act(action)
    assert outcome.observation == f"invalid {play.observation}"
    assert (outcome.reward, outcome.is_valid, outcome.is_done) == (-1.0, False, False)


def test_an_episode_is_over_after_its_turns() -> None:
    play = begin("ab-bb", size=4, mines=2, turns=2)
    outcomes = [play.act("no"), play.act("no")]
    assert [each.is_done for each in outcomes] == [False, True]
    assert outcomes[-1].observation.endswith(" over")


def test_news_are_the_cells_that_opened_and_what_they_show() -> None:
    play = begin("ab-bb", 0, size=4, mines=2, view="news")
    names, seen = cell_names(4), play.observation.split()
    assert seen[::2] == [names[cell] for cell in cells_of(play.opened)]
    before = play.opened
    outcome = play.act(next(name for name in play.legal_actions() if name not in ("ab", "bb")))
    assert outcome.observation.split()[::2][: -1 if "win" in outcome.observation else None] == [
        names[cell] for cell in cells_of(play.opened & ~before)
    ]
    assert play.act("no").observation == "invalid"


def test_every_episode_of_a_task_begins_alike_and_another_task_elsewhere() -> None:
    environment = MineSweeper()
    member = environment.members("train")[0]
    openings = [
        {environment.begin(Task("minesweeper", member, seed), e).observation for e in range(4)}
        for seed in range(5)
    ]
    assert all(len(each) == 1 for each in openings)
    assert len(set.union(*openings)) > 1


def test_numbers_and_cascades_are_those_of_the_definition() -> None:
    source = random.Random(1)
    for _ in range(50):
        size = source.randrange(3, 9)
        mines = source.sample(range(size * size), size * size // 5)
        board = board_of(size, sum(1 << cell for cell in mines))

        def around(cell: int, size: int = size) -> list[int]:
            row, column = divmod(cell, size)
            steps = itertools.product((-1, 0, 1), repeat=2)
            near = [(row + r, column + c) for r, c in steps]
            return [
                r * size + c
                for r, c in near
                if 0 <= r < size and 0 <= c < size and (r, c) != (row, column)
            ]

        for cell in range(size * size):
            number = sum(each in mines for each in around(cell))
            assert board.shown[cell] == (MINE if cell in mines else number)
            if board.shown[cell] == 0:
                for each in around(cell):
                    assert board.opens[cell] >> each & 1
            assert not board.opens[cell] & ~board.safe or cell in mines
        assert all(board.opens[cell] != board.safe for cell in board.openings())


def test_a_player_that_knows_the_mines_needs_so_many_clicks_and_no_fewer() -> None:
    for first, second in itertools.combinations(range(9), 2):
        board = board_of(3, 1 << first | 1 << second)
        sets = [board.opens[cell] for cell in cells_of(board.safe)]
        fewest = next(
            number
            for number in range(1, 10)
            for chosen in itertools.combinations(sets, number)
            if _union(chosen) == board.safe
        )
        assert board.num_clicks() == fewest


def _union(sets: tuple[int, ...]) -> int:
    united = 0
    for each in sets:
        united |= each
    return united


@pytest.mark.parametrize(("size", "num_mines"), [(4, 2), (4, 4), (5, 3)])
def test_chances_are_shares_of_the_layouts_that_agree(size: int, num_mines: int) -> None:
    source = random.Random(size)
    every = [
        board_of(size, sum(1 << cell for cell in chosen))
        for chosen in itertools.combinations(range(size * size), num_mines)
    ]
    for _ in range(25):
        board = source.choice(every)
        opened = 0
        for cell in source.sample(list(cells_of(board.safe)), source.randrange(1, 5)):
            opened |= board.opens[cell]
        mines = [cell for cell in range(size * size) if board.shown[cell] == MINE]
        struck = sum(1 << cell for cell in source.sample(mines, source.randrange(2)))
        shown = {cell: board.shown[cell] for cell in cells_of(opened)}
        agree = [
            each
            for each in every
            if all(each.shown[cell] == number for cell, number in shown.items())
            and not each.safe & struck
        ]
        chances = mine_chances(size, num_mines, shown, struck)
        for cell, chance in chances.items():
            share = sum(each.shown[cell] == MINE for each in agree) / len(agree)
            assert chance == pytest.approx(share)


def test_who_remembers_wins_later_what_it_lost_before() -> None:
    references = MineSweeper(size=4, mines=3).references("heldout", 3)
    random_play, forgetful = references["random"], references["solver_without_memory"]
    solver = references["solver"]
    assert max(random_play) < min(forgetful) - 3
    assert solver[0] == forgetful[0]
    assert min(solver[1:]) > max(forgetful) + 0.5


def test_a_mine_that_was_struck_is_not_struck_again() -> None:
    environment = small()
    for seed, member in enumerate(environment.members("train")):
        script = MineSweeperScript(random.Random(seed), 2, care=0.0, memory=1.0)
        struck: set[int] = set()
        for episode in range(3):
            play = environment.begin(Task("minesweeper", member, seed), episode)
            while play.closed():
                play.act(script.choose(play))
            assert play.struck not in struck
            struck |= set() if play.struck is None else {play.struck}


@pytest.mark.parametrize("split", SPLITS)
def test_a_swapped_board_has_no_mine_where_there_was_one(split: Split) -> None:
    environment = MineSweeper()
    for member in environment.members(split)[:50]:
        for other in environment.swaps(member, split):
            assert not set(member.split("-")) & set(other.split("-"))


def test_splits_are_all_boards_where_there_are_few_and_as_many_as_asked_for_otherwise() -> None:
    def sizes(environment: MineSweeper) -> list[int]:
        return [len(environment.members(split)) for split in SPLITS]

    assert sizes(small()) == [90, 30]
    assert sizes(MineSweeper()) == [1536, 512]
    assert sizes(MineSweeper(size=8, mines=10, turns=20, boards=4000)) == [3000, 1000]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 2}, "minesweeper: `size` must be a whole number from 3 to 26, got 2"),
        ({"mines": 10}, "minesweeper: `mines` must be a whole number from 1 to 9, got 10"),
        ({"turns": 1.5}, "minesweeper: `turns` must be a whole number from 1 to 36, got 1.5"),
        ({"view": "all"}, "minesweeper: `view` must be 'board' or 'news', got 'all'"),
    ],
)
def test_impossible_options_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        MineSweeper(**options)
    assert str(caught.value) == message


def test_what_was_opened_safely_is_opened_again_in_the_same_order() -> None:
    environment = small()
    for seed, member in enumerate(environment.members("train")):
        script = MineSweeperScript(random.Random(seed), 2, care=1.0, memory=1.0)
        plays = [environment.begin(Task("minesweeper", member, seed), each) for each in range(2)]
        for play in plays:
            while play.closed():
                play.act(script.choose(play))
        safe = [cell for cell in plays[0].chosen if cell != plays[0].struck]
        assert plays[1].chosen[: len(safe)] == safe


def test_the_first_cell_of_ones_own_and_those_around_it_have_no_mine() -> None:
    game = MineSweeper(size=5, mines=5, opening="own", wins_only=True, boards=40)
    for member in game.members("train"):
        for cell, name in enumerate(cell_names(5)):
            task = Task("minesweeper", member, cell)
            plays = [game.begin(task, episode) for episode in range(2)]
            outcomes = [play.act(name) for play in plays]
            assert outcomes[0].observation == outcomes[1].observation
            assert name not in outcomes[0].observation.split()
            assert outcomes[0].is_valid
            board = game.board(member, cell)
            assert board.safe.bit_count() == 20
            assert board.shown[cell] == 0
            assert plays[0].opened == board.opens[cell]


def test_with_wins_alone_opening_the_last_safe_cell_pays_one() -> None:
    game = MineSweeper(size=5, mines=5, turns=20, opening="own", wins_only=True, boards=8)
    member = game.members("train")[0]
    board, play = game.board(member, 12), game.begin(Task("minesweeper", member, 0), 0)
    rewards = [play.act("cc").reward]
    while not play.is_over:
        safe = next(cell for cell in play.closed() if board.safe >> cell & 1)
        rewards.append(play.act(cell_names(5)[safe]).reward)
    assert rewards == [0.0] * (len(rewards) - 1) + [1.0]


def test_an_opening_of_ones_own_needs_cells_without_mines() -> None:
    with pytest.raises(ConfigError, match="`mines` must be a whole number from 1 to 4, got 5"):
        MineSweeper(size=4, mines=5, opening="own")
    with pytest.raises(ConfigError, match="`size` must be a whole number from 4 to 26, got 3"):
        MineSweeper(size=3, mines=1, opening="own")
