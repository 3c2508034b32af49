#!/usr/bin/env bash
# Installs what is needed, builds everything and runs the tests. Arguments go to ctest (for example -R forward).
# Tests labelled "cluster" start a Slurm, network namespaces or broken jobs, each with the machine to itself; the one-hour
# run labelled "soak" has to be asked for (ctest --preset release -L soak). A test that fails is run once more, for the
# sake of busy machines; the log shows both.
source "$(dirname "$0")/setup.sh"
install_packages
build
ctest --preset release --parallel "$(nproc)" --repeat until-pass:2 -LE soak "$@"
