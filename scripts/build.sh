#!/usr/bin/env bash
# Configures (once) and builds a CMake preset.
#   scripts/build.sh PRESET [TARGET...]     PRESET: release, debug, asan, tsan
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

preset="${1:?usage: scripts/build.sh PRESET [TARGET...]}"
shift
case "$preset" in
  release) directory=build ;;
  *) directory="build-$preset" ;;
esac

cd "$ROOT"
need cmake "$(install_hint cmake)"
need ninja "$(install_hint ninja-build ninja)"
rust_ok || die "cargo >= $RUST_MIN is not installed; run: make setup"

# Lets ccache share objects between clones: paths below the root count as relative.
export CCACHE_BASEDIR="$ROOT" CCACHE_NOHASHDIR=1

# CMake looks at its own inputs; a changed preset, Python environment or Rust toolchain is for us to notice.
key="$(cksum <CMakePresets.json) $(command -v cargo) $(readlink -f "$VENV" 2>/dev/null || true)"
if [[ ! -f "$directory/build.ninja" ]] || ! stamped "configure-$preset" "$key"; then
  cmake --preset "$preset"
  mark "configure-$preset" "$key"
fi
arguments=()
if [[ $# -gt 0 ]]; then arguments=(--target "$@"); fi
cmake --build "$directory" "${arguments[@]+"${arguments[@]}"}" ${JOBS:+-j "$JOBS"}
