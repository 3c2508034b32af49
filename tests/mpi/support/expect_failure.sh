#!/bin/sh
# expect_failure.sh CODE PATTERN COMMAND...: the command must end with CODE within 20 s, dump no core, and say PATTERN
# (extended regular expression) on exactly one line of its own, "dsv41-mpi: ...".
# mpirun 4.1.4 itself now and then hangs or crashes while it ends a job whose rank stands still, after all ranks have
# done their part; then, and only if the line was said, the job runs again, up to three times.
code=$1
pattern=$2
shift 2
output=$(mktemp)
trap 'rm -f "$output"' EXIT
for attempt in 1 2 3; do
  timeout -k 1 20 "$@" >"$output" 2>&1
  actual=$?
  cat "$output"
  case $actual in 124 | 134 | 137 | 139) ;; *) break ;; esac
  grep -Eq "^dsv41-mpi: .*$pattern" "$output" || break
  echo "the launcher itself ended with $actual (attempt $attempt)"
done
[ "$actual" = "$code" ] || { echo "exit code $actual instead of $code"; exit 1; }
grep -Eq "^dsv41-mpi: .*$pattern" "$output" || { echo "nowhere: $pattern"; exit 1; }
[ "$(grep -c '^dsv41-mpi: ' "$output")" = 1 ] || { echo "more than one line of its own"; exit 1; }
! grep -Eqi "core dumped|segmentation|signal (6|11)" "$output" || { echo "a crash"; exit 1; }
