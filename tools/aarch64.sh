#!/bin/sh
# sh tools/aarch64.sh WHEEL [PYTEST ARGUMENTS]: install an aarch64 wheel beside an arm64 Python of Debian in
# .cache/aarch64, without changing the system, and run tests/native there under qemu (user mode).
# Needs Debian or a relative of it (apt-get, dpkg-deb) and pip; no root.
set -eu
wheel=$1
shift
cd "$(dirname "$0")/.."
root=$PWD/.cache/aarch64
apt="apt-get -qq -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o Dir::State=$root/apt -o Dir::Cache=$root/apt
    -o Dir::State::status=$root/apt/status"
if ! [ -e "$root/ready" ]; then
    rm -rf "$root" && mkdir -p "$root/apt/lists/partial" "$root/apt/archives/partial" "$root/debs"
    touch "$root/apt/status"
    $apt update
    # An empty status file: apt resolves everything that Python needs, down to libc.
    $apt install --download-only -y --no-install-recommends python3 libstdc++6
    (cd "$root/debs" && apt-get -qq download qemu-user-static)
    for deb in "$root"/apt/archives/*.deb "$root"/debs/*.deb; do dpkg-deb -x "$deb" "$root"; done
    version=$(basename "$root"/usr/bin/python3.?*)
    python3 -m pip download -q --dest "$root/wheels" --only-binary=:all: --python-version "${version#python}" \
        --platform manylinux_2_28_aarch64 --platform manylinux2014_aarch64 \
        "numpy>=1.26" "safetensors>=0.4.5" pytest pytest-timeout hypothesis
    touch "$root/ready"
fi
rm -rf "$root/site"
python3 -m pip install -q --target "$root/site" --no-deps --only-binary=:all: --no-index \
    --platform manylinux_2_28_aarch64 --platform manylinux2014_aarch64 --platform any \
    --python-version "$(basename "$root"/usr/bin/python3.?* | sed 's/python//')" "$root"/wheels/*.whl "$wheel"
PYTHONPATH=$root/site QEMU_LD_PREFIX=$root "$root"/usr/bin/qemu-aarch64-static "$root"/usr/bin/python3.?* \
    -m pytest -q -p no:cacheprovider tests/native "$@"
