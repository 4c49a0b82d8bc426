"""SGLang's reply to a request, as tokens, log-probs and versions."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mage_async.policy_version import Provenance
from mage_services.engines.sglang.messages import Drew

Spans = tuple[tuple[int, int], ...]
"""(start, version) of runs of tokens, in order; a run ends where the next one starts."""


def drew(rid: str, meta: Mapping[str, Any], cuts: Sequence[tuple[int, int]]) -> Drew:
    """A request's end.

    Its tokens are those that have a log-prob; the token that stopped it is one of them. An aborted
    request that never ran has none.

    Args:
        cuts: see `spans_of`.
    """
    entries = meta.get("output_token_logprobs") or ()
    spans, provenance = spans_of(meta, cuts, len(entries))
    return Drew(
        rid=rid,
        tokens=np.array([entry[1] for entry in entries], np.int32).tobytes(),
        logprobs=np.array([entry[0] for entry in entries], np.float32).tobytes(),
        spans=spans,
        provenance=provenance,
        num_cached=int(meta.get("cached_tokens") or 0),
        is_aborted=(meta.get("finish_reason") or {}).get("type") == "abort",
    )


def nothing(rid: str) -> Drew:
    """The end of a request that was aborted before it drew anything."""
    return drew(rid, {"finish_reason": {"type": "abort"}}, ((0, 0),))


def spans_of(
    meta: Mapping[str, Any], cuts: Sequence[tuple[int, int]], num_tokens: int
) -> tuple[Spans, Provenance]:
    """Which version drew which tokens of a request, and how that is known.

    SGLang says it of each token from 0.5.19 on (`weight_versions`). Before, a request under one
    version is known as exactly; one that others came into is cut where they came, by how many of
    its tokens had been heard of.

    Args:
        cuts: (tokens heard of, version) at the request's begin and whenever weights changed under
            it; the numbers of tokens are 0 but for the begin's where nobody listened.
    """
    said = meta.get("weight_versions")
    if said:
        spans = [(int(span["start"]), int(span["version"])) for span in said]
        return _inside(spans, num_tokens), "exact"
    if len(cuts) == 1:
        return _inside(cuts, num_tokens), "exact"
    if any(start > 0 for start, _ in cuts):
        return _inside(cuts, num_tokens), "segment"
    return _inside([(0, cuts[-1][1])], num_tokens), "reply"


def _inside(spans: Sequence[tuple[int, int]], num_tokens: int) -> Spans:
    """Spans that hold tokens: a later one at the same start takes the place of an earlier one."""
    last = {start: version for start, version in spans if start < num_tokens}
    return tuple(sorted(last.items()))
