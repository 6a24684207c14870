#!/usr/bin/env bash
# Static checks: clang-format on everything, clang-tidy (checks in .clang-tidy) on src.
#   scripts/lint.sh [FILE...]    clang-tidy on these files only
# A file that passed is not checked again until it, a header or the checks change.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

cd "$ROOT"
need clang-tidy "$(install_hint clang-tidy llvm)"
"$ROOT/scripts/format.sh" check
[[ -f build/compile_commands.json ]] || die "the build is not configured; run: make build"

headers="$(find src -name '*.h' -type f -print0 | sort -z | xargs -0 cat .clang-tidy | cksum)"
passed="$CACHE/lint"
mkdir -p "$passed"
files=("$@")
if [[ ${#files[@]} -eq 0 ]]; then
  while IFS= read -r file; do files+=("$file"); done < <(find src -name '*.cc' -type f | sort)
fi

# Only files that the build compiles have the flags that clang-tidy needs.
check() {
  local file="$1" stamp key
  grep -qF "/$file\"" build/compile_commands.json || return 0
  stamp="$passed/$(echo "$file" | tr / _)"
  key="$headers $(cksum <"$file")"
  if [[ -f "$stamp" && "$(cat "$stamp")" == "$key" ]]; then return 0; fi
  echo "clang-tidy $file"
  if clang-tidy --quiet -p build "$file" 2> >(grep -vE '^[0-9]+ warnings? (generated|and)|^Suppressed|^Use -header' >&2); then
    echo "$key" >"$stamp"
  else
    return 1
  fi
}
export -f check
export headers passed
printf '%s\0' "${files[@]}" | xargs -0 -n 1 -P "${JOBS:-2}" bash -c 'check "$0"' || die "clang-tidy found something"
say "lint: nothing to report"
