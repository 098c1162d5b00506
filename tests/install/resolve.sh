#!/usr/bin/env bash
# Do the pinned requirements resolve, with every extra, for each Python that pyproject.toml names, on a machine that has
# only the package index? No wheels on a disk, no settings of pip or uv; only wheels count, as nobody has a compiler for
# all of them. Run from the repository's root: tests/install/resolve.sh [UV].
set -euo pipefail
uv=${1:-uv}
pythons=$(sed -n 's/.*"Programming Language :: Python :: \(3\.[0-9]*\)".*/\1/p' pyproject.toml)
[ -n "$pythons" ] || { echo "pyproject.toml names no Python"; exit 1; }
failed=0
for python in $pythons; do
  for platform in x86_64-manylinux_2_31 aarch64-manylinux_2_34; do
    if said=$(env -u UV_FIND_LINKS -u UV_INDEX_URL "$uv" pip compile --quiet --no-config --only-binary :all: --no-header \
        --python-version "$python" --python-platform "$platform" --all-extras -c constraints.txt pyproject.toml 2>&1 >/dev/null)
    then echo "Python $python on $platform: resolves"
    else echo "Python $python on $platform: does NOT resolve"; printf '%s\n' "$said" | tail -n 12; failed=1
    fi
  done
done
exit "$failed"
