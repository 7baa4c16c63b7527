#!/bin/sh
# sh tools/toolchain.sh PYTHON: check the tools of a build before anything long begins. It prints one line for each tool
# that is missing or too old, with the package to install, and exits with code 1. It prints nothing if all are present.
python=$1
here=$(dirname "$0")/..
wanted_python=$(sed -n 's/^requires-python = ">=\([0-9.]*\)"$/\1/p' "$here/pyproject.toml")
wanted_rust=$(sed -n 's/^rust-version = "\([0-9.]*\)"$/\1/p' "$here/Cargo.toml")
complete=0

# older GOT WANTED: compare versions number by number.
older() {
    awk -v got="$1" -v wanted="$2" 'BEGIN {
        n = split(wanted, w, "."); split(got, g, ".")
        for (i = 1; i <= n; i++) if (g[i] + 0 != w[i] + 0) exit !(g[i] + 0 < w[i] + 0)
        exit 1
    }'
}

lacks() {
    echo "loopq: $1" >&2
    complete=1
}

# version COMMAND: the second word of what `COMMAND --version` prints, empty where it cannot be run.
version() { "$1" --version 2>/dev/null | awk 'NR == 1 { print $2 }'; }

got=$(version "$python")
if [ -z "$got" ]; then
    lacks "$python not found: install Python $wanted_python or newer, or give another: make PYTHON=python$wanted_python"
elif older "$got" "$wanted_python"; then
    lacks "$python is $got: install Python $wanted_python or newer, then make PYTHON=python$wanted_python"
elif ! "$python" -c 'import ensurepip' 2>/dev/null; then
    lacks "$python cannot make environments: install its venv module (Debian, Ubuntu: apt-get install python3-venv)"
fi

got=$(version cargo)
if [ -z "$got" ]; then
    lacks "cargo not found: install Rust $wanted_rust or newer from https://rustup.rs"
elif older "$got" "$wanted_rust"; then
    lacks "cargo is $got: install Rust $wanted_rust or newer (rustup update stable, or https://rustup.rs)"
fi

if ! { command -v cc || command -v gcc || command -v clang; } >/dev/null; then
    lacks "no C compiler, which Rust links with: install gcc or clang (Debian, Ubuntu: apt-get install gcc)"
fi
exit $complete
