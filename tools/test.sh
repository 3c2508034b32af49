#!/usr/bin/env bash
# Installs what is needed, builds everything and runs the tests. Arguments go to ctest (for example -R forward).
# Tests labelled "cluster" start a Slurm, network namespaces or broken jobs and watch the clock; they run with
# DSV41_ALL_TESTS=1. A test that fails is run once more, for the sake of busy machines; the log shows both.
source "$(dirname "$0")/setup.sh"
install_packages
build
selection=(-LE cluster)
[[ ${DSV41_ALL_TESTS:-0} == 1 ]] && selection=()
ctest --preset release --parallel "$(nproc)" --repeat until-pass:2 "${selection[@]}" "$@"
