#!/bin/sh
# Known vulnerabilities of what loopq depends on: sh tools/audit.sh PYTHON. pip-audit reads the packages of that
# interpreter's environment, cargo-audit reads Cargo.lock. Code 0: neither reports any. Code 1: at least one
# reports some. Code 3: unknown, since one of them failed.
python=$1
code=0

not_asked() {
    echo "make audit: NOT ASKED about $1: $2" >&2
    test "$code" = 1 || code=3
}

log=$(mktemp)
if ! "$python" -m pip install -q pip-audit >"$log" 2>&1; then
    not_asked "Python packages" "pip-audit cannot be installed ($(tail -n 1 "$log" | cut -c 1-200)); is there a network?"
elif "$python" -m pip_audit --skip-editable --progress-spinner off >"$log" 2>&1; then
    # An index of packages without advisories answers that it knows none of them.
    if unknown=$(grep -c 'could not be audited' "$log"); then
        not_asked "$unknown Python packages" "no advisories about them were found ($(grep -m 1 'could not be audited' "$log"))"
    else
        cat "$log"
    fi
elif grep -q '^Name  *Version  *ID' "$log"; then
    cat "$log"
    code=1
else
    not_asked "Python packages" "pip-audit got no advisories ($(tail -n 1 "$log" | cut -c 1-200)); is there a network?"
fi

if ! cargo audit --version >/dev/null 2>&1; then
    not_asked "Rust crates" "cargo-audit is not installed: cargo install --locked cargo-audit"
elif cargo audit >"$log" 2>&1; then
    cat "$log"
elif grep -q 'RUSTSEC-' "$log"; then
    cat "$log"
    code=1
else
    not_asked "Rust crates" "cargo-audit got no advisories ($(tail -n 1 "$log" | cut -c 1-200)); is there a network?"
fi
rm -f "$log"
exit "$code"
