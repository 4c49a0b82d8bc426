"""What SGLang says beside what is true: log-probs, keys of older weights, versions, reuse.

    python -m bench.engine.sglang_truth        two to four minutes, most of them SGLang's start

Needs the python of an environment that has SGLang; the small models are those of `tests/sglang`.
`bench.engine.publish` measures what a publication costs. The last line is the verdict; exit status
1 where a figure misses its bound.

    logprob_gap        largest |engine - transformers| at equal version, nats
    stale_gap          the same after new weights, where the rule of the cache forbids old keys:
                       under `isolate`, and behind the boundary of `refresh_at_episode`
    keep_gap           the same under `keep`, which reads them: what the two above would be if wrong
    reused             share of prompt tokens after the first turn of 3 episodes of 6 turns
    turns_lost, tokens_wrong   under 200 publications, in place, while 32 players draw; every
                       version draws a word of its own
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
CLOSE = 1e-4


def next_turn(asked: Prompt, done: Completion, told: int, *, refresh_kv: bool = False) -> Prompt:
    """The next turn of a context, behind eight tokens that say something."""
    tokens = np.concatenate([asked.tokens, done.tokens, words(told, 8)])
    return prompt(asked.context, tokens, 8, refresh_kv=refresh_kv)


def logprob_gap(served: Served, policies: Policies) -> float:
    """Over 32 growing contexts of 4 turns."""
    version, worst = served.publish(policies.file), 0.0
    asked = [prompt(f"parity {n}", words(n, 20 + 5 * n), 16) for n in range(32)]
    for turn in range(4):
        completions = served.complete(*asked)
        pairs = list(zip(asked, completions, strict=True))
        worst = max(worst, *(float(policies.gap(version, *pair).max()) for pair in pairs))
        asked = [next_turn(one, done, turn) for one, done in pairs]
    return worst


def stale_gap(served: Served, policies: Policies, rule: str) -> float:
    """The gap of the first turn that may read no older keys; under `keep`, of one that does."""
    worst = 0.0
    for trial in range(8):
        served.publish(policies.file)
        (done,) = served.complete(asked := prompt(f"{rule} {trial}", words(trial, 200), 8))
        version = served.publish(policies.file)
        if rule == "refresh_at_episode":  # the rest of the episode reads old keys
            asked = next_turn(asked, done, 0)
            (done,) = served.complete(asked)
        asked = next_turn(asked, done, 1, refresh_kv=rule != "keep")
        (done,) = served.complete(asked)
        worst = max(worst, float(policies.gap(version, asked, done).max()))
    return worst


def reused(served: Served) -> float:
    """3 episodes of 6 turns behind 400 tokens of rules, 8 told and 8 drawn a turn."""
    (done,) = served.complete(asked := prompt("trial", words(5, 400), 8))
    num_prompt = num_reused = 0
    for turn in range(1, 18):
        asked = next_turn(asked, done, turn)
        (done,) = served.complete(asked)
        num_prompt += len(asked.tokens)
        num_reused += done.num_reused
    return num_reused / num_prompt


def under_fire(served: Served, policies: Policies) -> dict[str, Any]:
    """Publications while players draw."""
    served.publish(policies.speller)
    completions: list[Completion] = []
    num_asked = 0
    is_over = asyncio.Event()

    async def play(number: int) -> None:
        nonlocal num_asked
        while not is_over.is_set():
            num_asked += 1
            asked = prompt(f"player {number}, {num_asked}", words(number, 40), 24 + number)
            completions.append(await served.engine.complete(asked))

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
    tagged = [
        (int(token), int(version))
        for done in completions
        for token, version in zip(
            done.tokens, policy_per_token(done.versions, len(done.tokens)), strict=True
        )
    ]
    crossed = [len(done.versions) > 1 for done in completions]
    return {
        "publications": PUBLICATIONS,
        "players": PLAYERS,
        "turns": len(completions),
        "turns_that_weights_came_into": sum(crossed),
        "tokens": len(tagged),
        "turns_lost": num_asked - len(completions),
        "tokens_wrong": sum(token != word_of(version) for token, version in tagged),
    }


def main() -> None:
    """Measure, and write the figures."""
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
        figures |= under_fire(served, policies)
        served.close()
    for name, value in figures.items():
        print(f"{name:30} {value}")
    write_baseline("sglang_truth", figures)
    gaps = [figures["logprob_gap"], *figures["stale_gap"].values()]
    is_true = max(gaps) <= CLOSE and figures["reused"] >= 0.95
    is_true &= not figures["turns_lost"] and not figures["tokens_wrong"]
    print("SGLang says what is true" if is_true else "A FIGURE MISSES ITS BOUND")
    sys.exit(0 if is_true else 1)


if __name__ == "__main__":
    main()
