#!/bin/sh
# Whether the public headers compile without a warning: by gcc and clang, as C99, C11, C++17 and C++20, and phalanx.hpp
# with exceptions, with results and without exceptions. check_headers.sh INCLUDE TESTS
set -u
include=$1 tests=$2 status=0 compilers=0
warnings="-Wall -Wextra -Wpedantic -Wconversion -Wshadow -Werror -fsyntax-only -pthread"
check() { # check COMPILER ARGUMENT…, the source on the standard input
  if ! "$@" $warnings -I "$include" -I "$tests" -; then
    echo "this failed: $*"
    return 1
  fi
}
for pair in gcc:g++ clang:clang++; do
  c=${pair%:*} cxx=${pair#*:}
  command -v "$c" >/dev/null && command -v "$cxx" >/dev/null || continue
  compilers=$((compilers + 1))
  for name in phalanx cuda tuning random carrier device; do
    for standard in c99 c11; do
      [ "$name $standard" = "device c99" ] && continue
      echo "#include <phalanx/$name.h>" | check "$c" -x c -std=$standard || status=1
    done
    for standard in c++17 c++20; do echo "#include <phalanx/$name.h>" | check "$cxx" -x c++ -std=$standard || status=1; done
  done
  for standard in c++17 c++20; do
    for mode in -DPHALANX_EXCEPTIONS -DPHALANX_RESULTS -fno-exceptions; do
      echo "#include <phalanx/phalanx.hpp>" | check "$cxx" -x c++ -std=$standard $mode || status=1
    done
    # The templates are compiled where they are used: in all tests, as one source.
    number=0
    for source in "$tests"/test_hpp_*.cpp; do
      case $source in *_results.cpp) continue ;; esac
      number=$((number + 1))
      printf '#define main main_%s\n#include "%s"\n#undef main\n' $number "$source"
    done | check "$cxx" -x c++ -std=$standard || status=1
  done
done
[ "$compilers" -gt 0 ] || exit 77
echo "$compilers compilers, no warning"
exit $status
