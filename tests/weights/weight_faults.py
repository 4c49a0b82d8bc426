"""Made faults of published weights, each as it happens: before they are written, or behind that.

A fault takes a number, which chooses the tensor, layer or place, so that twenty of a kind are
twenty faults. A fault that is made before the learner writes its digests can be seen by log-probs
alone; every second fault of the kinds that know both is made so.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel

from mage_async.config.policy import Lora
from mage_async.learning.adapters import ADAPTER, adapted_layers, base_tensors
from mage_async.learning.attention import NAME
from mage_async.policy import snapshot as snapshots
from mage_async.policy.load import export_hf
from mage_async.policy.lora import add_adapters
from mage_async.policy.snapshot import Snapshot
from mage_async.policy.weight_digest import probe_logprobs
from tests.helpers.random_models import random_model

Tensors = dict[str, torch.Tensor]
MERGED = "merged_tensors"


@dataclass(frozen=True)
class Site:
    """A model with adapters as a learner trains it, and the folder that it publishes to."""

    model: PreTrainedModel
    before: Tensors
    """The weights of the version before."""
    folder: Path

    @staticmethod
    def of(folder: Path) -> "Site":
        """A small model after a step, served from `folder / "policy"`."""
        model = random_model("Qwen3", initializer_range=0.2)
        export_hf(model, folder, folder / "policy")
        model.set_attn_implementation(NAME)
        add_adapters(model, Lora(rank=4, alpha=8.0), 0)
        site = Site(model, {n: t.clone() for n, t in base_tensors(model).items()}, folder)
        site.step()
        return site

    @torch.no_grad()
    def step(self) -> None:
        """Move every weight by a tenth of what weights are."""
        source = torch.Generator().manual_seed(1)
        for tensor in base_tensors(self.model).values():
            tensor.add_(torch.randn(tensor.shape, generator=source), alpha=0.02)
        for layer in adapted_layers(self.model).values():
            layer.lora_B[ADAPTER].weight.normal_(0.0, 0.02, generator=source)

    def publish(self, version: int = 1) -> Path:
        """Publish the model as a learner does."""
        file = self.folder / f"v{version:06d}.safetensors"
        Snapshot.of(self.model, version, probe_logprobs(self.model)).write(file)
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


def _faulty(site: Site, change: Callable[[Tensors], Tensors], *, is_late: bool) -> Path:
    """Publish with a change behind the digests, or before them."""
    if is_late:
        file = site.publish()
        with safe_open(file, "pt") as found:
            names = found.keys()
            tensors, metadata = {n: found.get_tensor(n).clone() for n in names}, found.metadata()
        save_file(change(tensors), file, metadata)
        return file
    with _merged_as(change):
        return site.publish()


@contextmanager
def _merged_as(change: Callable[[Tensors], Tensors]) -> Iterator[None]:
    """Snapshots copy what `change` makes of the merged weights."""
    merged = snapshots.merged_tensors
    with patch.object(snapshots, MERGED, lambda model: change(dict(merged(model))).items()):
        yield
