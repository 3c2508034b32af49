#!/usr/bin/env bash
# Installs what is needed, builds everything, runs the tests and fuzzes each parser for a moment. Arguments go to ctest
# (for example -R forward), and then nothing is fuzzed.
#   DSV41_SANITIZE=asan     the tests with the address and undefined-behaviour sanitizers,
#                           but for those that watch the clock;
#   DSV41_SANITIZE=tsan     what uses threads within one process with the thread sanitizer
#   DSV41_FUZZ_SECONDS=N    for each parser (10); 0: none
# Tests labelled "cluster" start a Slurm, network namespaces or broken jobs, each with the machine to itself; the one-hour
# run labelled "soak" and the build with CUDA labelled "long" have to be asked for (ctest --preset release -L 'soak|long').
# A test that fails is run once more, for the sake of busy machines; the log shows both.
source "$(dirname "$0")/setup.sh"
preset=${DSV41_SANITIZE:-release}
case $preset in
  release) selection=(-LE 'soak|long' --repeat until-pass:2) ;;
  # What a sanitizer finds must not pass at a second try.
  asan) selection=(-LE 'soak|long|cluster') ;;
  tsan) selection=(-LE 'soak|long|cluster' -R '^(loader|profile|runtime)\.|^kernels\.Threads') ;;
  *) echo "DSV41_SANITIZE is asan or tsan, not '$preset'" >&2; exit 2 ;;
esac
install_packages
build
ctest --preset "$preset" --parallel "$(nproc)" "${selection[@]}" "$@"
if (($# == 0)) && [[ $preset == release && ${DSV41_FUZZ_SECONDS:-10} != 0 ]]; then
  tools/fuzz.sh "${DSV41_FUZZ_SECONDS:-10}"
fi
