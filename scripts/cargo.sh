#!/usr/bin/env bash
# Runs cargo, the same one that the build uses.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
rust_ok || die "cargo >= $RUST_MIN is not installed; run: make setup"
cd "$ROOT"
exec cargo "$@"
