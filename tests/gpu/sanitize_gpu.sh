#!/usr/bin/env bash
# Runs the kernels' tests under compute-sanitizer, with each of its tools: tests/gpu/sanitize_gpu.sh [TEST CASES]
#
# By default some small cases; "*" is all of them, and slow. What racecheck warns of in decode attention's ring is
# explained in stage7_cuda_kernel/production/tile_ring.cuh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
cases=${1:-*by hand*,*a new row*,Blocks are copied in every layer*}
failed=0
for tool in memcheck racecheck initcheck "synccheck --num-cuda-barriers 256"; do
  for program in build/tests/gpu_{decode_attention,ragged_attention,cache_kernels}_stage7; do
    echo "--- $tool: $program"
    status=0
    # shellcheck disable=SC2086  # the tool's option is a word of its own
    compute-sanitizer --tool $tool --error-exitcode 1 "$program" "$cases" || status=$?
    [[ $status == 0 || $status == 77 ]] || failed=1
  done
done
exit $failed
