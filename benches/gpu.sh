#!/usr/bin/env bash
# All that runs on a GPU in one go, most important first, into one record: the speed of decoding, whether every command
# says on the device what it says on the processor, seconds and memory of a quantization by phase, and the kernels.
#
#   benches/gpu.sh [--dry-run] [FOLDER [SECTION ...]]
#
# FOLDER (default benches/record) gets gpu.json, gpu.md and gpu.log. SECTION is one of those below, or `phases` or `kernels`
# for several. Needs torch with CUDA, transformers, numpy, safetensors and pytest, for the kernels CuPy of the same CUDA
# major version, and for all but the kernels the compiled extension. A section that fails or runs out of time is reported
# and does not stop the others; the exit status is the number of those. TOTAL_SECONDS (default 590) bounds all of it;
# what no longer fits is left out and named.
set -u
cd "$(dirname "$0")/.."
dry=
if [ "${1:-}" = --dry-run ]; then
    dry=--dry-run
    shift
fi
out=${1:-benches/record}
shift || true
phases="smol ouro_two ouro smol_cpu"
kernels="exact products"
sections=
for section in ${*:-decode check smol ouro_two ouro exact products smol_cpu sanitizer sweep}; do
    case $section in
        phases) sections="$sections $phases" ;;
        kernels) sections="$sections $kernels" ;;
        *) sections="$sections $section" ;;
    esac
done
mkdir -p "$out"
record=$out/gpu.json log=$out/gpu.log
export PYTHONPATH="$PWD/python${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1
python=${PYTHON:-python3}
total=${TOTAL_SECONDS:-590}
failed=0

left() { echo $((total - SECONDS)); }

# The most seconds that a section may take, of those that are left.
limit() {
    local most=60
    case $1 in
        check) most=120 ;;
        decode) most=570 ;;
        smol | smol_cpu) most=90 ;;
        ouro | ouro_two) most=200 ;;
        threshold | sweep | models) most=150 ;;
    esac
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
    if ! timeout "$seconds" "$python" -m benches.gpu "$1" "$record" $dry --seconds $((seconds - 12)) \
        2>"$log.part"; then
        failed=$((failed + 1))
        echo "$1 FAILED:"
        tail -n 15 "$log.part"
    fi
    { echo "== $1"; cat "$log.part"; } >>"$log"
    rm -f "$log.part"
}

# compute-sanitizer on a small case of every kernel, without cuDNN's own (racecheck reports attention's). If it refuses the
# device, there is no verdict.
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
            "$python" -m benches.gpu small "$record" >"$log.part" 2>&1; then
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
        [ -e "$record" ] && "$python" -m benches.gpu note "$record" --note "$tool" "$verdict"
    done
}

for section in $sections; do
    if [ "$section" = sanitizer ]; then sanitize; else measure "$section"; fi
done
if [ -e "$record" ]; then
    "$python" -m benches.gpu rows "$record" | tee "$out/gpu.md"
fi
exit "$failed"
