#!/usr/bin/env python3
"""Runs clang-tidy over our C++ files, several in one go: python3 tests/repo/lint.py build-tsan [FILE]...

Nearly all of clang-tidy's time goes into Eigen and the standard library, again for each file. So files of one folder that
are compiled with the same flags are included into one and checked together. If that does not compile (two of them have
helpers of the same name), each is checked by itself. A file that a stage has taken over unchanged from the stage before
is not checked again.
"""

import collections
import concurrent.futures
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
FILES_AT_ONCE = 8


def text(file):
    return re.sub(r"^namespace stage.*$", "", file.read_text(encoding="utf-8"), flags=re.MULTILINE)


def is_taken_over(file):
    parts = file.relative_to(ROOT).parts
    stage = re.match(r"stage(\d+)_", parts[0])
    before = ROOT.glob(f"stage{int(stage.group(1)) - 1}_*/" + "/".join(parts[1:])) if stage else []
    return any(text(file) == text(other) for other in before)


def flags_of(entry):
    """The compiler's arguments, without source, object and warnings: the compiler itself warns, file by file."""
    words = shlex.split(entry["command"])
    if words[0].endswith("ccache"):
        words = words[1:]
    return [word for word in words[:words.index("-o")] if word != "-c" and not word.startswith("-W")]


def groups(build, wanted):
    """(flags, files) to check together."""
    by_flags, seen = collections.defaultdict(list), set()
    for entry in json.loads((build / "compile_commands.json").read_text(encoding="utf-8")):
        file = pathlib.Path(entry["file"])
        if file in seen or file.suffix != ".cpp" or not file.is_relative_to(ROOT) or file.is_relative_to(build):
            continue
        seen.add(file)
        if not is_taken_over(file) and (not wanted or file in wanted):
            by_flags[(file.parent, tuple(flags_of(entry)))].append(file)
    for (_, flags), files in by_flags.items():
        for begin in range(0, len(files), FILES_AT_ONCE):
            yield flags, files[begin:begin + FILES_AT_ONCE]


def tidy(folder, name, flags, files):
    """Returns clang-tidy's exit status and what it printed about all these files together."""
    source = folder / f"{name}.cpp"
    source.write_text("".join(f'#include "{file}"\n' for file in files), encoding="utf-8")
    # -bugprone-suspicious-include: it is about this file.
    command = ["clang-tidy", "--quiet", f"--config-file={ROOT / '.clang-tidy'}", "--checks=-bugprone-suspicious-include",
               rf"--header-filter={re.escape(str(ROOT))}/(common|tests|stage[0-9]+[^/]*)/.*\.(h|cpp)$",
               str(source), "--", *flags[1:]]
    result = subprocess.run(command, cwd=folder.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
                            encoding="utf-8", errors="replace")
    return result.returncode, result.stdout


def check(folder, number, flags, files):
    status, output = tidy(folder, f"group{number}", flags, files)
    if status != 0 and len(files) > 1 and "clang-diagnostic-error" in output:
        results = [tidy(folder, f"group{number}_{index}", flags, [file]) for index, file in enumerate(files)]
        return max(result[0] for result in results), "".join(result[1] for result in results if result[0])
    return status, output


def main():
    build = pathlib.Path(sys.argv[1]).resolve()
    wanted = {pathlib.Path(name).resolve() for name in sys.argv[2:]}
    folder = build / "lint"
    folder.mkdir(exist_ok=True)
    jobs = list(groups(build, wanted))
    failed = 0
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        running = [pool.submit(check, folder, number, *job) for number, job in enumerate(jobs)]
        for (_, files), future in zip(jobs, running):
            status, output = future.result()
            failed += status != 0
            if status != 0:
                print(output)
    print(f"checked {sum(len(files) for _, files in jobs)} files in {len(jobs)} groups, {failed} failures")
    return 1 if failed or not jobs else 0


if __name__ == "__main__":
    sys.exit(main())
