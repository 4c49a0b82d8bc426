"""Measure what restricted sampling costs, and how exact its log-probs are.

    python -m bench.engine.restricted [--engine sglang] [--policy DIR] [--tokens 10000]

Contexts grow turn by turn: the prompt of each turn appends 12 tokens, and three are sampled. A
restricted turn samples them from a trie of 8 x 8 x 8 tokens, a free one from the whole vocabulary,
so that both compute equally many tokens. The program prints, and writes to `bench/baselines/`:

    turns_ratio     restricted turns per second over free ones, in alternation on one engine. With
                    the embedded engine, seconds are CPU time, which other load disturbs less
    gap             largest |engine - learner| of a restricted log-prob, in nats, over `--tokens`
                    tokens; the learner computes with `mage_kernels.restricted_logprob` in float32
    legal_share     share of restricted completions that are one of the trie's sequences

Without `--policy` the model has random weights and a vocabulary of 512. The last line is the
verdict; the exit status is 1 if the ratio is below 0.97 (embedded engine only, because SGLang needs
a request for each restricted token), the gap is above 1e-4, or a completion is not legal. For
SGLang, run this in the environment that `tests/sglang/make_env.py` makes.
"""

import asyncio
import sys
import tempfile
import time
from itertools import product
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from bench.engine.serving import engine_of, random_model
from bench.lib.baseline import write_baseline
from bench.lib.options import option_parser
from mage_async.completion import Completion, Prompt, Sampling
from mage_async.restriction import AllowedSets, TokenTrie
from mage_kernels import restricted_logprob
from mage_services.engines.embedded import EmbeddedEngine
from mage_services.engines.engine import Engine

FIRST, APPENDED, SAMPLED, TURNS, WIDTH = 100, 12, 3, 12, 8
"""Numbers of tokens: in the first prompt, appended in each turn, sampled in each turn. Number of
turns in a context. Number of allowed tokens for each sampled one."""
Turn = tuple[Prompt, Completion]


def contexts(engine: Engine, vocabulary: int, count: int, round_: str, *, is_restricted: bool):
    """Return a coroutine that plays `count` contexts concurrently.

    It returns the seconds that took, and all turns.
    """
    # The embedded engine computes in this process, in one thread.
    clock = time.process_time if isinstance(engine, EmbeddedEngine) else time.perf_counter
    random = np.random.default_rng(count)
    first = random.integers(3, vocabulary, FIRST, np.int32)
    tokens = random.choice(np.arange(3, vocabulary), (SAMPLED, WIDTH), replace=False)
    trie = TokenTrie(product(*tokens.tolist())) if is_restricted else None

    async def play_context(number: int) -> list[Turn]:
        appended, seen, turns = np.random.default_rng(number), first, []
        name = f"{round_}.{is_restricted}.{number}"
        for turn in range(TURNS):
            seen = np.concatenate([seen, appended.integers(3, vocabulary, APPENDED, np.int32)])
            seed = number * TURNS + turn
            prompt = Prompt(name, seen, Sampling(max_tokens=SAMPLED), seed, restriction=trie)
            completion = await engine.complete(prompt)
            turns.append((prompt, completion))
            seen = np.concatenate([seen, completion.tokens])
        engine.release(name)
        return turns

    async def play_all() -> tuple[float, list[Turn]]:
        began = clock()
        played = await asyncio.gather(*(play_context(number) for number in range(count)))
        return clock() - began, [turn for turns in played for turn in turns]

    return play_all()


async def measure(engine: Engine, vocabulary: int, count: int, repeats: int, tokens: int):
    """Return the ratio of each round after the first, which warms up, and all restricted turns."""
    ratios, turns, round_ = [], list[Turn](), 0
    async with engine:
        print(await engine.describe(), flush=True)
        while round_ <= repeats or len(turns) * SAMPLED < tokens:
            seconds = {}
            # The order alternates, so that a drift of the machine meets both alike.
            for is_restricted in (True, False) if round_ % 2 else (False, True):
                playing = contexts(
                    engine, vocabulary, count, str(round_), is_restricted=is_restricted
                )
                seconds[is_restricted], played = await playing
                if is_restricted:
                    turns += played
            if round_:
                ratios.append(seconds[False] / seconds[True])
                print(f"round {round_}: {ratios[-1]:.3f}", flush=True)
            round_ += 1
    return ratios, turns


def gap(model: torch.nn.Module, prompt: Prompt, completion: Completion) -> float:
    """Return the largest |engine - learner| of a completion's log-probs, in nats."""
    ids = torch.from_numpy(np.concatenate([prompt.tokens, completion.tokens]).astype(np.int64))
    sampled = np.flatnonzero(completion.is_sampled())
    positions = torch.from_numpy(len(prompt.tokens) - 1 + sampled)
    sets = AllowedSets.of([each for each in completion.drawn_from or () if each is not None])
    assert sets is not None
    columns = np.unique(sets.tokens).astype(np.int64)
    mask = torch.from_numpy(np.stack([np.isin(columns, each) for each in sets]))
    targets = torch.from_numpy(np.searchsorted(columns, completion.tokens[sampled]))
    with torch.no_grad():
        hidden = model.model(ids[None]).last_hidden_state[0].index_select(0, positions)
        head = model.lm_head.weight
        own, _ = restricted_logprob(hidden, head, torch.from_numpy(columns), mask, targets)
    return float((own - torch.from_numpy(completion.logprobs[sampled])).abs().max())


def main() -> int:
    """Measure, print and write the figures; return 1 if one misses its bound."""
    parser = option_parser(__doc__)
    parser.add_argument("--engine", choices=("embedded", "sglang"), default="embedded")
    parser.add_argument("--policy", type=Path, metavar="DIR", help="a model directory")
    parser.add_argument("--tokens", type=int, default=10_000, metavar="N")
    parser.add_argument("--contexts", type=int, default=32, metavar="N")
    parser.add_argument("--repeats", type=int, default=5, metavar="N")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        directory = given.policy
        if directory is None:
            directory = Path(folder) / "random"
            random_model("tiny", is_tied=False).save_pretrained(directory)
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        vocabulary = model.config.vocab_size
        longest = FIRST + TURNS * (APPENDED + SAMPLED) + 16
        settings = {"max_contexts": given.contexts, "max_tokens": longest}
        engine = engine_of(given.engine, directory, settings)
        measuring = measure(engine, vocabulary, given.contexts, given.repeats, given.tokens)
        ratios, turns = asyncio.run(measuring)
        turns = turns[: -(-given.tokens // SAMPLED)]  # rounded up
        legal = [_is_legal(prompt, completion) for prompt, completion in turns]
        figures = {
            "engine": given.engine,
            "policy": directory.name,
            "vocabulary": vocabulary,
            "contexts": given.contexts,
            "turns_ratio": float(np.median(ratios)),
            "turns_ratios": [round(each, 4) for each in ratios],
            "tokens": sum(int(completion.is_sampled().sum()) for _, completion in turns),
            "gap": max(gap(model, *turn) for turn in turns),
            "legal_share": sum(legal) / len(legal),
        }
    for name, value in figures.items():
        print(f"{name:14} {value}")
    write_baseline(f"restricted_{given.engine}_{directory.name}", figures)
    is_good = figures["gap"] <= 1e-4 and figures["legal_share"] == 1.0
    is_good &= given.engine == "sglang" or figures["turns_ratio"] >= 0.97
    print("every bound is kept" if is_good else "A FIGURE MISSES ITS BOUND")
    return 0 if is_good else 1


def _is_legal(prompt: Prompt, completion: Completion) -> bool:
    """Return whether a completion is one of the sequences of its prompt's trie."""
    trie, node = prompt.restriction, 0
    assert trie is not None
    for token in completion.tokens.tolist():
        if trie.is_end(node) or token not in trie.allowed(node):
            return False
        node = trie.after(node, token)
    return trie.is_end(node)


if __name__ == "__main__":
    sys.exit(main())
