#!/usr/bin/env bash
# Makes a fresh machine ready to build galley: system packages, a Rust toolchain, the Python environment with MLX.
# Every part is checked first, so a second run does nothing and takes no time worth naming.
#   scripts/setup.sh        what the build needs
#   scripts/setup.sh test   also what the tests and benchmarks need
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

list() { grep -vE '^\s*(#|$)' "$ROOT/scripts/packages-$1.txt"; }

as_root() {
  if [[ "$(id -u)" == 0 ]]; then
    "$@"
  elif command -v sudo >/dev/null; then
    sudo "$@"
  else
    die "this needs root; as root, run: $*"
  fi
}

# apt_install PACKAGE...: installs, by name, those that are not there yet.
apt_install() {
  local missing=() package
  for package in "$@"; do
    [[ "$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null)" == installed ]] || missing+=("$package")
  done
  [[ ${#missing[@]} -gt 0 ]] || return 0
  say "installing Debian packages: ${missing[*]}"
  as_root apt-get update -q
  as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "${missing[@]}"
}

system_packages() {
  local packages
  if is_mac; then
    xcode-select -p >/dev/null 2>&1 || die "Apple's command line tools are missing; install them with: xcode-select --install"
    need brew 'the command on the front page of Homebrew (brew.sh)'
    mapfile_compat packages < <(list homebrew)
    local missing=() formula
    for formula in "${packages[@]}"; do
      brew list --formula --versions "$formula" >/dev/null 2>&1 || missing+=("$formula")
    done
    if [[ ${#missing[@]} -gt 0 ]]; then
      say "installing with Homebrew: ${missing[*]}"
      brew install "${missing[@]}"
    fi
  elif command -v dpkg-query >/dev/null; then
    mapfile_compat packages < <(list debian)
    apt_install "${packages[@]}"
  else
    say "neither Debian nor a Mac: going on with what is installed. galley needs (Debian names): $(list debian | xargs)"
  fi
}

# A Mac's bash is 3.2, without mapfile.
mapfile_compat() {
  local line
  eval "$1=()"
  while IFS= read -r line; do eval "$1+=(\"\$line\")"; done
}

rust() {
  rust_ok && return 0
  if command -v apt-get >/dev/null; then
    say "no cargo >= $RUST_MIN on the path: taking Debian's"
    apt_install rustc-web cargo-web
    rust_ok && return 0
  fi
  die "cargo >= $RUST_MIN is not installed; install it with: $(install_hint 'rustc-web cargo-web' rust)"
}

# python_environment NAME REQUIREMENTS...: brings .venv to the pinned packages when they changed.
python_environment() {
  local name="$1" key file
  shift
  key="$(cat "$@" | cksum) $(readlink -f "$VENV" 2>/dev/null || true)"
  if stamped "$name" "$key" && [[ -x "$VENV/bin/python" ]]; then return 0; fi
  need python3 "$(install_hint python3 python@3.12)"
  if [[ ! -x "$VENV/bin/python" ]]; then
    python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))' || die "python3 is older than 3.10, which MLX needs"
    say "creating the Python environment .venv"
    python3 -m venv "$VENV" || die "python3 cannot make environments; install: $(install_hint python3-venv python@3.12)"
  fi
  say "installing pinned Python packages: $*"
  local arguments=()
  for file in "$@"; do arguments+=(-r "$file"); done
  "$VENV/bin/python" -m pip install -q --disable-pip-version-check "${arguments[@]}"
  mark "$name" "$(cat "$@" | cksum) $(readlink -f "$VENV")"
}

cd "$ROOT"
system_packages
rust
python_environment venv requirements.txt
if [[ "${1:-}" == test ]]; then
  python_environment venv-test requirements.txt requirements-test.txt
fi
