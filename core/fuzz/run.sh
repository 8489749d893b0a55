#!/usr/bin/env bash
# Builds and runs the fuzz targets: core/fuzz/run.sh [SECONDS] [TARGET…]
#
#   SECONDS  for each target, 60 if not given
#   TARGET   store_file for fuzz_store_file.cpp; all if none is given
#
# Two variables name folders that are kept; without them there are new ones, which are removed (but for findings):
#   PHX_FUZZ_BUILD  the build
#   PHX_FUZZ_OUT    for each target its log, its findings (crash-…), and what it added to its corpus
# To see a finding again: PHX_FUZZ_BUILD/fuzz/fuzz_TARGET crash-…
#
# At the end there is one line for each target. Exit status: 0; 1 after a finding; 77 where clang or libFuzzer is missing.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
seconds=${1:-60}
targets=("${@:2}")
if [ ${#targets[@]} -eq 0 ]; then
  for source in "$here"/fuzz_*.cpp; do
    name=$(basename "$source" .cpp)
    targets+=("${name#fuzz_}")
  done
fi

command -v clang++ >/dev/null || { echo "no clang++ (Debian: clang)"; exit 77; }
[ -e "$(clang -print-resource-dir)/lib/linux/libclang_rt.fuzzer-$(uname -m).a" ] ||
  { echo "clang has no libFuzzer (Debian: libclang-rt-14-dev)"; exit 77; }

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
build=${PHX_FUZZ_BUILD:-$scratch/build}
out=${PHX_FUZZ_OUT:-$scratch/out}
mkdir -p "$out" "$scratch/tmp"
export TMPDIR=$scratch/tmp # a target that ends with a finding leaves its files

# -O1: traces can still be read. No target hands input to the vector kernels, which take half of the time of such a build.
cmake -S "$here/.." -B "$build" -DPHX_FUZZ=ON -DPHX_VECTOR_KERNELS=OFF -DPHX_BUILD_TORCH=OFF -DCMAKE_BUILD_TYPE=None \
  -DCMAKE_CXX_FLAGS="-O1 -g1" -DCMAKE_C_COMPILER=clang -DCMAKE_CXX_COMPILER=clang++ >"$scratch/cmake.log" ||
  { cat "$scratch/cmake.log"; exit 1; }
cmake --build "$build" -j "$(nproc)" --target "${targets[@]/#/fuzz_}"

# The sanitizers of older compilers cannot cope with many random bits in addresses.
no_aslr=()
if setarch -R true 2>/dev/null; then no_aslr=(setarch -R); fi
export UBSAN_OPTIONS=print_stacktrace=1
statistic() { sed -n "s/^stat::$1: *//p" "$2" | tail -1; }
edges() { sed -n 's/.* cov: \([0-9]*\) .*/\1/p' "$1" | tail -1; }

summary=()
failed=0
for target in "${targets[@]}"; do
  place=$out/$target
  log=$place/log
  mkdir -p "$place/corpus"
  corpora=("$place/corpus")
  [ ! -d "$here/corpus/$target" ] || corpora+=("$here/corpus/$target")
  dictionary=()
  [ ! -e "$here/$target.dict" ] || dictionary=(-dict="$here/$target.dict")
  echo "== $target"
  status=0
  "${no_aslr[@]}" "$build/fuzz/fuzz_$target" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 -len_control=20 \
    -print_final_stats=1 -artifact_prefix="$place/" "${dictionary[@]}" "${corpora[@]}" >"$log" 2>&1 || status=$?
  findings=$(find "$place" -maxdepth 1 -type f ! -name log | wc -l)
  line="fuzz_$target: $(statistic number_of_executed_units "$log") executions, $(edges "$log") edges, $findings findings"
  [ "$status" -eq 0 ] || line+=", exit status $status"
  summary+=("$line")
  [ "$status" -eq 0 ] && [ "$findings" -eq 0 ] && continue
  failed=1
  tail -n 60 "$log"
  if [ -z "${PHX_FUZZ_OUT:-}" ]; then
    kept=$(TMPDIR=$(dirname "$scratch") mktemp -d)
    cp -r "$place" "$kept"
    echo "kept in $kept"
  fi
done
printf '%s\n' "${summary[@]}"
exit "$failed"
