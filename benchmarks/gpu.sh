#!/usr/bin/env bash
# Builds, tests, tunes and measures what runs on a GPU, on a machine that has one:
#
#   benchmarks/gpu.sh [FOLDER [core | torch | STEP...]]   # FOLDER gets gpu.log and gpu.json; benchmarks/results without
#
# core: needs nvcc, cmake, a C++ compiler and the driver. torch: needs these, and torch (CUDA), cffi, scikit-build-core,
# pytest and pytest-timeout for python3; the packages are installed into a folder of the build folder, tested on the
# GPU, and torch's sums are measured beside ours. gpu-tuning.txt is the table that `phalanx tune` writes there; nothing
# here uses it but the step that shows it. Steps can be had singly where a command may not take as long as a part does
# (docs/howto/gpu.md). What is there of builds is used again.
# Ranks are threads of one process that share the GPU, or processes. Says how each step went, once as it ends and again
# at the end; the status is 1 if one failed. A step that cannot run says why and is skipped.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export OUT=${1:-benchmarks/results} BUILD=$PWD/${PHALANX_GPU_BUILD:-build-gpu}
WANTED=" ${*:2} "
mkdir -p "$OUT" "$BUILD"
: >"$OUT/gpu.log"
SUMMARY=()
FAILED=0
# Kernels that wait for each other must not stand behind each other in one queue of the GPU, as those of ranks that are
# threads would; and what a shell has set for other builds or for a driver without a GPU is not meant here.
export CUDA_DEVICE_MAX_CONNECTIONS=32
unset PHALANX_CUDA_KERNELS PHALANX_ISA PHALANX_NATIVE
export CMAKE_BUILD_PARALLEL_LEVEL=${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)} # pip's builds too, also those by make

tell() {
  SUMMARY+=("$1")
  echo "$1"
}
wanted() { # wanted PART NAME: whether that step is to run
  [[ $WANTED =~ ^\ *$ || $WANTED == *" $1 "* || $WANTED == *" $2 "* ]]
}
core() { # core NAME LIMIT COMMAND…: a step of that part
  if wanted core "$1"; then step "$@"; fi
}
torch() {
  if wanted torch "$1"; then step "$@"; fi
}
step() { # step NAME LIMIT COMMAND…: the output goes to gpu.log
  local name=$1 limit=$2 status=0 begun=$SECONDS
  shift 2
  timeout -k 10 "$limit" bash -c '"$@"' "$name" "$@" >"$BUILD/step.log" 2>&1 </dev/null || status=$?
  { echo "==== $name" && cat "$BUILD/step.log"; } >>"$OUT/gpu.log"
  if [ $status -eq 0 ]; then
    tell "$name: passed [$((SECONDS - begun)) s]"
  else
    tail -n 30 "$BUILD/step.log"
    tell "$name: failed, status $status [$((SECONDS - begun)) s]"
    FAILED=1
  fi
  return $status
}
skip() { tell "$1: skipped ($2)"; }

command -v nvidia-smi >/dev/null || { echo "there is no nvidia-smi, and so no driver"; exit 1; }
command -v nvcc >/dev/null || PATH=$PATH:${CUDA_HOME:-/usr/local/cuda}/bin
command -v nvcc >/dev/null || { echo "there is no nvcc"; exit 1; }
nvidia-smi --query-gpu=name,driver_version,compute_cap,memory.total --format=csv,noheader | tee "$OUT/gpu-machine.txt"
ARCH=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -1 | tr -d .)
export ARCH

# The steps that are more than one command. `timeout` runs them in a shell of their own.
configure() {
  cmake -S core -B "$BUILD" -DBUILD_TESTING=ON -DPHX_CUDA=ON -DPHX_CUDA_ARCHITECTURES="$ARCH" -DPHX_BUILD_TORCH=OFF
}
build() {
  configure && cmake --build "$BUILD" -j "$(nproc)" --target phalanx test_cuda_memory test_cuda_fabric test_cuda_launch test_cuda_group \
    test_cuda_workspace test_cuda_messages test_cuda_random test_cuda_multicast test_cuda_tuning gpu_bench
}
kernels() { configure && cmake --build "$BUILD" --target phx_cuda_kernels; } # at once, where they have been built
backend() { # of torch.distributed, in C++, for this torch: the tests take it from there
  python3 -c 'from phalanx.collectives import c10d; c10d.load()'
}
bench() { "$BUILD/tests/gpu_bench" >"$OUT/gpu.json"; }
install_packages() { # in one go, as they share a folder
  python3 -m pip install -q --no-index --no-build-isolation --no-deps --no-compile --upgrade --target "$BUILD/site" \
    -C cmake.define.PHX_CUDA=ON -C cmake.define.PHX_CUDA_IMAGE="$BUILD/collectives.fatbin" \
    ./core ./packages/collectives ./packages/symm_mem ./packages/dtensor ./packages/inductor_plugin ./tools || return
  # An editable install comes before the folder, and would be what is tested.
  PYTHONPATH=$BUILD/site python3 -c 'import sys, phalanx.core as core
sys.exit(None if core.__file__.startswith(sys.argv[1]) else f"python3 takes phalanx.core from {core.__file__}")' "$BUILD/site/"
}
phalanx() { python3 -c 'from phalanx.core import _cli; raise SystemExit(_cli.main())' "$@"; }
export -f configure build kernels backend bench install_packages phalanx

core_part() {
  step build 400 build || return
  core memory 60 "$BUILD/tests/test_cuda_memory"
  core fabric 60 "$BUILD/tests/test_cuda_fabric"
  core launch 120 "$BUILD/tests/test_cuda_launch"
  for name in group workspace messages random multicast tuning; do core "$name" 60 "$BUILD/tests/test_cuda_$name"; done
  core bench 240 bench
  if command -v cuobjdump >/dev/null; then
    core registers 60 cuobjdump --dump-resource-usage "$BUILD/collectives.fatbin"
  else
    skip registers "there is no cuobjdump"
  fi
  # Of one rank: where a tool makes every launch wait for the one before, kernels that wait for each other would not end.
  if command -v compute-sanitizer >/dev/null; then
    for tool in memcheck racecheck; do
      core "$tool" 120 compute-sanitizer --tool "$tool" --error-exitcode 9 "$BUILD/tests/test_cuda_launch" one_rank_alone
    done
  else
    skip sanitizer "there is no compute-sanitizer"
  fi
}
torch_part() {
  python3 -c 'import torch; assert torch.cuda.is_available()' 2>>"$OUT/gpu.log" ||
    { skip torch "no torch with CUDA for python3: gpu.log"; return; }
  torch torch-sums 120 python3 benchmarks/gpu_torch.py sums
  TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 torch torch-symmetric 120 python3 benchmarks/gpu_torch.py symmetric
  python3 -c 'import cffi, scikit_build_core, pytest, pytest_timeout' 2>>"$OUT/gpu.log" ||
    { skip packages "python3 has not got what they are built and tested with: gpu.log"; return; }
  step kernels 300 kernels && step install 300 install_packages || return
  export PYTHONPATH=$BUILD/site${PYTHONPATH:+:$PYTHONPATH}
  local pytest=(python3 -m pytest -q -p no:cacheprovider -m "slow or not slow") # here, all of them
  torch tune 120 phalanx tune --device cuda --seconds 30 --output "$OUT/gpu-tuning.txt"
  torch tuned 60 phalanx tune --device cuda --show --output "$OUT/gpu-tuning.txt"
  torch own-kernel 60 python3 examples/own_kernel_cuda.py
  torch torch-ops 180 "${pytest[@]}" core/tests/python/test_core_gpu.py core/tests/python/test_core_tuning_gpu.py tools/tests/test_tune_gpu.py \
    core/tests/python/test_torch_shim_cuda*.py
  export PHALANX_NATIVE=$BUILD/native
  # Before tests that would compile it in a rank, whose time is short.
  if any torch collectives dtensor inductor; then step backend 280 backend; fi
  torch collectives 400 "${pytest[@]}" packages/collectives/tests/test_cuda_*.py
  torch symm-mem 400 "${pytest[@]}" packages/symm_mem/tests/test_cuda_*.py
  torch dtensor 180 "${pytest[@]}" packages/dtensor/tests/test_cuda_dtensor.py
  torch inductor 240 "${pytest[@]}" packages/inductor_plugin/tests/test_inductor_cuda_*.py
}

any() { # any PART NAME…: whether a step of that part is to run
  local part=$1 name
  shift
  for name; do wanted "$part" "$name" && return; done
  return 1
}
if any core build memory fabric launch group workspace messages random multicast tuning bench registers memcheck racecheck; then core_part; fi
if any torch torch-sums torch-symmetric install tune tuned own-kernel torch-ops collectives symm-mem dtensor inductor; then
  torch_part
fi
[ ${#SUMMARY[@]} -gt 0 ] || { echo "'${*:2}' names no part and no step"; exit 2; }
echo
printf '%s\n' "${SUMMARY[@]}"
exit $FAILED
