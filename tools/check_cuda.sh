#!/usr/bin/env bash
# Compiles the CUDA kernels for every architecture of kernels/cuda/CMakeLists.txt and reports registers, shared memory and
# spills of each; fails on spills or stack frames. Needs nvcc, not a GPU; without nvcc it says so and succeeds.
# usage: tools/check_cuda.sh [ARCHITECTURE…]     for example: tools/check_cuda.sh 80 90
set -euo pipefail
cd "$(dirname "$0")/.."

if ! command -v nvcc > /dev/null; then
  echo "check_cuda: no nvcc on this machine, nothing to check"
  exit 0
fi
architectures=("$@")
if [ ${#architectures[@]} -eq 0 ]; then architectures=(75 80 86 89 90 100 120); fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

nvcc --version | sed -n 's/.*release/nvcc/p'
printf '%-6s %-26s %9s %12s %7s %7s\n' arch kernel registers 'static smem' stack spills
failed=0
compile() {
  nice -n 10 nvcc -std=c++20 -O3 -fmad=false -ftz=false -prec-div=true --expt-relaxed-constexpr -diag-suppress=1046 \
    -I. -arch="sm_$1" -Xptxas -v -Xcompiler -ffp-contract=off -c kernels/cuda/cuda_device.cu -o "$work/$1.o" 2> "$work/$1.log"
}
export -f compile
export work
printf '%s\n' "${architectures[@]}" | xargs -P "$(nproc)" -I{} bash -c 'compile {} || touch "$work/{}.failed"'
for architecture in "${architectures[@]}"; do
  log=$work/$architecture.log
  [[ ! -e $work/$architecture.failed ]] || { cat "$log" >&2; exit 1; }
  # ptxas -v: a line that names the entry, one with stack and spills, one with registers. Entries without a barrier are
  # the empty bodies of variants that this architecture never runs.
  awk -v arch="sm_$architecture" '
    /Compiling entry function/ { split($0, part, "\047"); name = part[2] }
    /bytes stack frame/ { stack = $1; stores = $5; loads = $9 }
    /Used [0-9]+ registers/ {
      match($0, /Used [0-9]+/); registers = substr($0, RSTART + 5, RLENGTH - 5)
      shared = match($0, /[0-9]+ bytes smem/) ? substr($0, RSTART, RLENGTH - 11) : 0
      if ($0 ~ /used [1-9][0-9]* barriers/) {
        kind = name ~ /experts_kernel/ ? "experts" : "linear"
        match(name, /ILj[0-9]+ELj[0-9]+E/); split(substr(name, RSTART + 3, RLENGTH - 4), value, "ELj")
        printf "%-6s %-26s %9d %12d %7d %7d\n", arch, kind " rows " value[1] " stages " value[2], registers, shared, stack, stores + loads
        if (stack + stores + loads > 0) bad = 1
        kernels++
      }
    }
    END { if (kernels == 0) { print "no kernels in the compiler output"; exit 2 } exit bad }' "$log" || failed=1
done
if [ $failed -ne 0 ]; then
  echo "check_cuda: a kernel spills or uses the stack" >&2
  exit 1
fi
echo "check_cuda: no spills, no stack frames"
