#!/usr/bin/env bash
# Installs what is needed, builds everything and runs all tests. Arguments go to ctest (for example -R forward).
source "$(dirname "$0")/setup.sh"
install_packages
build
ctest --preset release --parallel "$(nproc)" "$@"
