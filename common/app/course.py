"""Runs every stage on the fixed workload and prints one table: `cmake --workflow --preset course`.

    python3 common/app/course.py GOLDEN PROGRAM...

GOLDEN has the tokens of an independent program for some of the prompts, stage 1's program comes first. Exit code 1 if a
stage fails or prints another text than the golden file or than stage 1.
"""

import json
import pathlib
import subprocess
import sys

SMALL_CACHE_SLOTS = 800  # too few for all requests at once
HEADER = ("stage", "same text", "slots reserved", "slots used", "KV a token", "KV read", "KV copied", "passes",
          "at once", "ms a token")
LEGEND = f"""
KV: keys and values. Slots: means over the steps of the run. KV a token, in all layers; read and copied, in the whole run.
Passes: forward passes through the model. At once: the most requests at a time, in a second run with {SMALL_CACHE_SLOTS} slots."""


def run_stage(program, *options):
    """What `generate --json -` reports. The stage's own messages go to standard error."""
    print(f"running {' '.join([pathlib.Path(program).name, *options])} ...", file=sys.stderr, flush=True)
    done = subprocess.run([program, "generate", *options, "--json", "-"], stdout=subprocess.PIPE, check=False)
    if done.returncode != 0:
        sys.exit(f"{program} ended with exit code {done.returncode}")
    return json.loads(done.stdout)


def difference(result, golden, first):
    """What a stage prints that it should not, or None."""
    num_compared = 0
    for request in result["requests"]:
        expected = golden.get(request["prompt"])
        if expected is not None:
            # Either text may be cut short by its token limit: the part that both have must agree, and must not be
            # empty.
            length = min(len(expected), len(request["tokens"]))
            if length == 0 or request["tokens"][:length] != expected[:length]:
                return f"other tokens than the golden file for {request['prompt']!r}"
            num_compared += 1
    if num_compared == 0:
        return "none of its prompts is in the golden file"
    if len(result["requests"]) != len(first["requests"]):
        return f"{len(result['requests'])} requests, {first['stage']} has {len(first['requests'])}"
    for request, expected in zip(result["requests"], first["requests"]):
        if (request["prompt"], request["text"]) != (expected["prompt"], expected["text"]):
            return f"other text than {first['stage']} for {expected['prompt']!r}"
    return None


def row(result, small_result, identical):
    """One line of the table: bytes a token as they are, bytes of the whole run in units of 10^6."""
    counters = result["counters"]
    return (result["stage"], "yes" if identical else "no",
            f"{counters['slots_reserved']:.1f}", f"{counters['slots_used']:.1f}",
            f"{counters['kv_bytes_per_token']:,.0f} B",
            *(f"{counters.get(name, 0) / 1e6:,.0f} MB" for name in ("kv_bytes_read", "kv_bytes_copied")),
            f"{counters['forward_passes']:.0f}", f"{small_result['counters']['max_requests_at_once']:.0f}",
            f"{result['timing']['milliseconds_per_token']:.2f}")


def print_table(rows):
    """Markdown; numbers, from the third column on, on the right."""
    widths = [max(len(cells[i]) for cells in (HEADER, *rows)) for i in range(len(HEADER))]
    dashes = ["-" * width if i < 2 else "-" * (width - 1) + ":" for i, width in enumerate(widths)]
    for cells in (HEADER, dashes, *rows):
        aligned = (cell.ljust(width) if i < 2 else cell.rjust(width)
                   for i, (cell, width) in enumerate(zip(cells, widths)))
        print("| " + " | ".join(aligned) + " |")


def main(golden_path, programs):
    cases = json.loads(pathlib.Path(golden_path).read_text(encoding="utf-8"))["cases"]
    golden = {case["prompt"]: case["generated_ids"] for case in cases}
    first = None
    rows = []
    num_problems = 0
    for program in programs:
        result = run_stage(program)
        small_result = run_stage(program, "--slots", str(SMALL_CACHE_SLOTS))
        first = first or result
        problem = difference(result, golden, first) or difference(small_result, golden, first)
        if problem:
            num_problems += 1
            print(f"{result['stage']}: {problem}", file=sys.stderr)
        rows.append(row(result, small_result, problem is None))
    print_table(rows)
    print(LEGEND)
    return 1 if num_problems else 0


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1], sys.argv[2:]))
