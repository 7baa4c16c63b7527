#!/usr/bin/env bash
# All GPU checks and measurements of the kernels in one go, most important first; each section writes its own record.
#
#   benches/kernels/run_h200.sh [folder for the records, default benches/record] [sections ...]
#
# Needs torch with CUDA, CuPy of the same CUDA major version, numpy and safetensors. A section that fails is
# reported and does not stop the others; the exit status is the number of failed sections.
set -u
cd "$(dirname "$0")/../.."
out=${1:-benches/record}
shift || true
sections=${*:-exact small rollout_exact products rollout threshold models sweep}
mkdir -p "$out"
export PYTHONPATH="$PWD/python${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1
python=${PYTHON:-python3}
failed=0

for section in $sections; do
    if ! timeout "${SECTION_SECONDS:-150}" "$python" benches/kernels/h200.py "$section" "$out" 2>"$out/$section.stderr"; then
        failed=$((failed + 1))
        echo "$section FAILED:"
        tail -n 15 "$out/$section.stderr"
    fi
    [ -s "$out/$section.stderr" ] || rm -f "$out/$section.stderr"
done

if command -v compute-sanitizer >/dev/null; then
    for tool in memcheck racecheck; do
        log="$out/sanitizer-$tool.txt"
        if timeout 120 compute-sanitizer --tool "$tool" --error-exitcode 9 \
            "$python" benches/kernels/h200.py small "$out" >"$log" 2>&1; then
            echo "compute-sanitizer $tool: clean"
        else
            failed=$((failed + 1))
            echo "compute-sanitizer $tool FAILED:"
            tail -n 15 "$log"
        fi
    done
else
    echo "compute-sanitizer is not here: not run"
fi
exit "$failed"
