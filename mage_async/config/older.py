"""Configurations of earlier versions, as they are written today.

Until commit 34afa1d every file said every key: constants of all corrections stood in `[learner]`,
the shape of the tiny model in `[policy.tiny]` beside a `source`, and `[engine]` had the keys of
both engines. What a kind has no use for was not looked at, and is left out here.
"""

from typing import Any

from mage_async.config.sections.corrections import AnyCorrection
from mage_async.config.sections.engines import Embedded, Sglang
from mage_async.config.shape import Table, keys_of, kinds, stated_kind

TINY = "tiny"
"""As a `policy.source`: the model that is built here."""
CONSTANTS = (
    *("clip_low", "clip_high", "dual_clip", "max_weight", "keep_low", "keep_high"),
    *("max_probability_change", "max_second_moment", "age_decay", "max_age"),
)
SHAPE = ("hidden_size", "layers", "heads", "kv_heads", "mlp_size", "rope_theta")
MOVED = {f"learner.{name}": f"learner.correction.{name}" for name in CONSTANTS} | {
    f"policy.tiny.{name}": f"policy.{name}" for name in SHAPE
}
"""Keys by their older name, and what each is called today."""


def named_today(key: str, value: Any) -> list[tuple[str, Any]]:
    """What a key and value of any version mean today.

    `policy.source` alone means the kind too, as it did before there were kinds.
    """
    if key == "policy.source":
        if value == TINY:
            return [("policy.kind", TINY)]
        return [("policy.kind", "pretrained"), (key, value)]
    return [(MOVED.get(key, key), value)]


def upgraded(tree: Table) -> Table:
    """A file's keys as they are written today; what is of today, or of no version, stays."""
    today = dict(tree)
    for name, upgrade in (("learner", _learner), ("policy", _policy)):
        if isinstance(tree.get(name), dict):
            today[name] = upgrade(tree[name])
    if _is_flat(tree) and isinstance(tree.get("engine"), dict):
        today["engine"] = _only_of_kind(tree["engine"], Embedded | Sglang)
    return today


def _is_flat(tree: Table) -> bool:
    """Whether a file is one of those that say every key."""
    learner = tree.get("learner")
    return isinstance(learner, dict) and all(name in learner for name in CONSTANTS)


def _learner(table: Table) -> Table:
    constants = {key: value for key, value in table.items() if key in CONSTANTS}
    rest = {key: value for key, value in table.items() if key not in CONSTANTS}
    if not constants:
        return rest
    stated = rest.get("correction", {})
    if isinstance(stated, str):
        rest["correction"] = _only_of_kind({"kind": stated} | constants, AnyCorrection)
    elif isinstance(stated, dict):
        rest["correction"] = constants | stated
    return rest


def _policy(table: Table) -> Table:
    today = {key: value for key, value in table.items() if key != "tiny"}
    shape = table.get("tiny", {})
    if not isinstance(shape, dict):
        return table
    if "source" not in today or "kind" in today:
        return today | shape
    if today["source"] != TINY:
        return {"kind": "pretrained"} | today
    del today["source"]
    return {"kind": TINY} | today | shape


def _only_of_kind(table: Table, hint: Any) -> Table:
    known = kinds(hint)
    kind = stated_kind(table, known)
    kept = ("kind", *keys_of(known[kind])) if kind else (*table,)
    return {key: value for key, value in table.items() if key in kept}
