#!/bin/sh
# sh tools/aarch64.sh: build the tests of the core for aarch64, and run them under qemu (user mode).
# sh tools/aarch64.sh WHEEL [PYTEST ARGUMENTS]: put an aarch64 wheel beside an arm64 Python of Debian, without changing the
# system, and run tests/native there.
# Needs Debian or a relative of it (apt-get, dpkg-deb), rustup or pip; no root. All of it goes into .cache/aarch64.
set -eu
cd "$(dirname "$0")/.."
root=$PWD/.cache/aarch64
qemu=$root/usr/bin/qemu-aarch64-static
if ! [ -e "$qemu" ]; then
    mkdir -p "$root/debs"
    (cd "$root/debs" && apt-get -qq download qemu-user-static)
    dpkg-deb -x "$root"/debs/qemu-user-static*.deb "$root"
fi
if [ $# = 0 ]; then
    # Static, and linked by Rust's own linker: neither a C compiler nor a system of that kind is asked for.
    rustup target add aarch64-unknown-linux-musl
    export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_MUSL_LINKER=rust-lld
    export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_MUSL_RUNNER=$qemu
    exec cargo test --release -p loopq-core -p loopq-cpu --tests --target aarch64-unknown-linux-musl
fi
wheel=$1
shift
apt="apt-get -qq -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o Dir::State=$root/apt -o Dir::Cache=$root/apt
    -o Dir::State::status=$root/apt/status"
if ! [ -e "$root/ready" ]; then
    rm -rf "$root/apt" && mkdir -p "$root/apt/lists/partial" "$root/apt/archives/partial"
    touch "$root/apt/status"
    $apt update
    # An empty status file: apt resolves everything that Python needs, down to libc.
    $apt install --download-only -y --no-install-recommends python3 libstdc++6
    for deb in "$root"/apt/archives/*.deb; do dpkg-deb -x "$deb" "$root"; done
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
PYTHONPATH=$root/site QEMU_LD_PREFIX=$root "$qemu" "$root"/usr/bin/python3.?* \
    -m pytest -q -p no:cacheprovider tests/native "$@"
