#!/usr/bin/env bash
# Checks one model with spin, exhaustively:  check.sh MODEL.pml holds|fails [-DNAME ...]
# holds: no assertion fails and nobody is left behind. fails: the variant of the definitions is wrong, and spin finds it.
# Exit status 77 without spin or a C compiler.
set -euo pipefail
model=$(realpath "$1") wanted=$2
shift 2
command -v spin >/dev/null && command -v cc >/dev/null || { echo "needs spin and cc (Debian: spin)"; exit 77; }
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
cd "$directory"
spin "$@" -a "$model"
cc -O2 -DSAFETY -DMEMLIM=2048 -o pan pan.c
./pan -m1000000 | tee result
grep -q "errors: 0" result && found=holds || found=fails
grep -q "max search depth too small\|out of memory\|reached -DMEMLIM" result && { echo "not exhaustive"; exit 1; }
[ "$found" = "$wanted" ] || { echo "$(basename "$model") $*: $found, but it should be: $wanted"; exit 1; }
