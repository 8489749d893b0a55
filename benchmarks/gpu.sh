#!/usr/bin/env bash
# Builds, tests and measures what runs on a GPU, in less than ten minutes, on a machine that has one:
#
#   benchmarks/gpu.sh [FOLDER]     # FOLDER gets the logs and gpu.json; benchmarks/results if it is not given
#
# Needs nvcc, cmake, a C++ compiler and the driver. With torch (CUDA), cffi and scikit-build-core for this Python, the packages are
# installed beside them, in an environment of the build folder, tested on the GPU, and torch's sums are measured beside ours.
# Ranks are threads of one process that share the GPU, or processes. Ends with a line for each step; the status is 1 if one
# failed. A step that cannot run says why and is skipped.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
OUT=${1:-benchmarks/results}
BUILD=${PHALANX_GPU_BUILD:-build-gpu}
mkdir -p "$OUT"
SUMMARY=()
FAILED=0

step() { # step NAME LIMIT COMMAND…: the output goes to gpu-NAME.log
  local name=$1 limit=$2 status=0 begun=$SECONDS
  shift 2
  timeout "$limit" "$@" >"$OUT/gpu-$name.log" 2>&1 || status=$?
  if [ $status -eq 0 ]; then
    SUMMARY+=("$name: passed [$((SECONDS - begun)) s]")
  else
    SUMMARY+=("$name: failed, status $status [$((SECONDS - begun)) s]")
    FAILED=1
    tail -n 30 "$OUT/gpu-$name.log"
  fi
  return $status
}
skip() { SUMMARY+=("$1: skipped ($2)"); }

command -v nvidia-smi >/dev/null || { echo "there is no nvidia-smi, and so no driver"; exit 1; }
command -v nvcc >/dev/null || { echo "there is no nvcc"; exit 1; }
nvidia-smi --query-gpu=name,driver_version,compute_cap,memory.total --format=csv,noheader | tee "$OUT/gpu-machine.txt"
ARCH=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -1 | tr -d .)

build() {
  cmake -S core -B "$BUILD" -DBUILD_TESTING=ON -DPHX_CUDA=ON -DPHX_CUDA_ARCHITECTURES="$ARCH" -DPHX_BUILD_TORCH=OFF &&
    cmake --build "$BUILD" -j "$(nproc)" --target phalanx test_cuda_memory test_cuda_launch test_cuda_group \
      test_cuda_workspace test_cuda_messages test_cuda_random test_cuda_multicast gpu_bench
}
registers() {
  nvcc -std=c++17 -O3 --fmad=false -Xptxas -v -cubin -Icore/include -Icore/src -arch="sm_$ARCH" core/cuda/collectives.cu \
    -o "$BUILD/collectives.cubin" && echo "(registers and spills of each kernel above)"
}
install() { # the packages with the kernels for this GPU, beside the torch that is there
  local pip=("$BUILD/venv/bin/python" -m pip install -q --no-index --no-build-isolation --no-deps) package
  python3 -m venv --system-site-packages "$BUILD/venv" &&
    "${pip[@]}" -C cmake.define.PHX_CUDA=ON -C cmake.define.PHX_CUDA_ARCHITECTURES="$ARCH" ./core &&
    for package in collectives symm_mem dtensor inductor_plugin; do "${pip[@]}" "./packages/$package" || return; done
}
bench() { "$BUILD/tests/gpu_bench" >"$OUT/gpu.json"; }

if step build 400 build; then
  step memory 60 "$BUILD/tests/test_cuda_memory"
  step launch 120 "$BUILD/tests/test_cuda_launch"
  for name in group workspace messages random multicast; do step "$name" 60 "$BUILD/tests/test_cuda_$name"; done
  step bench 240 bench
  if command -v compute-sanitizer >/dev/null; then
    for tool in memcheck racecheck; do
      step "$tool" 120 compute-sanitizer --tool "$tool" --error-exitcode 9 "$BUILD/tests/test_cuda_launch" ranks_as_threads
    done
  else
    skip sanitizer "there is no compute-sanitizer"
  fi
  step registers 120 registers
fi
if python3 -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null; then
  step torch-sums 120 python3 benchmarks/gpu_torch.py sums
  TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 step torch-symmetric 120 python3 benchmarks/gpu_torch.py symmetric
  if ! python3 -c 'import cffi, scikit_build_core, pytest' 2>/dev/null; then
    skip packages "no cffi, scikit-build-core or pytest for python3"
  elif step install 300 install; then
    PATH=$PWD/$BUILD/venv/bin:$PATH
    step own-kernel 60 python3 examples/own_kernel_cuda.py
    step torch-ops 120 python3 -m pytest -q core/tests/python/test_core_gpu.py core/tests/python/test_torch_shim_cuda*.py
    step collectives 240 python3 -m pytest -q packages/collectives/tests/test_cuda_*.py
    step symm-mem 240 python3 -m pytest -q packages/symm_mem/tests/test_cuda_*.py
    step dtensor 120 python3 -m pytest -q packages/dtensor/tests/test_cuda_dtensor.py
    step inductor 240 python3 -m pytest -q packages/inductor_plugin/tests/test_inductor_cuda_*.py
  fi
else
  skip torch "no torch with CUDA for python3"
fi

printf '%s\n' "${SUMMARY[@]}"
exit $FAILED
