"""Measure time and bytes to encode and decode a trial for the network, in several formats.

    python -m bench.system.wire                        20 seconds

One trial of 8,192 tokens in one segment, 3 episodes of 8 turns and the 2 reflections between them,
60 % of its tokens sampled under two policy versions: what a real model plays, about 315 tokens a
turn. Every format starts at the same `TrialResult`, ends at one that is checked to be equal, and
carries the same CRC-32 over its bytes, computed when it is written and again when it is read.

    frames          mage_async.protocol.messages: a typed header and raw arrays
    msgpack lists   msgpack of a dict, arrays as lists of numbers, read back into arrays
    msgspec lists   the same by a typed msgspec.Struct
    pickle 5        for comparison only; it runs its sender's code, so it never crosses a socket

Rounds take the formats in turn, after a warm-up. A round is the mean of some calls; the table has
the median of the rounds, and their 10th and 90th percentile. Peak memory is that of one encoding
and decoding, by tracemalloc, beyond the trial itself. Times are wall times: they count only where
this process had a processor to itself; see its share, processor time over wall time.
"""

import dataclasses
import pickle
import sys
import time
import tracemalloc
import zlib
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NamedTuple

import msgpack
import msgspec
import numpy as np

from bench.lib.baseline import verdict, write_baseline
from bench.lib.options import option_parser
from mage_async.policy_version import VersionRun
from mage_async.protocol.codec import decode, encode
from mage_async.protocol.messages import TrialResult
from mage_async.trajectory import Kind, Segment, Task, Trial, Turn

NUM_TOKENS = 8192
LIMIT_US = 100.0
"""Largest allowed microseconds to encode and decode a trial as frames."""
NUM_ROUNDS = 60
ROUND_S = 0.02
"""Seconds of a round of one call."""


class Format(NamedTuple):
    """Functions that write a trial and read it back."""

    write: Callable[[TrialResult], list[bytes]]
    read: Callable[[list[bytes]], TrialResult]


class Columns(msgspec.Struct):
    """A trial with its arrays as lists, for typed decoding."""

    grant: int
    epoch: int
    task: Task
    index: int
    num_episodes: int
    duration_s: float
    tokens: list[int]
    logprobs: list[float]
    is_sampled: list[bool]
    versions: list[VersionRun]
    turns: list[Turn]


def example() -> TrialResult:
    """Return the trial that every format encodes."""
    source = np.random.default_rng(0)
    sampled = source.random(NUM_TOKENS) < 0.6
    logprobs = np.where(sampled, -source.exponential(size=NUM_TOKENS), 0).astype(np.float32)
    segment = Segment(
        tokens=source.integers(0, 151_936, NUM_TOKENS, dtype=np.int32),
        is_sampled=sampled,
        logprobs=logprobs,
        versions=(VersionRun(0, 41, 41), VersionRun(NUM_TOKENS // 2, 42, 41)),
    )
    task = Task("rps", "cycle-021", seed=12345)
    return TrialResult(7, 0, Trial(task, 3, 3, (segment,), turns(), duration_s=12.5))


def turns() -> tuple[Turn, ...]:
    """Return the turns: 8 actions in each episode, and a reflection after the first two."""
    kinds = ([Kind.ACT] * 8 + [Kind.REFLECT]) * 3
    span = NUM_TOKENS // (len(kinds) - 1)
    return tuple(
        Turn(
            kind=kind,
            episode=number // 9,
            index=0 if kind is Kind.REFLECT else number % 9,
            segment=0,
            start=number * span + span // 3,
            stop=(number + 1) * span,
            reward=0.0 if kind is Kind.REFLECT else (-1.0) ** number,
            is_valid=True,
            action="They play in a circle, one step on each time." * (kind is Kind.REFLECT)
            or "paper",
            anchor=f"round {number % 9}",
        )
        for number, kind in enumerate(kinds[:-1])
    )


def columns(result: TrialResult) -> Columns:
    """Return a trial with its arrays as lists."""
    trial, (segment,) = result.trial, result.trial.segments
    return Columns(
        grant=result.grant,
        epoch=result.epoch,
        task=trial.task,
        index=trial.index,
        num_episodes=trial.num_episodes,
        duration_s=trial.duration_s,
        tokens=segment.tokens.tolist(),
        logprobs=segment.logprobs.tolist(),
        is_sampled=segment.is_sampled.tolist(),
        versions=list(segment.versions),
        turns=list(trial.turns),
    )


def trial_of(row: Columns) -> TrialResult:
    """Return the trial of lists, which become arrays again."""
    segment = Segment(
        np.array(row.tokens, np.int32),
        np.array(row.is_sampled, bool),
        np.array(row.logprobs, np.float32),
        tuple(row.versions),
    )
    trial = Trial(
        row.task,
        row.index,
        row.num_episodes,
        (segment,),
        tuple(row.turns),
        duration_s=row.duration_s,
    )
    return TrialResult(row.grant, row.epoch, trial)


def with_checksum(packed: bytes) -> list[bytes]:
    return [packed, zlib.crc32(packed).to_bytes(4, "little")]


def checked(frames: list[bytes]) -> bytes:
    assert zlib.crc32(frames[0]).to_bytes(4, "little") == frames[1]
    return frames[0]


def write_msgpack(result: TrialResult) -> list[bytes]:
    """Encode a trial as a dict; msgpack knows no classes, so nested records become dicts too."""
    row = columns(result)
    fields = {name: getattr(row, name) for name in row.__struct_fields__}
    fields["task"] = dataclasses.asdict(row.task)
    for name in ("versions", "turns"):
        records = fields[name]
        names = records[0].__slots__
        fields[name] = [{key: getattr(record, key) for key in names} for record in records]
    return with_checksum(msgpack.packb(fields))


def read_msgpack(frames: list[bytes]) -> TrialResult:
    fields = msgpack.unpackb(checked(frames))
    fields["task"] = Task(**fields["task"])
    fields["versions"] = [VersionRun(**run) for run in fields["versions"]]
    fields["turns"] = [Turn(**turn | {"kind": Kind(turn["kind"])}) for turn in fields["turns"]]
    return trial_of(Columns(**fields))


def formats() -> dict[str, Format]:
    """Return the formats by name, ours first."""
    written, reading = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Columns)
    return {
        "frames": Format(encode, decode),  # type: ignore[arg-type]
        "msgpack lists": Format(write_msgpack, read_msgpack),
        "msgspec lists": Format(
            lambda result: with_checksum(written.encode(columns(result))),
            lambda frames: trial_of(reading.decode(checked(frames))),
        ),
        "pickle 5": Format(
            lambda result: with_checksum(pickle.dumps(result, protocol=5)),
            lambda frames: pickle.loads(checked(frames)),
        ),
    }


def check_equal(got: TrialResult, sent: TrialResult) -> None:
    """Check that a trial that was read equals the one that was written."""
    (one,), (other,) = got.trial.segments, sent.trial.segments
    for name in ("tokens", "is_sampled", "logprobs"):
        assert np.array_equal(getattr(one, name), getattr(other, name)), name
        assert getattr(one, name).dtype == getattr(other, name).dtype, name
    assert one.versions == other.versions
    for name in ("task", "index", "num_episodes", "turns", "duration_s"):
        assert getattr(got.trial, name) == getattr(sent.trial, name), name


def seconds_per_call(call: Callable[[], object], num_calls: int) -> float:
    start = time.perf_counter()
    for _ in range(num_calls):
        call()
    return (time.perf_counter() - start) / num_calls


def timed(calls: dict[str, Callable[[], object]]) -> dict[str, np.ndarray]:
    """Return microseconds of each call, by round; the calls alternate."""
    num_calls = {name: int(ROUND_S / seconds_per_call(call, 5)) + 1 for name, call in calls.items()}
    rounds = [
        [seconds_per_call(call, num_calls[name]) * 1e6 for name, call in calls.items()]
        for _ in range(NUM_ROUNDS)
    ]
    return dict(zip(calls, np.array(rounds).T, strict=True))


def peak_bytes(call: Callable[[], object]) -> int:
    tracemalloc.start()
    call()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


def spread(microseconds: np.ndarray) -> dict[str, float]:
    low, middle, high = np.percentile(microseconds, [10, 50, 90])
    return {"median_us": round(middle, 2), "p10_us": round(low, 2), "p90_us": round(high, 2)}


def measure() -> dict[str, dict[str, Any]]:
    """Return the figures by format."""
    sent, known = example(), formats()
    bytes_of = {name: [bytes(f) for f in made.write(sent)] for name, made in known.items()}
    calls: dict[str, Callable[[], object]] = {}
    for name, made in known.items():
        check_equal(made.read(bytes_of[name]), sent)
        calls[f"{name} encode"] = lambda made=made: made.write(sent)
        calls[f"{name} decode"] = lambda made=made, frames=bytes_of[name]: made.read(frames)
    rounds = timed(calls)
    return {
        name: {
            "encode": spread(rounds[f"{name} encode"]),
            "decode": spread(rounds[f"{name} decode"]),
            "both": spread(rounds[f"{name} encode"] + rounds[f"{name} decode"]),
            "bytes": sum(map(len, bytes_of[name])),
            "peak_bytes": peak_bytes(lambda made=made: made.read(made.write(sent))),
        }
        for name, made in known.items()
    }


def measure_checksums() -> dict[str, dict[str, float]]:
    """Time zlib's CRC-32 over a trial's bytes, and a crc32c package's if one is installed."""
    data = b"".join(map(bytes, encode(example())))
    calls: dict[str, Callable[[], object]] = {"zlib.crc32": lambda: zlib.crc32(data)}
    if find_spec("google_crc32c"):
        import google_crc32c

        calls["google_crc32c"] = lambda: google_crc32c.value(data)
    return {name: spread(microseconds) for name, microseconds in timed(calls).items()}


def main() -> int:
    """Measure all formats, print the table, write the baseline; return 1 if the bound is missed."""
    option_parser(__doc__).parse_args()
    begun, used = time.perf_counter(), time.process_time()
    figures, checksums = measure(), measure_checksums()
    share = (time.process_time() - used) / (time.perf_counter() - begun)
    ours = figures["frames"]["both"]["median_us"]
    print(f"one trial of {NUM_TOKENS:,} tokens and {len(turns())} turns, microseconds")
    print(f"processor share {share:.2f}\n")
    print(
        f"{'':14} {'encode':>8} {'decode':>8} {'both':>9} {'p10 to p90':>19} {'× frames':>9}",
        end="",
    )
    print(f" {'bytes':>9} {'peak bytes':>11}")
    for name, row in figures.items():
        both = row["both"]
        print(
            f"{name:14} {row['encode']['median_us']:8.1f} {row['decode']['median_us']:8.1f} "
            f"{both['median_us']:9.1f} {both['p10_us']:8.1f} to {both['p90_us']:7.1f} "
            f"{both['median_us'] / ours:9.1f} {row['bytes']:9,} {row['peak_bytes']:11,}"
        )
    print("\n" + ", ".join(f"{name} {row['median_us']:.1f}" for name, row in checksums.items()))
    shape = {"num_tokens": NUM_TOKENS, "num_turns": len(turns()), "num_segments": 1}
    write_baseline(
        "wire",
        {
            "shape": shape,
            "processor_share": round(share, 3),
            "limit_us": LIMIT_US,
            "formats": figures,
            "checksums": checksums,
        },
    )
    is_met = ours <= LIMIT_US
    return verdict([] if is_met else [f"frames took {ours:.1f} µs, at most {LIMIT_US:.0f}"])


if __name__ == "__main__":
    sys.exit(main())
