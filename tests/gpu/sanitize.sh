#!/bin/bash
# compute-sanitizer's memcheck over three steps on two ranks; prints its summaries, then passed, failed or skipped.
# Usage: tests/gpu/sanitize.sh [LOG]
# compute-sanitizer comes with the CUDA toolkit and with the wheel nvidia-cuda-sanitizer-api (for CUDA 12: -cu12).
# It sees kernels and copies of one process; the peer's memory, mapped through its driver calls, is checked as memory of its own.
here=$(dirname "$(realpath "$0")")
log=${1:-$(mktemp)}
python=${PYTHON:-python}
tool=$(command -v compute-sanitizer)
for candidate in /usr/local/cuda*/bin/compute-sanitizer /usr/local/cuda*/compute-sanitizer/compute-sanitizer \
    "$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"/nvidia/*/{bin,compute-sanitizer}/compute-sanitizer; do
    [ -z "$tool" ] && [ -x "$candidate" ] && tool=$candidate
done
if [ -z "$tool" ]; then
    echo "skipped: no compute-sanitizer"
    exit 0
fi
# The caching allocator would hide overruns within its blocks; torch.distributed.run is a parent without GPU work.
timeout "${SECONDS_ALLOWED:-300}" env PYTORCH_NO_CUDA_MEMORY_CACHING=1 \
    "$python" -m torch.distributed.run --standalone --nproc-per-node=2 --no-python \
    "$tool" --tool memcheck --report-api-errors no --error-exitcode 9 --print-limit 20 --target-processes application-only \
    "$python" "$here/rank_cases.py" --timeout 120 --limit 280 three_steps >"$log" 2>&1
code=$?
grep -hE "========= (ERROR SUMMARY|LEAK SUMMARY|Invalid|Program hit|Error|COMPUTE-SANITIZER)|^(ok|BAD|passed|failed)" "$log" | sort | uniq -c
if [ $code -eq 0 ] && [ "$(grep -c 'ERROR SUMMARY: 0 errors' "$log")" -eq 2 ] && grep -q '^passed' "$log"; then
    echo passed
    exit 0
fi
echo "failed (exit code $code; log in $log)"
exit 1
