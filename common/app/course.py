"""Runs every stage on the fixed workload and prints one table: `cmake --workflow --preset course`.

    python3 common/app/course.py GOLDEN PROGRAM...

GOLDEN has the tokens of an independent program for some of the prompts, stage 1's program comes first. Exit code 1 if a
stage fails or prints another text than the golden file or than stage 1.
"""

import json
import pathlib
import subprocess
import sys

HEADER = ("stage", "text identical", "slots reserved", "slots used", "utilisation", "ms per token")


def run_stage(program):
    """What `generate --json -` has to say. The stage's own messages go to standard error."""
    print(f"running {pathlib.Path(program).name} ...", file=sys.stderr, flush=True)
    done = subprocess.run([program, "generate", "--json", "-"], stdout=subprocess.PIPE, check=False)
    if done.returncode != 0:
        sys.exit(f"{program} ended with exit code {done.returncode}")
    return json.loads(done.stdout)


def difference(result, golden, first):
    """What a stage prints that it should not, or None."""
    num_compared = 0
    for request in result["requests"]:
        expected = golden.get(request["prompt"])
        if expected is not None:
            # Either may have been cut shorter by its token limit: what both have must agree, and that must be something.
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


def row(result, identical):
    reserved, used = (result["counters"][name] for name in ("slots_reserved", "slots_used"))
    return (result["stage"], "yes" if identical else "no", f"{reserved:.1f}", f"{used:.1f}",
            f"{100 * used / reserved:.1f} %" if reserved else "-",
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
    results = []
    problems = []
    for program in programs:
        results.append(run_stage(program))
        problems.append(difference(results[-1], golden, results[0]))
        if problems[-1]:
            print(f"{results[-1]['stage']}: {problems[-1]}", file=sys.stderr)
    print_table([row(result, problem is None) for result, problem in zip(results, problems)])
    return 1 if any(problems) else 0


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1], sys.argv[2:]))
