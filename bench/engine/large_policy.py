"""Count the heartbeats that an actor misses while it loads a policy of 2 GB, twice.

    python -m bench.engine.large_policy         2 minutes, 6 GB

A Qwen3 with half a billion float32 weights, all zero, is written to disk. An actor with the
embedded engine loads it, and loads it once more as the next version, as after a training step. The
benchmark takes the learner's place and receives the heartbeats: one is due every second, and one
is missed for each full second beyond the first between two of them. The exit status is 1 if any is
missed.
"""

import asyncio
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from bench.lib.baseline import write_baseline
from bench.lib.options import option_parser
from mage_async.config import config_file
from mage_async.environments.catalogue import load
from mage_async.policy.tiny_tokenizer import build_tokenizer, save_tokenizer
from mage_async.protocol.messages import Goodbye, Heartbeat, Hello, Loaded, Publication, Welcome
from mage_services.actor.actor import HEARTBEAT_S, play
from mage_services.processes.process import Status
from mage_services.transport.access_control import Peer
from tests.helpers.memory_channels import MemoryLearnerChannel

LAYERS = 36
"""As many as make about 2 GB."""
NUM_LOADS = 2
"""How often the actor loads the policy: as it begins, and as the next version."""
HELLO = Hello(role="actor", name="a", build="test", config_digest="test", group_quota=3)


def write_policy(directory: Path) -> int:
    """Write a model directory of about 2 GB; return the size of its weights in bytes."""
    tokenizer = build_tokenizer(load("rps").facts.words)
    save_tokenizer(tokenizer, directory)
    shape = Qwen3Config(
        vocab_size=-(-tokenizer.get_vocab_size() // 32) * 32,  # rounded up to a multiple of 32
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=LAYERS,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=64,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = Qwen3ForCausalLM(shape)
    tensors = {
        name: torch.zeros(weight.shape)
        for name, weight in model.state_dict().items()
        if name != "lm_head.weight"  # the same tensor as the embedding
    }
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    shape.save_pretrained(directory)
    return sum(tensor.nbytes for tensor in tensors.values())


async def _heartbeats(channel: MemoryLearnerChannel, peer_id: Peer, file: str) -> list[float]:
    """Return the time of this call, of each heartbeat, and of the end of the last load, in seconds.

    After each load but the last, the next version is published.
    """
    came, num_loaded = [time.monotonic()], 0
    while num_loaded < NUM_LOADS:
        _, message = await channel.receive()
        if isinstance(message, Heartbeat):
            came.append(time.monotonic())
        elif isinstance(message, Loaded):
            num_loaded += 1
            if num_loaded < NUM_LOADS:
                channel.send(peer_id, Publication(version=num_loaded, path=file, digest="0" * 16))
    return [*came, time.monotonic()]


async def missed(directory: Path) -> tuple[int, int, float]:
    """Return the numbers of heartbeats that came and that were missed, and the longest gap in s."""
    channel = MemoryLearnerChannel()
    peer = channel.connect(HELLO)
    peer_id, _ = await channel.receive()
    file = str(directory / "model.safetensors")
    channel.send(peer_id, Welcome(version=0, weights_path=file))
    config = config_file.load(config_file.find(None), [])
    async with asyncio.TaskGroup() as tasks:  # an actor that fails ends the benchmark
        tasks.create_task(play(peer, config, directory, "a", Status()), name="actor")
        came = await _heartbeats(channel, peer_id, file)
        channel.send(peer_id, Goodbye(reason="measured"))
    gaps = [later - earlier for earlier, later in pairwise(came)]
    num_missed = sum(max(0, int(gap / HEARTBEAT_S) - 1) for gap in gaps)
    return len(came) - 2, num_missed, max(gaps)  # the first and last times are no heartbeats


def main() -> None:
    """Write the policy, count missed heartbeats, and write the baseline."""
    option_parser(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        size = write_policy(Path(folder))
        began = time.monotonic()
        num_came, num_missed, longest_s = asyncio.run(missed(Path(folder)))
        took_s = time.monotonic() - began
    print(
        f"policy of {size / 1e9:.2f} GB, loaded {NUM_LOADS} times in {took_s:.0f} s: {num_came} "
        f"heartbeats, {num_missed} missed, {longest_s:.2f} s between two at most"
    )
    figures = {"bytes": size, "heartbeats": num_came, "missed": num_missed}
    write_baseline("large_policy", figures | {"took_s": took_s, "longest_s": longest_s})
    sys.exit(bool(num_missed))


if __name__ == "__main__":
    main()
