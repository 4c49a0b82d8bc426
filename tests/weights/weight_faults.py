"""Made faults of published weights, each as it happens: before they are written, or behind that.

A fault takes a number, which chooses the tensor, layer or place, so that twenty of a kind are
twenty faults. A fault that is made before the learner writes its digests can be seen by log-probs
alone; every second fault of the kinds that know both is made so.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import msgspec
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel

from mage_async.config.schema import Lora
from mage_async.inference.weight_fingerprint import AdapterBase
from mage_async.inference.weights import DOWN, UP
from mage_async.learning.attention import PACKED_ATTENTION
from mage_async.learning.lora import (
    ADAPTER,
    adapted_layers,
    adapter_tensors,
    add_adapters,
    base_tensors,
)
from mage_async.policy import snapshot as snapshots
from mage_async.policy.load import export_hf
from mage_async.policy.snapshot import Snapshot, base_of
from mage_async.policy.weight_digest import probe_logprobs
from tests.helpers.random_models import random_model

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Site:
    """A model with adapters as a learner trains it, and the folder that it publishes to."""

    model: PreTrainedModel
    before: Tensors
    """The weights of the version before, or its adapters if these alone are published."""
    folder: Path
    base: AdapterBase | None = None
    """Below published adapters; None: all weights are published."""

    @staticmethod
    def of(folder: Path, *, publishes_adapters: bool = False) -> "Site":
        """A small model after a step, served from `folder / "policy"`."""
        model = random_model("Qwen3", initializer_range=0.2)
        export_hf(model, folder, folder / "policy")
        model.set_attn_implementation(PACKED_ATTENTION)
        add_adapters(model, Lora(rank=4, alpha=8.0), 0)
        base = base_of(model) if publishes_adapters else None
        published = base_tensors(model) if base is None else adapter_tensors(model)
        site = Site(model, {n: t.clone() for n, t in published.items()}, folder, base)
        site.step()
        return site

    @torch.no_grad()
    def step(self) -> None:
        """Move every weight that is published by a tenth of what weights are."""
        source = torch.Generator().manual_seed(1)
        moved = (base_tensors if self.base is None else adapter_tensors)(self.model)
        for tensor in moved.values():
            tensor.add_(torch.randn(tensor.shape, generator=source), alpha=0.02)
        for layer in adapted_layers(self.model).values():
            layer.lora_B[ADAPTER].weight.normal_(0.0, 0.02, generator=source)

    def publish(self, version: int = 1, **changes: object) -> Path:
        """Publish the model as a learner does.

        Args:
            changes: fields of the base that are wrong.
        """
        file = self.folder / f"v{version:06d}.safetensors"
        base = self.base and msgspec.structs.replace(self.base, **changes)
        Snapshot.of(self.model, version, probe_logprobs(self.model), base).write(file)
        return file


Fault = Callable[[Site, int], Path]


def stale_tensor(site: Site, number: int) -> Path:
    """One matrix or norm is that of the version before."""
    name = sorted(site.before)[number % len(site.before)]

    def stale(tensors: Tensors) -> Tensors:
        return tensors | {name: site.before[name]}

    return _faulty(site, stale, is_late=number % 2 == 1)


def swapped_layers(site: Site, number: int) -> Path:
    """A matrix of one layer and the same of another have changed places."""
    first, second = ((0, 1), (1, 2), (0, 2))[number % 3]
    endings = sorted(n.split(".layers.0.")[1] for n in site.before if ".layers.0." in n)
    ending = endings[number % len(endings)]
    one, other = (f"model.layers.{each}.{ending}" for each in (first, second))

    def swapped(tensors: Tensors) -> Tensors:
        return tensors | {one: tensors[other], other: tensors[one]}

    return _faulty(site, swapped, is_late=number % 2 == 1)


def unmerged_adapters(site: Site, number: int) -> Path:
    """The frozen weights are published, of one layer or of all, without their adapters."""
    names = [f"{name}.weight" for name in adapted_layers(site.model)]
    left = names if number == 0 else [names[number % len(names)]]
    base = base_tensors(site.model)

    def unmerged(tensors: Tensors) -> Tensors:
        return tensors | {name: base[name] for name in left}

    return _faulty(site, unmerged, is_late=False)


def wrong_type(site: Site, number: int) -> Path:
    """A tensor, or each of them, lies there as bfloat16, or has been through it."""
    names = sorted(site.before)
    chosen = names if number % 2 else [names[number]]

    def narrow(tensors: Tensors) -> Tensors:
        rounded = {name: tensors[name].bfloat16() for name in chosen}
        is_back = number % 4 < 2
        return tensors | {name: t.float() if is_back else t for name, t in rounded.items()}

    return _faulty(site, narrow, is_late=True)


def half_a_bucket(site: Site, number: int) -> Path:
    """The file is cut short, or from some byte on it is that of the version before, or zeros."""
    file = site.publish()
    data = file.read_bytes()
    head = 8 + int.from_bytes(data[:8], "little")
    start = head + (len(data) - head) * (number + 1) // 22
    rest = (b"", bytes(len(data) - start))[number % 2]
    file.write_bytes(data[:start] + rest)
    return file


FAULTS: dict[str, Fault] = {
    "one tensor stale": stale_tensor,
    "layers swapped": swapped_layers,
    "adapters not merged": unmerged_adapters,
    "another type": wrong_type,
    "half a bucket": half_a_bucket,
}


def stale_matrix(site: Site, number: int) -> Path:
    """A matrix of an adapter is that of the version before."""
    name = sorted(site.before)[number % len(site.before)]

    def stale(tensors: Tensors) -> Tensors:
        return tensors | {name: site.before[name]}

    return _faulty(site, stale, is_late=number % 2 == 1)


def other_layers_adapter(site: Site, number: int) -> Path:
    """Both matrices of an adapter, or one, are those of another layer."""
    layers = [name.removesuffix(UP) for name in sorted(site.before) if name.endswith(UP)]
    own, other = layers[number % 7], layers[number % 7 + 7 * (1 + number % 2)]

    def swapped(tensors: Tensors) -> Tensors:
        endings = ((DOWN, UP), (UP,), (DOWN,))[number % 3]
        return tensors | {own + each: tensors[other + each].clone() for each in endings}

    return _faulty(site, swapped, is_late=number % 4 > 1)


def base_alone(site: Site, number: int) -> Path:
    """The adapter of one layer, or of all, is as before the first step."""
    ups = [name for name in sorted(site.before) if name.endswith(UP)]

    def fresh(tensors: Tensors) -> Tensors:
        chosen = ups if number < 2 else [ups[number]]
        return tensors | {name: torch.zeros_like(tensors[name]) for name in chosen}

    return _faulty(site, fresh, is_late=number % 2 == 1)


@torch.no_grad()
def other_base(site: Site, number: int) -> Path:
    """The learner began with other weights; or a step has moved weights that should be frozen."""
    tensor = list(base_tensors(site.model).values())[number]
    before = tensor.clone()
    tensor.add_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1)), alpha=0.02)
    try:
        return site.publish(digest=base_of(site.model).digest if number % 2 else site.base.digest)
    finally:
        tensor.copy_(before)


def other_rank(site: Site, number: int) -> Path:
    """The adapter of one layer, or of all, has half the rank, or its matrices do not fit."""
    layers = [name.removesuffix(UP) for name in sorted(site.before) if name.endswith(UP)]

    def halved(tensors: Tensors) -> Tensors:
        chosen = layers if number < 2 else [layers[number]]
        downs = {each + DOWN: tensors[each + DOWN][:2].contiguous() for each in chosen}
        ups = {each + UP: tensors[each + UP][:, :2].contiguous() for each in chosen}
        return tensors | downs | (ups if number % 4 < 3 else {})

    return _faulty(site, halved, is_late=number % 2 == 1)


def other_target(site: Site, number: int) -> Path:
    """The adapter of a layer is missing, or one matrix of it, or it has another layer's name."""
    layer = sorted({name.removesuffix(UP).removesuffix(DOWN) for name in site.before})[number]
    other = ("model.norm", "model.layers.9.mlp.up_proj", "lm_head", "")[number % 4]

    def moved(tensors: Tensors) -> Tensors:
        kept = {name: one for name, one in tensors.items() if not name.startswith(layer)}
        if number % 3 == 0:
            return kept | {layer + UP: tensors[layer + UP]}
        pairs = {other + ending: tensors[layer + ending] for ending in (DOWN, UP)}
        return kept | (pairs if other else {})

    return _faulty(site, moved, is_late=number % 2 == 1)


def other_scale(site: Site, number: int) -> Path:
    """Engines are told another factor than the learner's."""
    return site.publish(scale=site.base.scale * (0.5 + (number + 1) / 39))


ADAPTER_FAULTS: dict[str, Fault] = {
    "one matrix stale": stale_matrix,
    "another layer's adapter": other_layers_adapter,
    "base alone": base_alone,
    "another base": other_base,
    "another rank": other_rank,
    "another target": other_target,
    "another scale": other_scale,
    "another type": wrong_type,
    "half a bucket": half_a_bucket,
}


def _faulty(site: Site, change: Callable[[Tensors], Tensors], *, is_late: bool) -> Path:
    """Publish with a change behind the digests, or before them."""
    if is_late:
        file = site.publish()
        with safe_open(file, "pt") as found:
            names = found.keys()
            tensors, metadata = {n: found.get_tensor(n).clone() for n in names}, found.metadata()
        save_file(change(tensors), file, metadata)
        return file
    if site.base is None:
        merged = snapshots.merged_tensors
        changed = patch.object(
            snapshots, "merged_tensors", lambda model: change(dict(merged(model))).items()
        )
    else:
        changed = patch.object(
            snapshots, "adapter_tensors", lambda model: change(adapter_tensors(model))
        )
    with changed:
        return site.publish()
