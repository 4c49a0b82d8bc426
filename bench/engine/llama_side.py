"""Play growing contexts on llama.cpp, for `bench.engine.other_engines`.

It needs llama-cpp-python, gguf, safetensors and numpy only, and runs in an environment of its own.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import gguf
import llama_cpp as llama
import numpy as np
from safetensors.numpy import load_file

# Names of a layer's matrices in a HuggingFace model, and in a GGUF file.
MATRICES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}


def write_gguf(model: Path, file: Path) -> None:
    """Write the float32 weights of a Llama model as a GGUF file in bfloat16, without a tokenizer.

    Args:
        model: HuggingFace directory, whose embeddings are tied.
    """
    config = json.loads((model / "config.json").read_text())
    weights = load_file(model / "model.safetensors")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    writer.add_rope_freq_base(theta)
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")

    def add(name: str, weight: np.ndarray, kind: gguf.GGMLQuantizationType) -> None:
        data = gguf.quants.quantize(weight.astype(np.float32), kind)
        writer.add_tensor(name, data, raw_dtype=kind)

    add("token_embd.weight", weights["model.embed_tokens.weight"], gguf.GGMLQuantizationType.BF16)
    add("output_norm.weight", weights["model.norm.weight"], gguf.GGMLQuantizationType.F32)
    for layer in range(config["num_hidden_layers"]):
        for theirs, ours in MATRICES.items():
            weight = weights[f"model.layers.{layer}.{theirs}.weight"]
            # GGUF rotates neighbouring components of a head, HuggingFace the two halves.
            if ours in ("attn_q", "attn_k"):
                num = heads if ours == "attn_q" else kv_heads
                halves = weight.reshape(num, 2, weight.shape[0] // num // 2, weight.shape[1])
                weight = halves.swapaxes(1, 2).reshape(weight.shape)
            add(f"blk.{layer}.{ours}.weight", weight, gguf.GGMLQuantizationType.BF16)
        for theirs, ours in NORMS.items():
            weight = weights[f"model.layers.{layer}.{theirs}.weight"]
            add(f"blk.{layer}.{ours}.weight", weight, gguf.GGMLQuantizationType.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@llama.llama_log_callback
def _no_log(level: int, text: bytes, data: object) -> None:
    """Drop a line of llama.cpp's log."""


class Contexts:
    """Growing contexts, each a sequence of one llama.cpp context; all are decoded in one batch."""

    def __init__(self, file: Path, contexts: int, longest: int, threads: int) -> None:
        llama.llama_log_set(_no_log, None)
        llama.llama_backend_init()
        model = llama.llama_model_load_from_file(
            str(file).encode(), llama.llama_model_default_params()
        )
        given = llama.llama_context_default_params()
        given.n_ctx = contexts * longest
        given.n_batch = given.n_ubatch = 2048
        given.n_seq_max = contexts
        given.n_threads = given.n_threads_batch = threads
        # With a cache each, sequences attend to nothing but their own tokens. In a unified cache a
        # turn takes longer and longer as the contexts grow.
        given.kv_unified = False
        self._context = llama.llama_init_from_model(model, given)
        if not self._context:
            raise RuntimeError("llama.cpp made no context")
        self._memory = llama.llama_get_memory(self._context)
        self._batch = llama.llama_batch_init(given.n_batch, 0, 1)
        self._sampler = llama.llama_sampler_init_dist(0)
        self._greedy = llama.llama_sampler_init_greedy()
        self._lengths = [0] * contexts

    def begin(self, rules: np.ndarray) -> None:
        """Forget everything, compute the rules once, and let all contexts begin with them."""
        llama.llama_memory_clear(self._memory, True)
        self._lengths = [0] * len(self._lengths)
        self._decode({0: rules})
        for number in range(1, len(self._lengths)):
            llama.llama_memory_seq_cp(self._memory, 0, number, -1, -1)
            self._lengths[number] = len(rules)

    def complete(
        self, appended: dict[int, np.ndarray], num: int, *, is_greedy: bool = False
    ) -> dict[int, list[int]]:
        """Append tokens to contexts, and sample `num` tokens of each; return the sampled ones."""
        drawn: dict[int, list[int]] = {number: [] for number in appended}
        sampler = self._greedy if is_greedy else self._sampler
        for _ in range(num):
            rows = self._decode(appended)
            for number, row in rows.items():
                token = llama.llama_sampler_sample(sampler, self._context, row)
                drawn[number].append(token)
                appended = appended | {number: np.array([token])}
        return drawn

    def _decode(self, appended: dict[int, np.ndarray]) -> dict[int, int]:
        """Decode tokens in one batch; return each context's row of logits, that of its last
        token.
        """
        batch, at, rows = self._batch, 0, {}
        for number, tokens in appended.items():
            for token in tokens:
                batch.token[at] = int(token)
                batch.pos[at] = self._lengths[number]
                batch.n_seq_id[at] = 1
                batch.seq_id[at][0] = number
                batch.logits[at] = 0
                self._lengths[number] += 1
                at += 1
            batch.logits[at - 1] = 1
            rows[number] = at - 1
        batch.n_tokens = at
        if code := llama.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode returned {code}")
        return rows


def play(contexts: Contexts, work: dict[str, Any]) -> dict[str, Any]:
    """Play all contexts turn by turn, and return the figures of `play` in
    `bench.engine.other_engines`.
    """
    source = np.random.default_rng(1)
    rules = np.random.default_rng(0).integers(3, work["vocabulary"], work["rules"])
    turn_s, pending = [], {number: np.array([], int) for number in range(work["contexts"])}
    began = time.perf_counter()
    contexts.begin(rules)
    for _ in range(work["turns"]):
        turn_began = time.perf_counter()
        # The last sampled token of a turn is computed with the next turn's tokens.
        appended = {
            number: np.concatenate([last, source.integers(3, work["vocabulary"], work["appended"])])
            for number, last in pending.items()
        }
        drawn = contexts.complete(appended, work["sampled"])
        pending = {number: np.array(tokens[-1:]) for number, tokens in drawn.items()}
        turn_s.append(time.perf_counter() - turn_began)
    seconds = time.perf_counter() - began
    num_turns = work["contexts"] * work["turns"]
    prompts = sum(
        work["rules"] + turn * (work["appended"] + work["sampled"]) + work["appended"]
        for turn in range(work["turns"])
    )
    computed = work["rules"] + num_turns * work["appended"]
    return {
        "seconds": seconds,
        "sampled": num_turns * work["sampled"],
        "prompt": work["contexts"] * prompts,
        "computed": computed,
        "turn_s": turn_s,
    }


def main() -> None:
    """Read the work as JSON from the command line, play it, and print the figures as JSON."""
    work = json.loads(sys.argv[1])
    file = Path(work["gguf"])
    if not file.exists():
        write_gguf(Path(work["model"]), file)
    contexts = Contexts(file, work["contexts"], work["longest"], work["threads"])
    play(contexts, work | {"turns": 2})  # warms up
    figures = play(contexts, work)
    contexts.begin(np.array(work["greedy_prompt"][:-1]))
    last = np.array(work["greedy_prompt"][-1:])
    figures["greedy"] = contexts.complete({0: last}, 16, is_greedy=True)[0]
    figures["engine"] = f"llama.cpp of llama-cpp-python {llama.__version__}"
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
