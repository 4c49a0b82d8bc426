"""What fits, what does not, and which key a refusal names."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from mage_async.config import config_file
from mage_async.config.schema import Config
from mage_async.errors import ConfigError, PolicyError
from mage_async.plan.model_shape import HUB, Shape, meta_model, shape_of
from mage_async.plan.plan import (
    CPU,
    GB,
    GPUS,
    Device,
    Plan,
    check_dtype,
    device_of,
    plan_lines,
    plan_of,
    processes_of,
)
from mage_async.plan.update_memory import Batch, Update

FOLDER = config_file.find(None).parent
ON_GPU = sorted(
    file.relative_to(FOLDER).with_suffix("").as_posix()
    for file in FOLDER.rglob("*.toml")
    if config_file.load(file).learner.device != "cpu"
)


def of(name: str, *changes: str) -> Config:
    return config_file.load(config_file.find(name), list(changes))


def plan(config: Config, parts: dict[str, float], memory_gb: float = 24) -> Plan:
    """A plan whose learner holds so many GB."""
    update = Update(Counter({name: round(size * GB) for name, size in parts.items()}), 1e9, GB)
    device = Device("GPU", round(memory_gb * GB))
    shape = shape_of(config)
    return Plan(
        config, device, Batch.of(config), update, processes_of(config, shape, update, device, 1)
    )


def test_every_gpu_configuration_names_its_hardware() -> None:
    assert {"rtx4090_qwen3_0_6b", "h100_qwen3_4b", "gpu8", "papers/mage_kuhn"} <= set(ON_GPU)
    assert [name for name in ON_GPU if of(name).hardware.gpu not in GPUS] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_GPU)
def test_every_gpu_configuration_fits_with_a_tenth_to_spare(name: str) -> None:
    config = of(name)
    if config.environment.name == "alfworld":
        pytest.importorskip("alfworld")
    found = plan_of(config, device_of(config.hardware.gpu), len(config.engine.devices) - 1 or 1)
    found.check()
    assert found.spare() >= 0.1
    file = "papers/qwen3_4b" if name.startswith("papers/") else name
    assert "planned, GB (`mage plan " in config_file.find(file).read_text()


@pytest.mark.parametrize(
    ("changes", "parts", "said"),
    [
        ((), {"activations": 60}, "set learner.activation_checkpointing = true"),
        (
            ("learner.activation_checkpointing=true", "learner.max_tokens_per_microbatch=0"),
            {"activations": 60},
            "set learner.max_tokens_per_microbatch = 8192",
        ),
        (
            ("learner.activation_checkpointing=true",),
            {"activations": 60},
            "lower engine.max_tokens = 8192 and, with it, learner.max_tokens_per_microbatch",
        ),
        ((), {"optimizer": 50, "activations": 1}, "set policy.lora.rank = 16"),
        (
            ('policy.dtype="float32"',),
            {"weights": 50, "activations": 1},
            'set policy.dtype = "bfloat16"',
        ),
        ((), {"activations": 1}, "set engine.server.max_total_tokens to less than "),
        # A larger part than these, which no key makes smaller, is too large by itself.
        ((), {"weights": 90, "activations": 1}, "no key makes it fit: take a larger GPU"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_part_and_the_key(
    changes: tuple[str, ...], parts: dict[str, float], said: str
) -> None:
    config = of("h200_qwen3_0_6b", *changes)
    with pytest.raises(ConfigError, match=rf"^GPU 0 would need .* GB and has 24: .*{said}"):
        plan(config, parts).check()


@pytest.mark.parametrize(
    ("changes", "weights", "memory_gb", "said"),
    [
        ((), 29, 31, r'GPU 7 .* publication of the learner .*set transport.weights = "tensor"'),
        (["transport.weights=tensor"], 1, 31, 'GPU 0 .*new weights .*transport.weights = "nccl"'),
        # The first engine of a GPU would leave nothing to the evaluator's.
        (["engine.devices=[0]"], 1, 141, "can cache 0 tokens, .*max_total_tokens, .* to 8192 or"),
    ],
)
def test_a_refusal_names_another_transport_or_a_bound_on_caches(
    changes: list[str], weights: float, memory_gb: float, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        plan(of("gpu8", *changes), {"weights": weights}, memory_gb).check()


RANKS = ("learner.ranks=4", "learner.device=cuda:2", "engine.devices=[0, 1]")


def test_a_learner_that_fits_only_sharded_is_planned_on_the_gpu_of_each_rank() -> None:
    parts = {"weights": 4.0, "masters": 8.0, "gradients": 8.0, "optimizer": 16.0, "head": 1.0}
    with pytest.raises(ConfigError, match="GPU 0 would need"):
        plan(of("h200_qwen3_0_6b"), parts).check()
    changes = (*RANKS, "engine.server.max_total_tokens=10000")
    found = plan(of("h200_qwen3_0_6b", *changes), parts)
    found.check()
    ranks = found.processes[:4]
    assert [each.place for each in ranks] == ["GPU 2", "GPU 3", "GPU 4", "GPU 5"]
    for each in ranks:
        assert (each.parts["optimizer"], each.parts["head"]) == (4 * GB, GB)
        assert each.parts["publication"] == GB // 4
        assert each.parts["process"] == GB
        assert "checkpoint" not in each.parts, "its copies are in host memory"
    # Embedding and LM head are one tensor of Qwen3-0.6B; two of its 28 layers are gathered.
    embedding = 151_936 * 1024
    gathered = embedding + 2 * (596_049_920 - embedding) // 28
    assert ranks[0].parts["gathered"] == (2 + 4) * gathered
    shown = list(plan_lines(found, tflops=100))
    assert "learner's rank 3 on GPU 5, GB:" in shown
    assert any("at 100 TFLOP/s of each of 4 GPUs, given" in line for line in shown)
    assert found.step_s(100) == pytest.approx(found.flops() / 4e14)


@pytest.mark.parametrize(
    ("size", "received"), [("0.6B", 2 * (512 << 20)), ("8B", 2 * 2 * 151_936 * 4096)]
)
def test_an_engine_holds_what_nccl_brings_twice(size: str, received: int) -> None:
    config = of("gpu8", f"policy.source=Qwen/Qwen3-{size}")
    assert plan(config, {}).processes[-1].parts["new weights"] == received


@pytest.mark.parametrize(
    ("changes", "num_versions"),
    [
        (("transport.weights=tensor",), 1),
        (("transport.weights=nccl",), 2),
        (("transport.weights=nccl", "learner.device=cpu"), 3),
        (("transport.weights=nccl", "learner.ranks=4"), 1 / 4),
    ],
)
def test_versions_that_engines_may_still_ask_for_are_planned(
    changes: tuple[str, ...], num_versions: float
) -> None:
    config = of("h200_qwen3_0_6b", "learner.device=cuda:2", "engine.devices=[0, 1]", *changes)
    assert plan(config, {}).processes[0].parts["publication"] == num_versions * GB


def test_an_engine_is_planned_with_the_cache_that_the_others_on_its_gpu_leave() -> None:
    config = of("h100_qwen3_4b")
    found = plan(config, {"head": 20}, memory_gb=80)
    assert [each.kv_tokens for each in found.processes[1:]] == [24_000, 24_000]
    found.check()
    config = of("h100_qwen3_4b", "engine.server.mem_fraction_static=0.3")
    found = plan(config, {"head": 20}, memory_gb=80)
    assert [each.kv_tokens for each in found.processes[1:]] == [24_000, 0]
    with pytest.raises(ConfigError, match=r"evaluator on GPU 0 can cache 0 tokens, fewer than eng"):
        found.check()


def test_ranks_that_do_not_fit_are_told_to_be_more() -> None:
    with pytest.raises(ConfigError, match=r"of the learner's rank 0 are .* raise learner\.ranks"):
        plan(of("h200_qwen3_0_6b", *RANKS), {"optimizer": 200}).check()


def test_ranks_on_cores_share_the_memory_of_one_machine() -> None:
    one, two = (
        plan(of("quickstart", f"learner.ranks={n}"), {"optimizer": 2, "activations": 1})
        for n in (1, 2)
    )
    assert [each.place for each in two.processes[:2]] == [CPU, CPU]
    assert two.processes[1].parts["optimizer"] == one.processes[0].parts["optimizer"] // 2
    assert two.processes[1].parts["activations"] == GB
    assert two.processes[1].parts["checkpoint"] == GB, "it is written while the next steps train"
    assert "checkpoint" not in one.processes[0].parts
    assert two.step_s(1) == one.step_s(1)


def test_more_than_a_thousand_gb_are_written_out() -> None:
    found = plan(of("h200_qwen3_0_6b"), {"optimizer": 1120})
    assert any(line.split() == ["optimizer", "1,120"] for line in plan_lines(found))
    with pytest.raises(ConfigError, match=r"optimizer of the learner are 1,120 GB of it"):
        found.check()


def test_engines_on_cores_are_compared_with_the_memory_of_the_machine() -> None:
    config = of("quickstart", "learner.device=cuda:0", "engine.max_contexts=20000")
    found = plan(config, {"activations": 1}, memory_gb=3.5)
    on_cores = found.needed()[CPU]
    assert on_cores > 3.5 * GB, "the engines alone would not fit the GPU"
    found.check()
    assert not any("GPU" in line and line.startswith(f"{CPU}:") for line in plan_lines(found))
    small = replace(found, machine_bytes=on_cores - GB)
    with pytest.raises(ConfigError, match=rf"^{CPU} would need .* lower engine.max_contexts"):
        small.check()
    assert any(line.startswith(f"{CPU}: ") and f"GB of {CPU}" in line for line in plan_lines(small))
    replace(found, machine_bytes=2 * on_cores).check()


def test_only_the_longest_contexts_are_called_so() -> None:
    found = plan(of("quickstart"), {})
    [line] = [each for each in plan_lines(found) if each.startswith("contexts of ")]
    assert "(the longest that the engine holds)" in line
    mean = replace(found, batch=Batch.of(found.config, 50))
    [line] = [each for each in plan_lines(mean) if each.startswith("contexts of ")]
    assert line.startswith("contexts of 50 tokens (as given)")


def test_a_small_learner_fits() -> None:
    found = plan(of("h200_qwen3_0_6b"), {"activations": 1}, memory_gb=141)
    found.check()
    assert 0 < found.spare() < 1


def test_seconds_follow_from_a_rate_that_is_given_or_of_a_data_sheet() -> None:
    found = plan(of("h200_qwen3_0_6b"), {"activations": 1}, memory_gb=141)
    assert found.step_s() == 0.0
    assert found.step_s(10) == pytest.approx(found.flops() / 1e13)
    assert GPUS["h100"].tflops("bfloat16") == 989


def test_a_type_that_a_gpu_lacks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r'policy.dtype = "bfloat16", which v100 does not'):
        check_dtype("bfloat16", GPUS["v100"])
    check_dtype("float32", GPUS["v100"])
    with pytest.raises(ConfigError, match="does not compute in"):
        plan_of(of("gpu8"), GPUS["t4"], 1)


@pytest.mark.parametrize("tokens", [-5, 1, 4097])
def test_a_context_of_a_length_that_there_cannot_be_is_refused(tokens: int) -> None:
    with pytest.raises(ConfigError, match=rf"from 2 to engine.max_tokens = 4096 .*, got {tokens}"):
        plan_of(of("h100_qwen3_4b"), GPUS["h100"], 1, context_tokens=tokens)


def test_a_gpu_has_to_be_named_or_its_memory_given() -> None:
    assert device_of("", 48).memory_bytes == 48 * GB
    assert device_of("h100", 40).memory_bytes == 40 * GB
    with pytest.raises(ConfigError, match="to one of t4, v100"):
        device_of("")


def test_shapes_of_the_hub_have_the_published_numbers_of_weights() -> None:
    published = {"0.6B": 596_049_920, "4B": 4_022_468_096, "8B": 8_190_735_360}
    for size, count in published.items():
        found = shape_of(of("gpu8", f"policy.source=Qwen/Qwen3-{size}"))
        assert found.num_weights == count
    smol = shape_of(of("quickstart", "policy.source=HuggingFaceTB/SmolLM2-135M-Instruct"))
    assert smol.num_weights == 134_515_008
    sources = (
        getattr(config_file.load(file).policy, "source", "") for file in FOLDER.rglob("*.toml")
    )
    assert {*sources} - {""} <= HUB.keys()
    assert shape_of(of("gpu8")).kv_token_bytes(2) == 147_456


def test_a_shape_that_is_not_known_is_a_sentence() -> None:
    for source in ("me/unknown", "no name of the hub"):
        with pytest.raises(PolicyError, match=f"'{source}' is not on this machine, and its shape"):
            shape_of(of("gpu8", f"policy.source={source}"))


@pytest.mark.parametrize(
    "text",
    ["{", '{"model_type": "nothing_known"}', '{"model_type": "clip"}'],
    ids=["damaged", "unknown", "no language model"],
)
def test_a_config_json_of_no_causal_lm_is_a_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(PolicyError, match=f"^{tmp_path}: transformers cannot build it: "):
        shape_of(of("gpu8", f"policy.source={tmp_path}"))


def test_adapters_of_layers_that_do_not_exist_are_refused_without_weights() -> None:
    config = of("gpu8", 'policy.lora.targets=["q_proj", "c_attn"]')
    shape = shape_of(config)
    assert isinstance(shape, Shape)
    with pytest.raises(PolicyError, match="has no layer 'c_attn' that takes an adapter; it has"):
        meta_model(config, shape)


def test_a_directory_needs_no_weights(tmp_path: Path) -> None:
    source = of("gpu8", "policy.source=Qwen/Qwen3-0.6B")
    shape_of(source).config.save_pretrained(tmp_path)
    found = shape_of(of("gpu8", f"policy.source={tmp_path}"))
    assert found.num_weights == 596_049_920


@pytest.mark.parametrize(
    ("changes", "tflops"),
    [
        ((), 19.5),
        (("learner.matmul_precision=high",), 156),
        (("learner.matmul_precision=high", "policy.dtype=bfloat16"), 312),
    ],
)
def test_float32_that_is_rounded_to_tf32_has_half_the_rate_of_16_bits(
    changes: tuple[str, ...], tflops: float
) -> None:
    planned = plan(of("quickstart", *changes), {})
    assert replace(planned, device=GPUS["a100_80"]).tflops() == tflops


def test_a_gpu_without_bfloat16_has_no_tf32() -> None:
    assert GPUS["v100"].tflops("float32", is_rounded=True) == GPUS["v100"].tflops("float32")


def test_an_engine_with_rivals_as_adapters_holds_the_layers_of_their_base_too() -> None:
    keys = ("policy.source=Qwen/Qwen3-0.6B", "environment.name=kuhn", "policy.lora.rank=8")
    device, update = Device("machine", 24 * GB), Update(Counter(), 1e9, GB)

    def found(*more: str) -> list[int]:
        config = config_file.load(config_file.find(None), [*keys, *more])
        planned = processes_of(config, shape_of(config), update, device, 1)
        return [each.parts["base of rivals"] for each in planned]

    assert found() == [0, 0, 0]
    # Learner, actor, evaluator: without the embedding, which is the head too.
    layers = 596_049_920 - 151_936 * 1024
    wide = "engine.arithmetic=float32"
    assert found("population.rivals=0.5", wide) == [0, 4 * layers, 0]
    norms = 28 * (2 * 1024 + 2 * 128) + 1024
    narrow = "engine.arithmetic=bfloat16"
    assert found("population.rivals=0.5", narrow) == [0, 2 * layers + 2 * norms, 0]


def test_gpus_that_share_a_model_hold_a_part_each() -> None:
    eight = ("engine.devices=[0, 1, 2, 3, 4, 5, 6, 7]", "transport.weights=tensor")
    small = ("policy.source=Qwen/Qwen3-0.6B", *eight)
    one, four = (
        plan(of("gpu8", *small, *more), {"weights": 4}, 80)
        for more in ((), ("engine.gpus_per_actor=4",))
    )
    whole, part = one.processes[-1], four.processes[-4]  # of the evaluator; its first GPU
    assert part.parts["weights"] == whole.parts["weights"] // 4
    assert part.kv_token_bytes == whole.kv_token_bytes / 4
    assert part.parts["new weights"] == whole.parts["new weights"], "it is handed over whole"
    assert four.processes[-1].parts["new weights"] == part.parts["weights"]
    assert [process.place for process in four.processes[1:]] == [f"GPU {n}" for n in range(8)]
