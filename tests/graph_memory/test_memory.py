"""What a memory learns from batches, keeps, and says."""

import msgspec
import pytest

from mage_async.graph_memory.graph import Table
from mage_async.graph_memory.listing import listed, scores_in
from mage_async.graph_memory.memory import GraphMemory
from mage_async.trajectory import Task

TASK = Task("rps", "m", 1)


def lesson(group_of, state="s", good="left", bad="right", seat=0, told=None):
    return group_of([[[(state, good, 1.0)]], [[(state, bad, 0.0)]]], told, seat)


def test_the_best_and_the_worst_episode_of_a_group_become_a_strategy(config, group_of):
    memory = GraphMemory(config())
    assert memory.guidance(0, TASK) is None
    memory.trained([lesson(group_of)])
    assert memory.version == 1
    assert memory.best(TASK).text == "s left"
    assert memory.guidance(3, TASK).version == 1
    assert memory.guidance(3, Task("rps", "m", 1, 1)).decisions == (("s", "left"),)
    memory.trained([group_of([[[("t", "left", 1.0)]], [[("t", "right", 1.0)]]])])
    assert list(memory.graph.strategies) == [("s", "left")]


def test_a_memory_that_is_off_learns_and_says_nothing(config, group_of):
    memory = GraphMemory(config(strategies=0))
    memory.trained([lesson(group_of)])
    assert (memory.version, memory.guidance(0, TASK), memory.digest()) == (0, None, "")


def test_a_restored_memory_goes_on_bit_by_bit(config, group_of):
    memory, other = GraphMemory(config(strategies=2)), GraphMemory(config(strategies=2))
    for number in range(30):
        state, seat = f"s{number % 7}", number % 2
        told = memory.guidance(number, TASK)
        memory.trained([lesson(group_of, state, "xy"[number % 3 > 0], "z", seat, told)])
        wire = msgspec.msgpack.encode(memory.table())
        other.begin(msgspec.msgpack.decode(wire, type=Table))
        assert other.digest() == memory.digest()
        assert other.guidance(number, TASK) == memory.guidance(number, TASK)
    assert any(known.shown for known in memory.graph.strategies.values())


def test_paths_and_bytes_are_bounded(config, group_of):
    memory = GraphMemory(config(strategies=2, max_paths=5, max_bytes=40))
    for number in range(20):
        memory.trained([lesson(group_of, f"s{number}"), lesson(group_of, "long" * 10)])
    table = memory.table()
    assert len(table.paths) == len(table.strategies) == 5
    assert table.strategies[-1][0] == ("s19", "left")
    assert all(len(memory.guidance(n, TASK).text.encode()) <= 40 for n in range(50))


def test_a_model_that_reads_is_told_in_words(config, group_of):
    plain = config()
    reads = msgspec.structs.replace(plain.transcript, rules=True)
    memory = GraphMemory(msgspec.structs.replace(plain, transcript=reads))
    memory.trained([lesson(group_of)])
    assert "at “s”: left" in memory.best(TASK).text


def test_shuffled_rewards_teach_both_decisions_alike(config, group_of):
    scores = {}
    for rewards in ("own", "shuffled"):
        memory = GraphMemory(config(rewards=f'"{rewards}"', max_paths=1000))
        for _ in range(60):
            memory.trained([lesson(group_of) for _ in range(8)])
        scores[rewards] = memory.scores(("rps", 0))
    assert list(scores["own"]) == [("s", "left")]
    assert scores["shuffled"][("s", "left")] == pytest.approx(scores["shuffled"][("s", "right")])


def test_a_line_lists_strategies_with_their_weights(config, group_of):
    memory = GraphMemory(config())
    memory.trained([lesson(group_of), lesson(group_of, "t")])
    line = msgspec.json.decode(msgspec.json.encode(listed(memory)))
    assert [row["state"] for row in line["strategies"]] == ["s", "t"]
    assert {row["born"] for row in line["strategies"]} == {1}
    assert sum(row["probability"] for row in line["strategies"]) == pytest.approx(1)
    assert scores_in(line, ("rps", 0)) == memory.scores(("rps", 0))
    assert memory.best(TASK, scores_in(line, ("rps", 1)), 7) is None
    assert memory.best(TASK, scores_in(line, ("rps", 0)), 7).version == 7
