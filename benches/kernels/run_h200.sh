#!/usr/bin/env bash
# All GPU checks and measurements of the kernels in one go, most important first, into one record, and the targets of
# docs/kernels.md filled in from it.
#
#   benches/kernels/run_h200.sh [--dry-run] [FOLDER [SECTION ...]]
#
# FOLDER (default benches/record) gets kernels.json, kernels.md and kernels.log. Needs torch with CUDA, CuPy of the same
# CUDA major version, numpy and safetensors; the compiled extension is not needed. A section that fails or runs out of
# time is reported and does not stop the others; the exit status is the number of those. TOTAL_SECONDS (default 570)
# bounds all of it; what no longer fits is left out and named.
set -u
cd "$(dirname "$0")/../.."
dry=
if [ "${1:-}" = --dry-run ]; then
    dry=--dry-run
    shift
fi
out=${1:-benches/record}
shift || true
sections=${*:-exact rollout_exact products rollout sanitizer models threshold sweep}
mkdir -p "$out"
record=$out/kernels.json log=$out/kernels.log
export PYTHONPATH="$PWD/python${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1
python=${PYTHON:-python3}
total=${TOTAL_SECONDS:-570}
failed=0

left() { echo $((total - SECONDS)); }

# The most seconds that a section may take, of those that are left.
limit() {
    local most=150
    [ "$1" = rollout ] && most=240
    [ "$(left)" -lt "$most" ] && most=$(left)
    echo "$most"
}

measure() {
    local seconds
    seconds=$(limit "$1")
    if [ "$seconds" -lt 15 ]; then
        failed=$((failed + 1))
        echo "$1: left out, $(left) of $total seconds are left"
        return
    fi
    # shellcheck disable=SC2086
    if ! timeout "$seconds" "$python" -m benches.kernels.h200 "$1" "$record" $dry --seconds $((seconds - 15)) \
        2>"$log.part"; then
        failed=$((failed + 1))
        echo "$1 FAILED:"
        tail -n 15 "$log.part"
    fi
    { echo "== $1"; cat "$log.part"; } >>"$log"
    rm -f "$log.part"
}

# compute-sanitizer on the small case, without cuDNN's own kernels (racecheck reports attention's); where the machine does not let it see the device that is no verdict.
sanitize() {
    local tool verdict seconds
    for tool in memcheck racecheck; do
        seconds=$(left)
        [ "$seconds" -gt 120 ] && seconds=120
        if ! command -v compute-sanitizer >/dev/null; then
            verdict="not run: there is no compute-sanitizer"
        elif [ "$seconds" -lt 15 ]; then
            verdict="not run: no time was left"
        elif timeout "$seconds" compute-sanitizer --tool "$tool" --error-exitcode 9 \
            --kernel-name-exclude kernel_substring=cudnn \
            "$python" -m benches.kernels.h200 small "$record" >"$log.part" 2>&1; then
            verdict=clean
        elif grep -q "Device not supported" "$log.part"; then
            verdict="not run: it refuses this device"
        else
            verdict="failed: $(grep -m 1 '=========' "$log.part" || tail -n 1 "$log.part")"
            failed=$((failed + 1))
        fi
        echo "compute-sanitizer $tool: $verdict"
        if [ -e "$log.part" ]; then
            { echo "== sanitizer $tool"; tail -n 200 "$log.part"; } >>"$log"
            rm -f "$log.part"
        fi
        [ -e "$record" ] && "$python" -m benches.kernels.h200 note "$record" --note "$tool" "$verdict"
    done
}

for section in $sections; do
    if [ "$section" = sanitizer ]; then sanitize; else measure "$section"; fi
done
if [ -e "$record" ]; then
    "$python" -m benches.kernels.h200 rows "$record" | tee "$out/kernels.md"
fi
exit "$failed"
