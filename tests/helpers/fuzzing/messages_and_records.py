"""One of each message and of each record of the journal: what mutation begins from."""

from dataclasses import replace

import msgspec
import numpy as np

from mage_async.policy_version import VersionRun
from mage_async.protocol import journal_records, messages
from mage_async.tasks.league import LeagueState, Standing
from mage_async.trajectory import FinishedEpisodes, Kind, Segment, Task, Trial, Turn


def example_trial(num_tokens: int = 24) -> messages.TrialResult:
    """A trial of two segments, two episodes and every kind of turn."""
    source = np.random.default_rng(0)
    half = num_tokens // 2

    def segment(versions: tuple[VersionRun, ...]) -> Segment:
        return Segment(
            source.integers(0, 50_000, half, dtype=np.int32),
            source.random(half) < 0.5,
            -source.random(half, dtype=np.float32),
            versions,
        )

    first = Turn(Kind.ACT, 0, 0, 0, 2, 6, 0.5, True, "rock", "a1", info='{"near":[1,null]}')
    last = replace(first, kind=Kind.REFLECT, episode=1, segment=1, start=0, reward=-1.0, action="π")
    segments = segment((VersionRun(0, 3, 2), VersionRun(5, 4, 4))), segment((VersionRun(0, 4, 4),))
    task = Task("rps", "cycle-1", 5, 1)
    return messages.TrialResult(7, 1, Trial(task, 2, 2, segments, (first, last), duration_s=1.5))


def example_messages() -> list[messages.Message]:
    """One of each."""
    digest, path = "0123456789abcdef", "/run/weights/v000003.safetensors"
    return [
        messages.Hello(role="actor", name="a", build="0.1+ab", config_digest="c1", group_quota=4),
        messages.Welcome(version=3, weights_path=path),
        messages.Refusal(reason="another build"),
        messages.WhoAreYou(),
        example_grant(),
        messages.GroupDrop(grant=7, epoch=1, reason="not finished"),
        messages.Acknowledge(grant=7, epoch=1, trial=2, is_duplicate=False),
        messages.Unwanted(grant=7, epoch=1, trial=2, reason="dropped"),
        messages.Publication(version=3, path=path, digest=digest),
        messages.Loaded(version=3, digest=digest, difference=1e-6, num_retries=1),
        messages.Heartbeat(
            name="a", counters={"tokens": 3.5}, blocked_s={"engine": 0.25}, turns=((3, 0, 7),)
        ),
        messages.Goodbye(reason="done"),
        example_trial(),
        messages.EpisodeResult(7, 1, FinishedEpisodes(_unfinished(example_trial().trial), "π")),
    ]


def _unfinished(trial: Trial) -> Trial:
    return replace(trial, num_episodes=3)


def example_grant() -> messages.GroupGrant:
    """A group granted again, with a trial held."""
    return messages.GroupGrant(
        grant=7,
        epoch=1,
        environment="rps",
        member="cycle-1",
        seat=0,
        seed=2**40,
        num_trials=8,
        num_episodes=3,
        version=2,
        deadline_s=60.0,
        held=(1, 2),
        max_turns=3,
    )


def example_records() -> list[journal_records.Record]:
    """One of each."""
    granted = journal_records.Granted(peer="actor-0/ab", version=2, grant=example_grant())
    standing = Standing(rating=-12.5, groups=3, episodes=72, total=1.5, fast_mean=0.25)
    table = LeagueState(rivals=(0, 2), rating=12.5, standings={"policy-2": standing})
    head = msgspec.structs.replace(
        journal_records.first_segment_header(2, 5),
        groups=(granted,),
        dropped={"too old": 1},
        population=table,
    )
    return [
        head,
        granted,
        example_trial(),
        journal_records.Dropped(grant=7, reason="too old"),
        journal_records.Commit(
            version=3, grants=(5, 6), digest="d", tensors={"w": "e"}, time_s=1.5
        ),
        journal_records.Published(version=3, path="w", digest="d"),
        journal_records.LoadedWeights(
            peer="actor-0/ab", version=3, digest="e", difference=1e-6, num_retries=1
        ),
    ]
