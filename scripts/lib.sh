# Shared by the scripts in this folder; sourced, never run.
# shellcheck shell=bash
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
CACHE="$ROOT/.cache"
STAMPS="$CACHE/stamps"
VENV="$ROOT/.venv"
export ROOT CACHE STAMPS VENV

say() { printf '\033[1m==>\033[0m %s\n' "$*"; }
die() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

is_mac() { [[ "$(uname -s)" == Darwin ]]; }

# sha256_of FILE: the hexadecimal digest.
sha256_of() {
  if command -v sha256sum >/dev/null; then sha256sum "$1" | cut -d' ' -f1; else shasum -a 256 "$1" | cut -d' ' -f1; fi
}

# need TOOL COMMAND: stops with the command that installs a missing tool.
need() {
  command -v "$1" >/dev/null || die "'$1' is not installed; install it with: $2"
}

# install_hint DEBIAN_PACKAGE [HOMEBREW_FORMULA]: the command that installs a package on this machine.
install_hint() {
  if is_mac; then
    echo "brew install ${2:-$1}"
  elif [[ "$(id -u)" == 0 ]]; then
    echo "apt-get install $1"
  else
    echo "sudo apt-get install $1"
  fi
}

# stamped NAME CONTENT: true when stamp NAME already holds CONTENT. mark NAME CONTENT writes it.
stamped() { [[ -f "$STAMPS/$1" && "$(cat "$STAMPS/$1")" == "$2" ]]; }
mark() {
  mkdir -p "$STAMPS"
  printf '%s\n' "$2" >"$STAMPS/$1"
}

RUST_MIN=1.88

# rust_ok: true when a cargo of at least that version is to be had; puts it first on the PATH.
rust_ok() {
  local directory version
  for directory in "$(dirname "$(command -v cargo || echo /usr/bin/cargo)")" "${HOME:-/root}/.cargo/bin" /usr/bin; do
    [[ -x "$directory/cargo" ]] || continue
    version="$("$directory/cargo" --version 2>/dev/null | cut -d' ' -f2)"
    if [[ -n "$version" && "$(printf '%s\n%s\n' "$RUST_MIN" "$version" | sort -V | head -n 1)" == "$RUST_MIN" ]]; then
      export PATH="$directory:$PATH"
      return 0
    fi
  done
  return 1
}
