"""Check what SGLang reports: log-probs, versions, reused prefixes, and stale KV caches.

    python -m bench.engine.sglang_truth        two to four minutes, most of them SGLang's start

It needs an environment with SGLang, and uses the small models of `tests/sglang`.
`bench.engine.publish` measures what a publication costs. The last line is the verdict; the exit
status is 1 if a figure misses its bound.

    logprob_gap    largest |engine - transformers| of a log-prob under the same weights, in nats
    stale_gap      the same after new weights, in turns that must not read keys and values of older
                   weights: all turns under `engine.cache_rule = "isolate"`, the first turn of an
                   episode under "refresh_at_episode"
    keep_gap       the same under "keep", which does read them: how large an error would be
    reused         share of prompt tokens found in the cache, after the first turn, in a trial of 3
                   episodes of 6 turns
    turns_lost, tokens_wrong
                   of turns sampled by 32 concurrent players during 200 publications. Each version
                   can sample one word only, so a token shows which version sampled it
"""

import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from bench.lib.baseline import write_baseline
from bench.lib.options import option_parser
from mage_async.completion import Completion, Prompt
from tests.helpers.completions import policy_per_token
from tests.sglang.served import Policies, Served, prompt, rules, word_of, words

PUBLICATIONS, PLAYERS = 200, 32
"""Number of publications, and of concurrent players, of the last figures above."""
MAX_GAP = 1e-4
"""Bound on gaps of log-probs, in nats."""


def next_turn(
    current: Prompt, completion: Completion, seed: int, *, refresh_kv: bool = False
) -> Prompt:
    """Return the next turn's prompt: the context so far, and eight random tokens by `seed`."""
    tokens = np.concatenate([current.tokens, completion.tokens, words(seed, 8)])
    return prompt(current.context, tokens, 8, refresh_kv=refresh_kv)


def logprob_gap(served: Served, policies: Policies) -> float:
    """Return the largest gap over 32 growing contexts of 4 turns."""
    version, worst = served.publish(policies.file), 0.0
    current = [prompt(f"parity {n}", words(n, 20 + 5 * n), 16) for n in range(32)]
    for turn in range(4):
        completions = served.complete(*current)
        pairs = list(zip(current, completions, strict=True))
        worst = max(worst, *(float(policies.gap(version, *pair).max()) for pair in pairs))
        current = [next_turn(one, completion, turn) for one, completion in pairs]
    return worst


def stale_gap(served: Served, policies: Policies, rule: str) -> float:
    """Return the largest gap of turns after new weights, which may read no older keys and values.

    Under "keep" they do read them.
    """
    worst = 0.0
    for trial in range(8):
        served.publish(policies.file)
        (completion,) = served.complete(current := prompt(f"{rule} {trial}", words(trial, 200), 8))
        version = served.publish(policies.file)
        if rule == "refresh_at_episode":  # a further turn of the episode may read older ones
            current = next_turn(current, completion, 0)
            (completion,) = served.complete(current)
        current = next_turn(current, completion, 1, refresh_kv=rule != "keep")
        (completion,) = served.complete(current)
        worst = max(worst, float(policies.gap(version, current, completion).max()))
    return worst


def reused(served: Served) -> float:
    """Return the share of reused prompt tokens in a trial of 3 episodes of 6 turns.

    The first prompt has 400 tokens; each turn appends 8 and samples 8.
    """
    (completion,) = served.complete(current := prompt("trial", words(5, 400), 8))
    num_prompt = num_reused = 0
    for turn in range(1, 3 * 6):
        current = next_turn(current, completion, turn)
        (completion,) = served.complete(current)
        num_prompt += len(current.tokens)
        num_reused += completion.num_reused
    return num_reused / num_prompt


def during_publications(served: Served, policies: Policies) -> dict[str, Any]:
    """Publish versions while players sample, and compare each token with its reported version."""
    served.publish(policies.speller)
    completions: list[Completion] = []
    num_asked = 0
    is_over = asyncio.Event()

    async def play(number: int) -> None:
        nonlocal num_asked
        while not is_over.is_set():
            num_asked += 1
            current = prompt(f"player {number}, {num_asked}", words(number, 40), 24 + number)
            completions.append(await served.engine.complete(current))

    async def publish() -> None:
        for _ in range(PUBLICATIONS):
            served.version += 1
            await served.engine.load(served.version, policies.speller(served.version))
            await served.engine.complete(prompt(f"after {served.version}", words(0, 5), 2))
        is_over.set()

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            for number in range(PLAYERS):
                tasks.create_task(play(number))
            tasks.create_task(publish())

    served.run(main())
    tokens_with_version = [
        (int(token), int(version))
        for completion in completions
        for token, version in zip(
            completion.tokens,
            policy_per_token(completion.versions, len(completion.tokens)),
            strict=True,
        )
    ]
    has_two_versions = [len(completion.versions) > 1 for completion in completions]
    return {
        "publications": PUBLICATIONS,
        "players": PLAYERS,
        "turns": len(completions),
        "turns_that_weights_came_into": sum(has_two_versions),
        "tokens": len(tokens_with_version),
        "turns_lost": num_asked - len(completions),
        "tokens_wrong": sum(token != word_of(version) for token, version in tokens_with_version),
    }


def main() -> None:
    """Measure, print and judge the figures, and write the baseline."""
    option_parser(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        policies = Policies(Path(folder))
        served = Served(policies.directory, rules(max_contexts=PLAYERS + 1))
        figures: dict[str, Any] = {"serves": served.facts}
        figures["logprob_gap"] = logprob_gap(served, policies)
        figures["stale_gap"] = {
            rule: stale_gap(served, policies, rule) for rule in ("isolate", "refresh_at_episode")
        }
        figures["keep_gap"] = stale_gap(served, policies, "keep")
        figures["reused"] = reused(served)
        figures |= during_publications(served, policies)
        served.close()
    for name, value in figures.items():
        print(f"{name:30} {value}")
    write_baseline("sglang_truth", figures)
    gaps = [figures["logprob_gap"], *figures["stale_gap"].values()]
    is_good = max(gaps) <= MAX_GAP and figures["reused"] >= 0.95
    is_good &= not figures["turns_lost"] and not figures["tokens_wrong"]
    print("SGLang says what is true" if is_good else "A FIGURE MISSES ITS BOUND")
    sys.exit(0 if is_good else 1)


if __name__ == "__main__":
    main()
