"""What a memory learns from batches, keeps, and says."""

import msgspec
import pytest

from mage_async.methods.graph_memory import GraphState, recorded_scores
from mage_async.trajectory import Task

TASK = Task("rps", "m", 1)


def lesson(group_of, state="s", good="left", bad="right", seat=0, told=None):
    return group_of([[[(state, good, 1.0)]], [[(state, bad, 0.0)]]], told, seat)


def test_the_best_and_the_worst_episode_of_a_group_become_a_strategy(config, memory_of, group_of):
    memory = memory_of(config())
    assert memory.guidance(0, TASK) is None
    memory.learn([lesson(group_of)])
    assert memory.version == 1
    assert memory.evaluation_guidance(TASK).text == "s left"
    assert memory.guidance(3, TASK).version == 1
    assert memory.guidance(3, Task("rps", "m", 1, 1)).decisions == (("s", "left"),)
    memory.learn([group_of([[[("t", "left", 1.0)]], [[("t", "right", 1.0)]]])])
    assert list(memory.graph.strategies) == [("s", "left")]


def test_a_restored_memory_goes_on_bit_by_bit(config, memory_of, group_of):
    memory, other = memory_of(config(strategies=2)), memory_of(config(strategies=2))
    for number in range(30):
        state, seat = f"s{number % 7}", number % 2
        told = memory.guidance(number, TASK)
        memory.learn([lesson(group_of, state, "xy"[number % 3 > 0], "z", seat, told)])
        other.begin(memory.state(), memory.version)
        assert other.state() == memory.state()
        assert other.guidance(number, TASK) == memory.guidance(number, TASK)
    assert any(known.shown for known in memory.graph.strategies.values())


def test_paths_and_bytes_are_bounded(config, memory_of, group_of):
    memory = memory_of(config(strategies=2, max_paths=5, max_bytes=40))
    for number in range(20):
        memory.learn([lesson(group_of, f"s{number}"), lesson(group_of, "long" * 10)])
    table = msgspec.msgpack.decode(memory.state(), type=GraphState)
    assert len(table.paths) == len(table.strategies) == 5
    assert table.strategies[-1][0] == ("s19", "left")
    assert all(len(memory.guidance(n, TASK).text.encode()) <= 40 for n in range(50))


def test_a_model_that_reads_is_told_in_words(config, memory_of, group_of):
    plain = config()
    reads = msgspec.structs.replace(plain.transcript, rules=True)
    memory = memory_of(msgspec.structs.replace(plain, transcript=reads))
    memory.learn([lesson(group_of)])
    assert "at “s”: left" in memory.evaluation_guidance(TASK).text


def test_shuffled_rewards_teach_both_decisions_alike(config, memory_of, group_of):
    scores = {}
    for rewards in ("own", "shuffled"):
        memory = memory_of(config(rewards=f'"{rewards}"', max_paths=1000))
        for _ in range(60):
            memory.learn([lesson(group_of) for _ in range(8)])
        scores[rewards] = memory.scores(("rps", 0))
    assert list(scores["own"]) == [("s", "left")]
    assert scores["shuffled"][("s", "left")] == pytest.approx(scores["shuffled"][("s", "right")])


def test_a_line_lists_strategies_with_their_weights(config, memory_of, group_of):
    memory = memory_of(config())
    memory.learn([lesson(group_of), lesson(group_of, "t")])
    line = msgspec.json.decode(msgspec.json.encode(memory.record()))
    assert [row["state"] for row in line["strategies"]] == ["s", "t"]
    assert {row["born"] for row in line["strategies"]} == {1}
    assert sum(row["probability"] for row in line["strategies"]) == pytest.approx(1)
    assert recorded_scores(line, ("rps", 0)) == memory.scores(("rps", 0))
    unknown = {"version": 7, "strategies": []}
    assert memory.evaluation_guidance(TASK, unknown) is None
    assert memory.evaluation_guidance(TASK, line | {"version": 7}).version == 7
