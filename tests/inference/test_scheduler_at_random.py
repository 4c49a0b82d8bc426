"""Whatever is asked in whatever order, completions are those of recomputing everything."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mage_async.completion import Completion, Prompt, Sampling
from mage_async.inference.sampling import uniforms
from mage_async.inference.scheduler import Scheduler
from tests.helpers.completions import load, policy_per_token

NAMES = st.sampled_from("abcde")
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(
            st.just("ask"),
            NAMES,
            st.integers(1, 12),  # tokens told
            st.integers(1, 4),  # tokens to draw
            st.sampled_from([1.0, 1.0, 0.5]),
            st.booleans(),  # fresh keys
        ),
        st.tuples(st.just("ask_all"), st.integers(1, 12), st.integers(1, 2)),
        st.tuples(st.just("change"), NAMES, st.integers(0, 20)),
        st.tuples(st.sampled_from(["release", "abort"]), NAMES),
        st.tuples(st.just("load"), st.integers(0, 1)),
        st.tuples(st.just("advance"), st.integers(1, 4)),
    ),
    min_size=5,
    max_size=50,
)


@dataclass
class Client:
    """Plays against a scheduler, remembers what it was told, and checks every completion."""

    scheduler: Scheduler
    policies: list
    version: int = 0
    """Even versions are the first policy, odd ones the second."""
    contexts: dict[str, np.ndarray] = field(default_factory=dict)
    asked: dict[str, Prompt] = field(default_factory=dict)
    extends: dict[str, bool] = field(default_factory=dict)
    num_asked: int = 0

    def ask(self, name, num_told, num_drawn, temperature, refresh_kv) -> None:
        """The next turn of a context; all contexts begin alike, so that they share prefixes."""
        if name in self.asked:
            return
        self.num_asked += 1
        told = np.random.default_rng(len(self.contexts.get(name, ())) // 24).integers(0, 96, 12)
        tokens = np.append(self.contexts.get(name, np.zeros(0)), told[:num_told]).astype(np.int32)
        if len(tokens) >= 64:
            return
        sampling = Sampling(temperature=temperature, max_tokens=num_drawn)
        prompt = Prompt(name, tokens, sampling, self.num_asked, refresh_kv)
        self.scheduler.submit(prompt)
        self.asked[name], self.contexts[name] = prompt, tokens

    def ask_all(self, num_told, num_drawn) -> None:
        """A turn of everyone, as of the trials of a group; later names are told a little more."""
        for more, name in enumerate("abcde"):
            self.ask(name, min(12, num_told + more), num_drawn, 1.0, False)

    def change(self, name, length) -> None:
        """What was said is changed from `length` on."""
        context = self.contexts.get(name)
        if name not in self.asked and context is not None and length < len(context):
            self.contexts[name] = np.append(context[:length], 95 - context[length])
            self.extends[name] = False

    def release(self, name) -> None:
        for known in (self.contexts, self.asked, self.extends):
            known.pop(name, None)
        self.scheduler.release(name)

    def abort(self, name) -> None:
        self.asked.pop(name, None)
        self.scheduler.abort(name)

    def load(self, which) -> None:
        self.version += 1 + (self.version + 1 + which) % 2
        load(self.scheduler, self.version, self.policies[self.version % 2].directory)

    def advance(self, times) -> None:
        for _ in range(times):
            for name, completion in self.scheduler.advance():
                self.take(self.asked.pop(name), completion)

    def take(self, prompt: Prompt, completion: Completion) -> None:
        """Check a completion, and go on from it."""
        assert completion.is_extension == self.extends.pop(prompt.context, True)
        assert 0 <= completion.num_reused <= len(prompt.tokens) - 1
        assert completion.num_reused + completion.num_repeated < len(prompt.tokens)
        is_short = len(completion.tokens) < prompt.sampling.max_tokens
        assert not is_short or len(prompt.tokens) + len(completion.tokens) == 64
        whole = np.append(prompt.tokens, completion.tokens)
        self.contexts[prompt.context] = whole
        kv = _kv_per_token(completion)
        for number, policy in enumerate(policy_per_token(completion.versions, len(kv))):
            if kv[number] == policy:  # nothing stale in it: one policy's own forward must agree
                seen = whole[: len(prompt.tokens) + number]
                logprobs = self.policies[policy % 2].logprobs(seen, prompt.sampling.temperature)[-1]
                _assert_drawn(logprobs, prompt, completion, number)


def _assert_drawn(logprobs, prompt, completion, number) -> None:
    """Token `number` of a completion is the one its seed draws, at its log-prob."""
    token = completion.tokens[number]
    assert completion.logprobs[number] == pytest.approx(logprobs[token], abs=1e-4)
    chance = uniforms(np.array([prompt.seed], np.uint64), np.array([number]))[0]
    cumulated = np.cumsum(np.exp(logprobs, dtype=np.float64))
    below = cumulated[token - 1] if token else 0.0
    assert below - 1e-4 <= chance * cumulated[-1] <= cumulated[token] + 1e-4


def _kv_per_token(completion: Completion) -> np.ndarray:
    kv = np.zeros(len(completion.tokens), np.int64)
    for run in completion.versions:
        kv[run.start :] = run.kv
    return kv


@pytest.fixture(scope="module")
def policies(reference, tmp_path_factory):
    return [reference, reference.reseeded(1, tmp_path_factory.mktemp("second"))]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(operations=OPERATIONS, slots=st.integers(1, 4), forward_tokens=st.sampled_from([4, 16, 99]))
def test_completions_are_those_of_recomputing_everything(
    policies, operations, slots, forward_tokens
) -> None:
    model = policies[0].engine_model(slots=slots, max_tokens=64)
    scheduler = Scheduler(model, forward_tokens=forward_tokens)
    client = Client(scheduler, policies)
    for what, *arguments in operations:
        getattr(client, what)(*arguments)
    num_forwards = scheduler.statistics().num_forwards
    while not scheduler.is_idle:
        client.advance(1)
        num_forwards += 1
        assert scheduler.statistics().num_forwards == num_forwards  # every forward does something
    assert not client.asked
    done = scheduler.statistics()
    assert done.num_contexts <= slots
    assert done.num_computed_tokens >= done.num_prompt_tokens - done.num_reused_tokens
