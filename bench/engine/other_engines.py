"""Compare the embedded engine with llama.cpp and SGLang in growing contexts on CPU cores.

    python -m venv DIR && DIR/bin/pip install llama-cpp-python gguf safetensors
    python tests/sglang/make_env.py
    python -m bench.engine.other_engines MODEL [--llama DIR/bin/python]
        [--sglang .sglang_env/bin/python]

`MODEL` is a HuggingFace directory of a Llama model with tied embeddings and float32 weights; for
the baseline SmolLM2-135M-Instruct. All engines compute in bfloat16 with the same number of threads.
32 contexts begin with the same rules; each has as many turns as three episodes of six. A turn
appends 16 tokens and samples 8 at temperature 1.

    embedded    the contexts do not wait for each other
    sglang      the same, by HTTP requests to a server on this machine; its prefix cache is on
    llama.cpp   in process, without a server: all contexts are decoded in one batch, turn by turn.
                Each is a sequence that keeps its keys and values; those of the rules are computed
                once and copied

Engines play in alternation, each time in a process of its own that first plays two turns to warm
up. The program prints sampled tokens per second, prompt tokens per second (reused ones included),
the share of prompt tokens that were computed, and the median and the 90th percentile of the seconds
of a turn. Greedy completions of one prompt show whether the engines compute the same model: the
number of leading tokens in which they agree with the embedded engine's. The exit status is 1 if
the embedded engine samples fewer tokens per second than another one.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import uvloop

from bench.engine.serving import engine_of
from bench.lib.baseline import ROOT, write_baseline
from bench.lib.options import option_parser
from mage_async.completion import Prompt, Sampling
from mage_services.engines.engine import Engine

CONTEXTS, RULES, TURNS, APPENDED, SAMPLED = 32, 200, 18, 16, 8
"""Contexts; tokens of the rules; turns of a context; tokens that a turn appends, and samples."""
GREEDY = 16
"""Number of tokens of the greedy completion."""


async def play(engine: Engine, work: dict[str, Any], seed: int) -> dict[str, Any]:
    """Play all contexts, and return the figures. Another seed has other tokens, so that nothing is
    reused from one play to the next.

    Returns:
        `seconds`; `sampled`, `prompt` and `computed`, numbers of tokens: sampled ones, those of
        all prompts, and those of prompts that were not reused; `turn_s`, the seconds of each turn.
    """
    figures: dict[str, Any] = {"sampled": 0, "prompt": 0, "computed": 0, "turn_s": []}
    rules = np.random.default_rng(seed).integers(3, work["vocabulary"], work["rules"], np.int32)

    async def context(number: int) -> None:
        source, tokens = np.random.default_rng([seed, number]), rules
        for turn in range(work["turns"]):
            appended = source.integers(3, work["vocabulary"], work["appended"], np.int32)
            tokens = np.concatenate([tokens, appended])
            sampling = Sampling(max_tokens=work["sampled"])
            began = time.perf_counter()
            drawn = await engine.complete(Prompt(f"{seed}.{number}", tokens, sampling, turn))
            figures["turn_s"].append(time.perf_counter() - began)
            figures["sampled"] += len(drawn.tokens)
            figures["prompt"] += len(tokens)
            figures["computed"] += len(tokens) - drawn.num_reused
            tokens = np.concatenate([tokens, drawn.tokens])
        engine.release(f"{seed}.{number}")

    began = time.perf_counter()
    await asyncio.gather(*map(context, range(work["contexts"])))
    return figures | {"seconds": time.perf_counter() - began}


async def play_here(kind: str, work: dict[str, Any]) -> dict[str, Any]:
    """Play on an engine of this environment, and return the figures and a greedy completion."""
    settings = {
        "max_contexts": work["contexts"],
        "max_tokens": work["longest"],
        "threads": work["threads"],
        "arithmetic": "bfloat16",
    }
    async with engine_of(kind, Path(work["model"]), settings) as engine:
        await play(engine, work | {"turns": 2}, 0)
        figures = await play(engine, work, 1)
        sampling = Sampling(temperature=0.0, max_tokens=GREEDY)
        tokens = np.array(work["greedy_prompt"], np.int32)
        greedy = await engine.complete(Prompt("greedy", tokens, sampling, 0))
        described = await engine.describe()
    return figures | {"greedy": greedy.tokens.tolist(), "engine": described}


def measured(kind: str, python: str, work: dict[str, Any]) -> dict[str, Any]:
    """Play in a process with another Python, and return its figures."""
    own = ["bench.engine.other_engines", "--play", kind]
    side = ["bench.engine.llama_side"] if kind == "llama.cpp" else own
    command = [python, "-m", *side, json.dumps(work)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT)
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def summary(runs: list[dict[str, Any]]) -> dict[str, float]:
    """Return the medians over the runs of one engine."""

    def median(values: list[float]) -> float:
        return float(np.median(values))

    return {
        "sampled_tokens_s": median([run["sampled"] / run["seconds"] for run in runs]),
        "prompt_tokens_s": median([run["prompt"] / run["seconds"] for run in runs]),
        "computed_share": median([run["computed"] / run["prompt"] for run in runs]),
        "computed_tokens": median([run["computed"] for run in runs]),
        "turn_s": median([median(run["turn_s"]) for run in runs]),
        "turn_p90_s": median([float(np.percentile(run["turn_s"], 90)) for run in runs]),
    }


def agreement(first: list[int], second: list[int]) -> int:
    """Return the number of leading tokens in which two completions agree."""
    pairs = enumerate(zip(first, second, strict=True))
    return next((index for index, (one, two) in pairs if one != two), len(first))


def main() -> int:
    """Measure, print and write the figures; return 1 if another engine is faster."""
    if sys.argv[1:2] == ["--play"]:
        kind, work = sys.argv[2], json.loads(sys.argv[3])
        print(json.dumps(uvloop.run(play_here(kind, work))))
        return 0
    given = _arguments()
    config = json.loads((given.model / "config.json").read_text())
    with TemporaryDirectory() as folder:
        work: dict[str, Any] = {
            "model": str(given.model.resolve()),
            "gguf": f"{folder}/model.gguf",
            "vocabulary": config["vocab_size"],
            "contexts": CONTEXTS,
            "rules": RULES,
            "turns": TURNS,
            "appended": APPENDED,
            "sampled": SAMPLED,
            "longest": RULES + TURNS * (APPENDED + SAMPLED) + GREEDY,
            "threads": given.threads,
            "greedy_prompt": list(range(100, 150)),
        }
        pythons = {"embedded": sys.executable, "llama.cpp": given.llama, "sglang": given.sglang}
        runs: dict[str, list[dict[str, Any]]] = {kind: [] for kind in pythons if pythons[kind]}
        for number in range(given.rounds):
            for kind, found in runs.items():
                found.append(measured(kind, pythons[kind], work))
                rate = found[-1]["sampled"] / found[-1]["seconds"]
                print(f"{number} {kind}: {rate:.4g} sampled tokens/s", flush=True)
    return report(runs, work, given.name)


def report(runs: dict[str, list[dict[str, Any]]], work: dict[str, Any], name: str) -> int:
    """Print the table, write the baseline of a name, and return the exit status."""
    print(f"{'':12}{'sampled/s':>10}{'prompt/s':>10}{'computed':>10}{'turn':>9}{'p90':>9}  agree")
    rows: dict[str, dict[str, float]] = {}
    for kind, found in runs.items():
        one = rows[kind] = summary(found)
        one["agreeing"] = agreement(runs["embedded"][0]["greedy"], found[0]["greedy"])
        print(
            f"{kind:12}{one['sampled_tokens_s']:10.4g}{one['prompt_tokens_s']:10.4g}"
            f"{one['computed_share']:10.3f}{one['turn_s']:7.2f} s{one['turn_p90_s']:7.2f} s"
            f"  {one['agreeing']:.0f} of {GREEDY}"
        )
    own = [run["sampled"] / run["seconds"] for run in runs["embedded"]]
    ratios = {
        kind: [one / (run["sampled"] / run["seconds"]) for one, run in zip(own, found, strict=True)]
        for kind, found in runs.items()
        if kind != "embedded"
    }
    for kind, found in ratios.items():
        spread = f"{min(found):.2f} to {max(found):.2f}"
        print(f"sampled tokens/s, embedded over {kind}: {np.median(found):.2f} ({spread})")
    engines = {kind: found[0]["engine"] for kind, found in runs.items()}
    shape = {key: work[key] for key in work if key not in ("model", "gguf", "greedy_prompt")}
    figures = {"work": shape, "engines": engines, "rows": rows, "ratios": ratios, "runs": runs}
    write_baseline(name, figures)
    return int(any(np.median(found) < 1 for found in ratios.values()))


def _arguments() -> argparse.Namespace:
    parser = option_parser(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--llama", default="", metavar="PYTHON", help="with llama-cpp-python")
    parser.add_argument("--sglang", default="", metavar="PYTHON", help="with SGLang")
    parser.add_argument("--threads", type=int, default=1, help="threads of each engine (1)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--name", default="rivals", help="of the baseline (rivals)")
    return parser.parse_args()


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
