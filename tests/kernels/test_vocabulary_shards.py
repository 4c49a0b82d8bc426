"""What a head split over ranks will need: partials of shards merge to those of the whole."""

import torch

from mage_kernels.testing import random_head


def test_partials_of_two_shards_merge_to_the_whole(triton_kernels: str) -> None:
    from mage_kernels.fused.logit_partials import logit_partials
    from mage_kernels.fused.merged_partials import merged_partials

    hidden, head, tokens, _ = random_head(20, 700, 64, device=triton_kernels)
    ones = torch.ones(20, device=triton_kernels)
    shards = [logit_partials(hidden, part.contiguous(), ones) for part in (head[:333], head[333:])]
    whole = merged_partials(logit_partials(hidden, head, ones), hidden, head, tokens, ones)
    merged = merged_partials(torch.cat(shards, 1), hidden, head, tokens, ones)
    for ours, theirs in zip(merged, whole, strict=True):
        assert (ours - theirs).abs().max() <= 1e-5
