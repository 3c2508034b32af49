# Sourced by demo.sh and test.sh: installs the Debian packages that are missing and builds a preset.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Containers often run as root, where Open MPI wants to be told that this is meant.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1

install_packages() {
  local missing=() package as_root=()
  while read -r package; do
    [[ -z $package || $package == \#* ]] && continue
    [[ $(dpkg-query -W -f '${Status}' "$package" 2>/dev/null) == "install ok installed" ]] || missing+=("$package")
  done <tools/packages.txt
  ((${#missing[@]})) || return 0
  if ((EUID != 0)); then
    command -v sudo >/dev/null || { echo "missing packages (${missing[*]}), and neither root nor sudo to install them" >&2; exit 4; }
    as_root=(sudo)
  fi
  echo "installing: ${missing[*]}" >&2
  "${as_root[@]}" apt-get update -q >&2
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "${missing[@]}" >&2
}

preset=release

build() {
  cmake --preset "$preset" >&2
  cmake --build --preset "$preset" "$@" >&2
}
