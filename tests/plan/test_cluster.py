"""Many GPUs: closed forms of what ranks hold and send, and the division between both sides."""

from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn

from mage_async.config import config_file
from mage_async.config.schema import Config
from mage_async.errors import ConfigError
from mage_async.plan.cluster import cluster_of, engine_load, engine_s
from mage_async.plan.devices import GB, GPUS
from mage_async.plan.loads import loads_of
from mage_async.plan.made_up import Batch
from mage_async.plan.plan import Plan
from mage_async.plan.ranks import (
    Block,
    Blocks,
    blocks_of,
    compute_s,
    contexts_of,
    parts_of,
    traffic_of,
)
from mage_async.plan.shapes import Shape, meta_model, shape_of
from mage_async.plan.text import cluster_lines
from mage_async.plan.update import Update

FOUR_PASSES = ("learner.minibatches=2", "learner.tokens_per_pass=10", "engine.max_tokens=16")
BLOCKS = Blocks(Block(100, 10), (Block(40, 5), Block(60, 7)))
PARTS = {"weights": 4, "masters": 8, "optimizer": 16, "gradients": 8, "activations": 20}


def of(*changes: str) -> Config:
    small = ("policy.source=Qwen/Qwen3-0.6B", *changes)
    return config_file.load(config_file.find("gpu8"), list(small))


@cache
def small_shape() -> Shape:
    return shape_of(of())


def plan(config: Config, flops: float = 1e9) -> Plan:
    """A plan of an update that is made up; parts are in GB."""
    parts = Counter({name: size * GB for name, size in PARTS.items()})
    update, shape, device = Update(parts, flops, GB), small_shape(), GPUS["h100"]
    loads = loads_of(config, shape, update, device, 1)
    batch = Batch.of(config)
    return Plan(config, device, batch, update, loads, shape.num_weights)


def test_what_has_a_number_for_each_weight_is_divided_and_the_rest_is_not() -> None:
    found = plan(of())
    one, four = (parts_of(found, BLOCKS, ranks) for ranks in (1, 4))
    assert one == found.loads[0].parts
    assert "whole blocks" not in one
    assert four["optimizer"] == 4 * GB
    assert four["publication"] == one["publication"] / 4 == GB / 4
    assert four["activations"] == one["activations"] == 20 * GB
    assert four["whole blocks"] == 100 + 4 * 10 + 60 + 4 * 7


def test_a_rank_sends_all_blocks_but_its_share() -> None:
    found = plan(of("learner.minibatches=2"))
    found = replace(found, batch=Batch(num_segments=16, tokens=8, sampled=2))
    rules = found.config.learner
    per_pass = found.batch.of_one_pass(found.config)
    assert rules.minibatches == 2
    for ranks in (1, 2, 4):
        passes = -(-(8 // ranks) // per_pass)
        traffic = traffic_of(found, BLOCKS, ranks)
        whole = 3 * passes * 200 + 2 * passes * 100  # 3 forwards, 2 backwards without the root
        assert traffic.gathered == whole * (ranks - 1) // ranks
        assert traffic.reduced == 2 * passes * 4 * 22 * (ranks - 1) // ranks


def test_a_reference_policy_is_gathered_for_a_forward_of_every_pass() -> None:
    changes = ("learner.minibatches=2", "policy.lora=none")
    without, given = (plan(of(*changes, f"learner.kl={kl}")) for kl in (0, 0.1))
    batch = Batch(num_segments=16, tokens=8, sampled=2)
    traffic = [traffic_of(replace(each, batch=batch), BLOCKS, 2) for each in (without, given)]
    passes = -(-4 // batch.of_one_pass(given.config))
    assert traffic[1].gathered - traffic[0].gathered == 2 * passes * 200 // 2
    assert traffic[1].reduced == traffic[0].reduced


def test_passes_add_traffic_and_ranks_share_them() -> None:
    found = plan(of(*FOUR_PASSES))
    found = replace(found, batch=Batch(num_segments=16, tokens=5, sampled=2))
    assert found.batch.of_one_pass(found.config) == 2  # of 8 contexts a minibatch
    assert traffic_of(found, BLOCKS, 2).reduced == 2 * 2 * 4 * 22 // 2
    assert traffic_of(found, BLOCKS, 4).reduced == 2 * 1 * 4 * 22 * 3 // 4


def test_the_fullest_rank_decides_how_long_a_step_takes() -> None:
    found = replace(plan(of("learner.minibatches=1")), batch=Batch(10, 8, 2))
    assert contexts_of(found.config, found.batch, 4) == 3
    assert compute_s(found, 1, 2.0) == pytest.approx(found.step_s(2.0))
    assert compute_s(found, 4, 2.0) == pytest.approx(found.step_s(2.0) * 3 / 10)


def test_blocks_are_the_layers_and_all_else_once() -> None:
    config = of('policy.dtype="bfloat16"')
    model = meta_model(config, shape_of(config))
    found = blocks_of(model)
    assert len(found.layers) == 28
    everything = [found.root, *found.layers]
    total = sum(weight.numel() * weight.itemsize for weight in model.parameters())
    assert sum(block.num_bytes for block in everything) == total
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    assert sum(block.num_trained for block in everything) == trained
    assert isinstance(model, nn.Module)
    assert next(model.parameters()).device == torch.device("meta")


def test_an_engine_reads_its_weights_once_for_a_token_of_each_context() -> None:
    found = plan(of("engine.max_contexts=10"))
    found = replace(found, batch=Batch(num_segments=100, tokens=50, sampled=20))
    load = found.loads[-1]
    read = load.parts["weights"] + 10 * 25 * load.kv_token_bytes
    drawn = 100 * 20 / 10 * read / (3350 * GB)
    prompts = 100 * 30 * 2 * found.num_weights / 989e12
    assert engine_s(found) == pytest.approx(drawn + prompts)


def test_gpus_are_divided_so_that_neither_side_waits_long() -> None:
    found = plan(of())
    best = cluster_of(found, BLOCKS, 16)
    assert best.ranks + best.engines == 16
    others = [cluster_of(found, BLOCKS, 16, ranks=n) for n in range(1, 16)]
    assert best.step_s() == min(each.step_s() for each in others)
    assert best.step_s() == max(best.learner_s(), best.engines_s())
    needed = best.needed_engines()
    assert best.engine_s / needed <= best.learner_s()
    assert needed == 1 or best.engine_s / (needed - 1) > best.learner_s()


def test_gpus_that_share_a_model_hold_and_read_a_part_each() -> None:
    eight = ("engine.devices=[0, 1, 2, 3, 4, 5, 6, 7]", "transport.weights=tensor")
    one, four = plan(of(*eight)), plan(of(*eight, "engine.gpus_per_actor=4"))
    whole, part = engine_load(one), engine_load(four)
    assert part.parts["weights"] == whole.parts["weights"] // 4
    assert part.kv_token_bytes == whole.kv_token_bytes / 4
    assert part.parts["new weights"] == whole.parts["new weights"], "it is handed over whole"
    assert four.loads[-1].parts["new weights"] == part.parts["weights"]
    assert [load.place for load in four.loads[1:]] == [f"GPU {n}" for n in range(8)]


def test_engines_take_whole_groups_of_the_gpus_that_the_learner_leaves() -> None:
    found = plan(of("engine.gpus_per_actor=2", "engine.devices=[0, 1, 2, 3]"))
    cluster = cluster_of(found, BLOCKS, 9, ranks=2)
    assert cluster.engines == 3
    said = "\n".join(cluster_lines(cluster))
    assert said.startswith("8 GPUs: the learner on 2, engines on 6, 2 for each of 3\n")
    with pytest.raises(ConfigError, match="beside 1 ranks of the learner, where an engine takes 2"):
        cluster_of(found, BLOCKS, 2)


def test_a_slow_link_is_what_a_learner_waits_for() -> None:
    found = plan(of())
    fast, slow = (cluster_of(found, BLOCKS, 8, ranks=4, link_gb_s=rate) for rate in (450, 0.1))
    assert slow.links_s() == pytest.approx(4500 * fast.links_s())
    assert slow.learner_s() == max(slow.links_s(), slow.publication_s())
    assert slow.publication_s() == pytest.approx(10.0)


def test_the_plan_says_who_waits_and_for_how_many_gpus() -> None:
    cluster = cluster_of(plan(of()), BLOCKS, 8, ranks=4)
    said = "\n".join(cluster_lines(cluster))
    assert said.startswith("8 GPUs: the learner on 4, engines on 4\neach rank of the learner")
    assert "whole blocks" in said
    assert f"{cluster.needed_engines()} engines keep this learner busy" in said


def test_what_cannot_be_divided_is_refused() -> None:
    with pytest.raises(ConfigError, match="--gpus 4 leaves no GPU for engines beside 4 ranks"):
        cluster_of(plan(of()), BLOCKS, 4, ranks=4)
    with pytest.raises(ConfigError, match=r'got learner.device = "cpu" and engine.kind'):
        cluster_of(plan(of("learner.device=cpu")), BLOCKS, 8)
    unknown = replace(plan(of()), device=replace(GPUS["h100"], read_gb_s=0.0))
    with pytest.raises(ConfigError, match="the rates of h100 are not known"):
        cluster_of(unknown, BLOCKS, 8)
    tiny = replace(plan(of()), device=replace(GPUS["h100"], memory_bytes=GB))
    with pytest.raises(ConfigError, match=r"each of 7 ranks would need .* GB, each GPU of"):
        cluster_of(tiny, BLOCKS, 8)
