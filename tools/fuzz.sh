#!/usr/bin/env bash
# Fuzzes every parser of untrusted input for a while each: tools/fuzz.sh [SECONDS] [TARGET …]; default 20 seconds, all.
# Needs clang with libFuzzer (packages clang, libclang-rt-14-dev); says so and succeeds where that is missing.
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=${1:-20}
shift || true
targets=("$@")
((${#targets[@]})) || targets=(safetensors_header weight_index config tokenizer manifest placement request messages)

probe=$(mktemp -d)
trap 'rm -rf "$probe"' EXIT
echo 'extern "C" int LLVMFuzzerTestOneInput(const unsigned char*, unsigned long) { return 0; }' >"$probe/probe.cc"
if ! clang++ -fsanitize=fuzzer,address "$probe/probe.cc" -o "$probe/probe" 2>"$probe/log"; then
  echo "SKIPPED: fuzzing needs clang++ with libFuzzer (apt-get install clang libclang-rt-14-dev)" >&2
  exit 0
fi

# The corpora grow in the build folder, the seeds stay as they are.
cmake -S . -B build/fuzz -G Ninja -DCMAKE_BUILD_TYPE=Sanitize -DCMAKE_CXX_COMPILER=clang++ \
  -DDSV41_FUZZ=ON >/dev/null
cmake --build build/fuzz --target "${targets[@]/%/_fuzz}"

fuzz_one() {
  local target=$1
  mkdir -p "build/fuzz/corpus/$target"
  "build/fuzz/bin/${target}_fuzz" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 -max_len=65536 \
    -print_final_stats=1 -artifact_prefix="build/fuzz/${target}-" \
    "build/fuzz/corpus/$target" "tests/fuzz/corpus/$target" >"build/fuzz/$target.log" 2>&1
}

# As many at once as there are cores.
failed=()
processors=$(nproc)
for ((first = 0; first < ${#targets[@]}; first += processors)); do
  batch=("${targets[@]:first:processors}")
  pids=()
  for target in "${batch[@]}"; do
    fuzz_one "$target" &
    pids+=($!)
  done
  for i in "${!batch[@]}"; do
    wait "${pids[i]}" || failed+=("${batch[i]}")
    echo "== ${batch[i]}, $seconds s: $(grep -E "^Done" "build/fuzz/${batch[i]}.log" || echo FAILED)"
  done
done
for target in "${failed[@]}"; do
  echo "== $target failed; the input is build/fuzz/$target-*"
  tail -n 100 "build/fuzz/$target.log"
done
((${#failed[@]} == 0))
