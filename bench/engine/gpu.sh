#!/usr/bin/env bash
# Measures SGLang on a machine with one Hopper GPU and no network, in under ten minutes.
#   bash bench/engine/gpu.sh BUNDLE OUT        from the repository's root
# BUNDLE: a folder with install_sglang.sh, site.tar.xz, flash_ops.abi3.so.xz, flashinfer_data.tar.xz, sgl_smoke.py.
# OUT: where the smoke's output, the logs and the baselines go. A step that fails does not stop the next.
# Models are built here from their shapes, with random weights: how fast they are does not depend on them.
set -uo pipefail
bundle=${1:?usage: gpu.sh BUNDLE OUT}
out=${2:?usage: gpu.sh BUNDLE OUT}
mkdir -p "$out"
bash "$bundle/install_sglang.sh" "$bundle" /tmp/site || exit 1
. /tmp/site/env.sh
export PYTHONPATH="$PYTHONPATH:$PWD:$PWD/kernels:$PWD/services" PYTHONUNBUFFERED=1

step() {
  local name=$1 seconds=$2
  shift 2
  echo "== $name"
  timeout -k 5 "$seconds" "$@" 2>&1 | tee "$out/$name.log" | tail -25
  echo "== $name ended with ${PIPESTATUS[0]}"
}

step smoke 150 python3 -u "$bundle/sgl_smoke.py" all --budget 130 --out "$out"
step publish 170 python3 -m bench.engine.publish --engine sglang --size 0.6b --publications 60
step rollout 200 python3 -m bench.engine.rollout --engine sglang --size 0.6b --trials 32 --rules 1000 --told 48 --drawn 64 \
  --repeats 1 --turns-a-version 96
cp bench/baselines/{rollout,publish}_sglang_0.6b*.json "$out/"
