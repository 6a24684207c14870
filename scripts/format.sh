#!/usr/bin/env bash
# clang-format over our C++ sources.
#   scripts/format.sh          rewrites them
#   scripts/format.sh check    only reports what differs
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

cd "$ROOT"
need clang-format "$(install_hint clang-format)"
directories=()
for directory in src tests bench; do [[ -d "$directory" ]] && directories+=("$directory"); done
list() { find "${directories[@]}" -type f \( -name '*.cc' -o -name '*.h' \) -print0; }
if [[ "${1:-}" == check ]]; then
  list | xargs -0 clang-format --dry-run -Werror
else
  list | xargs -0 clang-format -i
fi
