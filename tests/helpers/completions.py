"""Prompts for a scheduler, and what its completions are held against."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mage_async.completion import Prompt, Sampling
from mage_async.inference.scheduler import Scheduler
from mage_async.inference.weights import read_weights
from mage_async.policy_version import VersionRun


def text(seed: int, num_tokens: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 96, num_tokens, np.int32)


def ask(scheduler, context, tokens, *, seed=0, refresh_kv=False, **sampling):
    prompt = Prompt(context, np.asarray(tokens, np.int32), Sampling(**sampling), seed, refresh_kv)
    scheduler.submit(prompt)


def serve(scheduler):
    """Everything that is asked, by context."""
    completions = {}
    while not scheduler.is_idle:
        completions |= dict(scheduler.advance())
    return completions


def answer(scheduler, context, tokens, **options):
    ask(scheduler, context, tokens, **options)
    return serve(scheduler)[context]


def assert_logprobs(reference, tokens, completion, **options) -> None:
    whole = np.concatenate([tokens, completion.tokens])
    rows = reference.logprobs(whole[:-1], **options)[len(tokens) - 1 :]
    theirs = rows[np.arange(len(rows)), completion.tokens]
    np.testing.assert_allclose(completion.logprobs, theirs, atol=1e-4, rtol=0)


def policy_per_token(runs: Sequence[VersionRun], num_tokens: int) -> np.ndarray:
    """The policy version that drew each token: int32 `[num_tokens]`; tokens before the first run
    get its version.
    """
    versions = np.zeros(num_tokens, np.int32)
    for run in runs:
        versions[run.start :] = run.policy
    if runs:
        versions[: runs[0].start] = runs[0].policy
    return versions


def load(scheduler: Scheduler, version: int, path: Path) -> None:
    """Load the weights of a safetensors file or model directory for all further tokens."""
    model = scheduler.model
    scheduler.swap(version, read_weights(path, model.architecture, model.arithmetic))
