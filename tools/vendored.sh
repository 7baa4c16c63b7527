#!/bin/sh
# sh tools/vendored.sh MATURIN: write dist/loopq-VERSION-vendored.tar.gz, the sdist with the source of every crate, and
# show that it is complete: without network its core passes its tests and its wheel is built.
set -eu
maturin=$(realpath "$1")
cd "$(dirname "$0")/.."
work=$PWD/target/vendored
rm -rf "$work" && mkdir -p "$work" dist
"$maturin" sdist --out "$work"
tar -xzf "$work"/loopq-*.tar.gz -C "$work"
tree=$(echo "$work"/loopq-*/)
# maturin leaves tests and benches out of the manifests of crates that others depend on; their files are there.
for crate in loopq-core loopq-cpu; do cp "rust/$crate/Cargo.toml" "$tree/rust/$crate/Cargo.toml"; done
mkdir "$tree/.cargo"
(cd "$tree" && cargo vendor --locked --versioned-dirs vendor > .cargo/config.toml)
tar -czf "dist/$(basename "$tree")-vendored.tar.gz" -C "$work" "$(basename "$tree")"

export CARGO_NET_OFFLINE=true CARGO_HOME="$work/home" CARGO_TARGET_DIR="$work/build"
cd "$tree"
cargo test --frozen --release --package loopq-core --package loopq-cpu
"$maturin" build --frozen --release --compatibility linux --out "$work"
ls -l "$work"/*.whl
