"""The parts of the SGLang adapter that need no SGLang; `tests/sglang` has the rest."""

import asyncio
import itertools
import json
import re
import socket
import struct
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mage_async.assembly import check
from mage_async.completion import Sampling
from mage_async.config import config_file
from mage_async.config.schema import Sglang as EngineRules
from mage_async.errors import ConfigError, PolicyError, RunError, UnreadableWeights
from mage_async.policy.model_files import check_divisible
from mage_services.engines.sglang import arguments, server
from mage_services.engines.sglang import messages as say
from mage_services.engines.sglang.arguments import (
    check_context_length,
    known_names,
    server_arguments,
)
from mage_services.engines.sglang.server import generated, nothing_generated, spans_of
from mage_services.processes.child_process import Channel, frame
from mage_services.weights.process_group import Manifest

RULES = EngineRules(
    max_contexts=8,
    max_tokens=100,
    cache_rule="keep",
    threads=1,
    in_flight="in_place",
    turn_deadline_s=60.0,
    devices=[],
    server={},
)


def heard(data: bytes) -> list[say.Message]:
    """The messages in some bytes."""

    async def main() -> list[say.Message]:
        ours, theirs = socket.socketpair()
        channel: Channel[say.Message] = await Channel.over(ours, say.Message)
        with theirs:
            theirs.sendall(data)
        found = [message async for message in channel.messages()]
        channel.close()
        return found

    return asyncio.run(main())


MESSAGES: list[say.Message] = [
    say.Start(
        name="actor-0",
        directory="/m",
        arguments={"page_size": 1, "x": [1.5, None]},
        max_tokens=9,
    ),
    say.Serving(facts="SGLang"),
    say.Failed(reason="no memory"),
    say.Generate(
        rid="0" * 32,
        tokens=np.arange(5, dtype=np.int32).tobytes(),
        extra_key="v3",
        sampling=Sampling(temperature=0.5, max_tokens=4, stop_tokens=(7, 8)),
        seed=2**63 - 1,
    ),
    say.PromptCached(rid="a"),
    say.Prepare(version=4, path="/w"),
    say.Prepared(),
    nothing_generated("a"),
    say.Refused(rid="a", reason="too long"),
    say.Abort(rid="a"),
    say.Load(version=4, path="/w", interrupts=True),
    say.Loaded(version=4, error="", stall_s=0.25),
]


def test_every_message_is_heard_as_it_was_said() -> None:
    assert heard(b"".join(map(frame, MESSAGES))) == MESSAGES


@given(st.integers(0, 400))
def test_a_stream_that_ends_anywhere_ends_with_its_last_whole_message(cut: int) -> None:
    frames = [frame(message) for message in MESSAGES]
    ends = list(itertools.accumulate(map(len, frames)))
    cut = min(cut, ends[-1])
    assert heard(b"".join(frames)[:cut]) == MESSAGES[: sum(end <= cut for end in ends)]


def test_a_length_is_four_bytes_in_little_endian() -> None:
    data = frame(say.Abort(rid="a"))
    assert struct.unpack("<I", data[:4]) == (len(data) - 4,)


ENTRIES = [(-0.5, 11, None), (-0.25, 12, None), (-1.0, 13, None)]


def test_a_reply_becomes_tokens_and_logprobs() -> None:
    meta = {
        "output_token_logprobs": ENTRIES,
        "cached_tokens": 6,
        "finish_reason": {"type": "stop", "matched": 13},
        "weight_versions": [{"version": "4", "start": 0, "end": 3}],
    }
    message = generated("r", meta, [(0, 4)])
    assert np.frombuffer(message.tokens, np.int32).tolist() == [11, 12, 13]
    assert np.frombuffer(message.logprobs, np.float32).tolist() == [-0.5, -0.25, -1.0]
    assert (message.spans, message.provenance) == (((0, 4),), "exact")
    assert (message.num_cached, message.is_aborted) == (6, False)


def test_a_request_that_never_ran_has_drawn_nothing() -> None:
    """What SGLang says of one that was aborted in its waiting queue: no counts at all."""
    message = generated("r", {"finish_reason": {"type": "abort", "message": "in queue"}}, [(0, 4)])
    assert (message.tokens, message.num_cached, message.is_aborted) == (b"", 0, True)
    assert message.spans == ()


def spans(*said: tuple[int, int, int]) -> dict[str, Any]:
    return {"weight_versions": [{"version": str(v), "start": a, "end": b} for v, a, b in said]}


@pytest.mark.parametrize(
    ("meta", "cuts", "expected"),
    [
        (spans((3, 0, 2), (4, 2, 9)), [(0, 3), (1, 4)], (((0, 3), (2, 4)), "exact")),
        (spans((3, 0, 2), (4, 2, 9), (5, 9, 9)), [(0, 3)], (((0, 3), (2, 4)), "exact")),
        ({}, [(0, 3)], (((0, 3),), "exact")),
        ({}, [(0, 3), (5, 4)], (((0, 3), (5, 4)), "segment")),
        ({}, [(0, 3), (5, 4), (5, 6)], (((0, 3), (5, 6)), "segment")),
        ({}, [(0, 3), (0, 4), (5, 6)], (((0, 4), (5, 6)), "segment")),
        ({}, [(0, 3), (0, 4)], (((0, 4),), "reply")),
    ],
    ids=[
        "SGLang says it",
        "SGLang says it of a version that drew nothing",
        "one version throughout",
        "cut where new weights came",
        "cut twice at one token",
        "cut before the first token",
        "nobody listened",
    ],
)
def test_versions_are_known_in_one_of_three_ways(
    meta: dict[str, Any], cuts: list[tuple[int, int]], expected: object
) -> None:
    assert spans_of(meta, cuts, 9) == expected


@pytest.mark.parametrize("found", ["0.5.12", "0.5.12.post1", "0.5.20", "0.5.23", "0.5.17+cpu"])
def test_a_known_version_is_taken(found: str) -> None:
    arguments.check_version(found)


@pytest.mark.parametrize("found", ["0.5.11", "0.5.24", "0.6.0", "0.5.9.post1", "nonsense"])
def test_another_version_says_what_is_supported(found: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"SGLang {found} is installed, and 0\.5\.12 to 0\.5\.23"
    ):
        arguments.check_version(found)


def test_tokens_are_tagged_by_sglang_itself_from_0_5_19_on() -> None:
    assert [arguments.has_token_versions(v) for v in ("0.5.18", "0.5.19", "0.5.23")] == [
        False,
        True,
        True,
    ]


CONTEXTS: list[tuple[dict[str, Any], dict[str, Any], int]] = [
    ({"max_position_embeddings": 4096}, {}, 4088),
    ({"max_position_embeddings": 4096}, {"context_length": 2048}, 2040),
    ({"text_config": {"max_position_embeddings": 4096}}, {}, 4088),
    ({"max_position_embeddings": 4096, "rope_scaling": {"factor": 2.0}}, {}, 8184),
    (
        {"max_position_embeddings": 4096, "rope_parameters": {"factor": 8, "rope_type": "llama3"}},
        {},
        4088,
    ),
]


@pytest.mark.parametrize(("model", "server_", "most"), CONTEXTS)
def test_contexts_that_sglang_would_cut_are_refused_with_the_longest(
    tmp_path: Path, model: dict[str, Any], server_: dict[str, Any], most: int
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(model))
    rules = msgspec.structs.replace(RULES, server=server_)
    check_context_length(msgspec.structs.replace(rules, max_tokens=most), tmp_path)
    what = r"engine\.server\.context_length" if server_ else "the context length of .*"
    with pytest.raises(ConfigError, match=rf", but {what} is .* set engine\.max_tokens = {most}$"):
        check_context_length(msgspec.structs.replace(rules, max_tokens=most + 1), tmp_path)


def test_a_model_that_states_no_length_may_have_any_context(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    check_context_length(msgspec.structs.replace(RULES, max_tokens=10**6), tmp_path)


@pytest.mark.parametrize("longest", [99, 100])
def test_an_sglang_whose_cache_holds_no_whole_context_does_not_serve(
    monkeypatch: pytest.MonkeyPatch, longest: int
) -> None:
    engine = SimpleNamespace(tokenizer_manager=SimpleNamespace(max_req_input_len=longest))
    for name, value in {
        "sglang.srt.entrypoints.engine": {"Engine": lambda **_: engine},
        "sglang.srt.server_args": {"ServerArgs": lambda page_size: None},
    }.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**value))
    start = say.Start(name="actor-0", directory="/m", arguments={"page_size": 1}, max_tokens=100)
    if longest == 100:
        assert server._launch(start) is engine
        return
    with pytest.raises(RunError, match=r"contexts of 99 tokens, and engine\.max_tokens = 100: rai"):
        server._launch(start)


@pytest.mark.parametrize("has_gpu", [False, True])
def test_no_batch_is_computed_while_weights_change(has_gpu: bool) -> None:
    made = server_arguments(RULES, Path("/m"), dtype="float32", has_gpu=has_gpu)
    assert made["disable_overlap_schedule"]
    own = msgspec.structs.replace(RULES, server={"disable_overlap_schedule": False})
    assert not server_arguments(own, Path("/m"), dtype="float32", has_gpu=has_gpu)[
        "disable_overlap_schedule"
    ]


def test_weights_come_in_sessions_from_0_5_21_on() -> None:
    assert not arguments.needs_update_messages("0.5.20")
    assert arguments.needs_update_messages("0.5.21")
    assert arguments.needs_update_messages("0.5.23")


def test_arguments_go_by_the_name_that_this_sglang_has() -> None:
    given_ = {"cuda_graph_max_bs_decode": 8, "page_size": 1}
    assert known_names(given_, ["cuda_graph_max_bs", "page_size"]) == {
        "cuda_graph_max_bs": 8,
        "page_size": 1,
    }
    assert known_names({"cuda_graph_max_bs": 8}, ["cuda_graph_max_bs_decode"]) == {
        "cuda_graph_max_bs_decode": 8
    }
    with pytest.raises(ConfigError, match="this SGLang has no argument `page_sise`"):
        known_names({"page_sise": 1}, ["page_size"])


def test_arguments_of_the_configuration_come_over_ours() -> None:
    rules = msgspec.structs.replace(RULES, devices=[], server={"page_size": 16, "dp_size": 2})
    arguments = server_arguments(rules, Path("/m"), dtype="bfloat16", has_gpu=True)
    assert (arguments["page_size"], arguments["dp_size"]) == (16, 2)
    assert (arguments["max_running_requests"], arguments["dtype"]) == (8, "bfloat16")
    assert "device" not in arguments
    assert server_arguments(RULES, Path("/m"), dtype="float32", has_gpu=False)["device"] == "cpu"


def test_what_another_key_says_cannot_be_said_twice() -> None:
    rules = msgspec.structs.replace(RULES, devices=[], server={"max_running_requests": 3})
    with pytest.raises(ConfigError, match=r"engine\.server: `max_running_requests` follows"):
        server_arguments(rules, Path("/m"), dtype="float32", has_gpu=True)


def test_the_gpus_of_an_engine_are_its_tensor_parallelism(tmp_path: Path) -> None:
    shape = {"num_attention_heads": 16, "num_key_value_heads": 8, "intermediate_size": 3072}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": shape}))
    rules = msgspec.structs.replace(RULES, gpus_per_actor=4)
    assert server_arguments(rules, tmp_path, dtype="bfloat16", has_gpu=True)["tp_size"] == 4
    assert server_arguments(RULES, tmp_path, dtype="bfloat16", has_gpu=True)["tp_size"] == 1
    other = msgspec.structs.replace(rules, server={"tp_size": 2})
    with pytest.raises(ConfigError, match=r"engine\.server: `tp_size` follows"):
        server_arguments(other, tmp_path, dtype="bfloat16", has_gpu=True)
    uneven = msgspec.structs.replace(RULES, gpus_per_actor=3)
    with pytest.raises(PolicyError, match="with 16 attention heads and 8 key-value heads cannot"):
        server_arguments(uneven, tmp_path, dtype="bfloat16", has_gpu=True)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "gpus", "is_shared"),
    [
        (32, 8, 9728, 8, True),
        (32, 2, 9728, 8, True),
        (32, 8, 9728, 3, False),
        (12, 3, 9728, 2, False),
        (32, 3, 9728, 8, False),
        (32, 8, 9730, 4, False),
    ],
)
def test_a_model_is_shared_where_its_heads_and_its_mlp_divide(
    heads: int, kv_heads: int, width: int, gpus: int, is_shared: bool
) -> None:
    shape = {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": width,
    }
    if is_shared:
        check_divisible(shape, gpus, "policy")
        return
    with pytest.raises(
        PolicyError, match=rf"engine\.gpus_per_actor = {gpus} GPUs: set it to a number"
    ):
        check_divisible(shape, gpus, "policy")


def test_a_configuration_that_cannot_share_a_model_is_refused() -> None:
    sharing = ["engine.kind=sglang", "engine.gpus_per_actor=2"]
    for way in ("disk", "tensor", "nccl"):
        check(config_file.load(config_file.find(None), [*sharing, f"transport.weights={way}"]))
    sentence = "gives each engine 2 of the 3 GPUs in engine.devices"
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        check(config_file.load(config_file.find(None), [*sharing, "engine.devices=[0, 1, 2]"]))


def test_the_embedded_engine_shares_its_model_over_no_gpus() -> None:
    with pytest.raises(ConfigError, match="gpus_per_actor"):
        config_file.load(config_file.find(None), ["engine.gpus_per_actor=2"])


def test_each_gpu_of_an_engine_is_handed_the_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    handed: list[Any] = []

    async def update(request: Any, _: None) -> tuple[bool, str]:
        handed.append(request)
        return True, ""

    manager = SimpleNamespace(
        server_args=SimpleNamespace(tp_size=2), update_weights_from_tensor=update
    )
    serialised = SimpleNamespace(serialize=lambda bucket: dict(bucket))
    for name, value in {
        "sglang.srt.managers.io_struct": {"UpdateWeightsFromTensorReqInput": SimpleNamespace},
        "sglang.srt.utils": {"MultiprocessingSerializer": serialised},
    }.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**value))
    loader = server.Loader(manager, "actor-0", 100, "float32", needs_update_messages=False)
    assert asyncio.run(loader._hand_over(3, {"flattened_tensor": 1})) == ""
    assert handed[0].serialized_named_tensors == [{"flattened_tensor": 1}] * 2
    assert handed[0].weight_version == "3"


def test_weights_handed_over_last_are_freed_before_as_much_is_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = server.Loader(None, "actor-0", 100, "float32", needs_update_messages=False)
    loader._kept = np.zeros(1)
    last, alive = weakref.ref(loader._kept), []
    monkeypatch.setattr(server, "SHARED", tmp_path)
    monkeypatch.setattr(server, "_bucket", lambda path: alive.append(last() is not None))
    asyncio.run(loader.prepare(2, tmp_path / "v000002.safetensors"))
    assert alive == [False]


def test_sglang_leaves_a_group_that_failed_and_joins_a_new_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[str, str]] = []

    def answering(name: str, *reasons: str) -> Any:
        left = iter(reasons)

        async def answer(request: Any, _: None) -> tuple[bool, str]:
            calls.append((name, request.group_name))
            reason = next(left, "")
            return not reason, reason

        return answer

    manager = SimpleNamespace(
        server_args=SimpleNamespace(tp_size=1),
        init_weights_update_group=answering("join"),
        destroy_weights_update_group=answering("leave"),
        update_weights_from_distributed=answering("receive", "connection closed"),
    )
    groups = ("InitWeightsUpdateGroupReqInput", "DestroyWeightsUpdateGroupReqInput")
    requests = (*groups, "UpdateWeightsFromDistributedReqInput")
    io_struct = SimpleNamespace(**dict.fromkeys(requests, SimpleNamespace))
    monkeypatch.setattr(server, "_io_struct", lambda: io_struct)
    answers = iter([server.SENDING, None, server.SENDING])

    def answer_of(store: object, number: int) -> str:
        if (answer := next(answers)) is None:
            raise torch.distributed.DistStoreError("wait timeout")
        return answer

    monkeypatch.setattr(server, "connect", lambda port: None)
    monkeypatch.setattr(server, "request_version", lambda *question: 1)
    monkeypatch.setattr(server, "wait_for_answer", answer_of)
    loader = server.Loader(manager, "actor-0", 100, "float32", needs_update_messages=False)
    manifest = Manifest(1, 7, "gloo", ((("a", "float32", (2,)),),))

    async def load() -> str:
        return await (await loader._request_sending(manifest))()

    async def thrice() -> None:
        assert await load() == "connection closed"
        with pytest.raises(UnreadableWeights, match="weights of version 1: wait timeout"):
            await load()
        assert await load() == ""

    asyncio.run(thrice())
    expected = ["join", "receive", "leave", "join", "leave", "join", "receive"]
    assert [name for name, _ in calls] == expected
    first, second, third = (group for name, group in calls if name == "join")
    assert len({first, second, third}) == 3
    assert [group for name, group in calls if name == "leave"] == [first, second]
