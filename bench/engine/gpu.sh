#!/usr/bin/env bash
# Measures a machine with one Hopper GPU and no network, in under ten minutes, or twelve with MODEL.
#   bash bench/engine/gpu.sh BUNDLE OUT [MODEL]        from the repository's root
# BUNDLE: a folder with install_sglang.sh, site.tar.xz, flash_ops.abi3.so.xz, flashinfer_data.tar.xz, and wheels (*.whl) of
#   what the machine lacks: a run needs llguidance, tomli_w and shtab; the kernels are compared with liger_kernel.
# OUT: where logs and baselines go. A step that fails does not stop the next.
# MODEL: a folder with SmolLM2-135M-Instruct, which is trained on boxes first.
# Other models are built here from their shapes, with random weights: how fast they are does not depend on them.
set -uo pipefail
bundle=${1:?usage: gpu.sh BUNDLE OUT [MODEL]}
out=${2:?usage: gpu.sh BUNDLE OUT [MODEL]}
model=${3:-}
mkdir -p "$out"
bash "$bundle/install_sglang.sh" "$bundle" /tmp/site || exit 1
. /tmp/site/env.sh
if compgen -G "$bundle/*.whl" > /dev/null; then
  python3 -m pip install -q --no-index --no-deps --no-compile --target /tmp/wheels "$bundle"/*.whl || exit 1
fi
# The machine's own packages come first where it has a wheel's package too.
export PYTHONPATH="$PWD:$PWD/services:$PWD/kernels:$PYTHONPATH:/tmp/wheels" PYTHONUNBUFFERED=1

step() {
  local name=$1 seconds=$2
  shift 2
  echo "== $name"
  timeout -k 5 "$seconds" "$@" > "$out/$name.log" 2>&1
  local status=$?
  tail -n 25 "$out/$name.log"
  echo "== $name ended with $status"
}

if [ -n "$model" ]; then
  # `forced_tags` is no default on a GPU, and an engine's cache needs room for all its contexts.
  step train 240 python3 -m mage_async.launch train --config smollm2_boxes --actors 1 --run-dir /tmp/boxes \
    --set policy.source="$model" --set transcript.forced_tags=both --set engine.kind=sglang --set "engine.devices=[0]" \
    --set engine.max_contexts=36 --set "engine.server={mem_fraction_static=0.5,max_total_tokens=40000,cuda_graph_max_bs=36}" \
    --set learner.device=cuda:0 --set learner.max_tokens_per_microbatch=16384 --set transport.weights=tensor
  tar czf "$out/boxes.tar.gz" --exclude='*.safetensors' --exclude='*.pt' -C /tmp boxes
fi
step kernels 85 python3 -m bench.kernels.measure --minutes 1 --shape 8192x1024 --logits peaked
step rollout 140 python3 -m bench.engine.rollout --engine sglang --size 0.6b --trials 32 --rules 1000 --told 48 --drawn 64 \
  --repeats 1 --turns-a-version 96
step publish 170 python3 -m bench.engine.publish --engine sglang --size 0.6b --publications 60
step tests 150 python3 -m pytest -q -n 4 -p no:benchmark tests/kernels tests/learning
cp bench/baselines/{rollout,publish}_sglang_0.6b*.json bench/baselines/kernels_nvidia*.json "$out/"
