#!/usr/bin/env bash
# Installs what is needed, builds, and answers a prompt with the bundled small checkpoint on one host rank and four
# expert ranks.
source "$(dirname "$0")/setup.sh"
install_packages
build --target dsv41-mpi
mpirun -np 5 --oversubscribe build/release/bin/dsv41-mpi --prompt "${1:-The capital of France is}"
