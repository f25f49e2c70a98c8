#!/usr/bin/env bash
# Runs small cases of all kernels of one GPU under compute-sanitizer, and prints a line for each tool and program:
#
#   tests/gpu/sanitize_gpu.sh            with memcheck, racecheck, initcheck and synccheck
#   tests/gpu/sanitize_gpu.sh memcheck   with one of them
#
# Each kernel has a case tagged [sanitize], which no other run includes, or a test that is small in any case. The tools'
# output is kept in build/sanitize/. Fails on errors, not on warnings: what racecheck warns of in decode attention's
# ring is explained in common/paged/tile_ring.cuh.
#
# racecheck wants all lanes of a warp to arrive at a barrier where one is enough (common/paged/prefill_kernel.cuh), so for it, build
# with `cmake --preset cuda -DCMAKE_CUDA_FLAGS=-DCOURSE_RACECHECK`.
#
# initcheck (CUDA 13.0) does not see what the matrix library writes on Hopper: it reports reads of such a
# product as uninitialized, in a program without any code of this repository too. So of gpu_llama, it gets the cases
# whose products are computed here.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
programs=(
  gpu_decode_attention_stage7 '[sanitize],*by hand*,*captured graph*'
  gpu_ragged_attention_stage7 '[sanitize],*by hand*'
  gpu_shared_attention_stage7 '*captured graph*,*far larger scores*,*beside chunks and drafts*'
  gpu_cache_kernels_stage7 'Rows land in*,Float8 rows are*,Many rows take*,Blocks are copied in every layer*'
  gpu_paged_attention_stage7 '*by hand*,*captured graph*'
  gpu_ladder_stage7 '[sanitize]'
  gpu_llama '[sanitize]'
)
without_library='*the bundled model*,*in float32*,*shapes that fit no tile*,*replays equal eager*'
without_library+=',*the most likely token*,*tokens and rows*,*rows with options*,*what has no answer*'
without_library+=',GPU tiles: what is done*,activations in float8*'
tools=("$@")
[[ $# != 0 ]] || tools=(memcheck racecheck initcheck synccheck)
mkdir -p build/sanitize
failed=0
for tool in "${tools[@]}"; do
  options=(--tool "$tool")
  [[ $tool != synccheck ]] || options+=(--num-cuda-barriers 256)
  for ((i = 0; i < ${#programs[@]}; i += 2)); do
    program=${programs[i]}
    cases=${programs[i + 1]}
    [[ $tool != initcheck || $program != gpu_llama ]] || cases=$without_library
    log=build/sanitize/$tool-$program.log
    started=$SECONDS
    status=0
    compute-sanitizer "${options[@]}" "build/tests/$program" "$cases" >"$log" 2>&1 || status=$?
    # "ERROR SUMMARY: 0 errors", or racecheck's "RACECHECK SUMMARY: 2 hazards displayed (0 errors, 2 warnings)".
    summary=$(grep -oE '(ERROR|RACECHECK) SUMMARY: .*' "$log" | tail -n 1) || summary=": compute-sanitizer ended early"
    tests=$(grep -E 'All tests passed|^test cases:' "$log" | tail -n 1) || tests="no test ended"
    verdict=ok
    if [[ $status != 0 && $status != 77 ]] || ! [[ $summary =~ [\ \(]0\ errors ]]; then
      verdict=FAILED
      failed=1
    fi
    printf '%-7s %-9s %-28s %s; %s; %d s\n' \
      "$verdict" "$tool" "$program" "${summary#*: }" "$tests" $((SECONDS - started))
    [[ $verdict == ok ]] || printf '        see %s\n' "$log"
  done
done
exit $failed
