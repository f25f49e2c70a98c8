#!/usr/bin/env python3
"""Runs clang-tidy over our C++ files, several in one go: python3 tests/repo/lint.py build-tsan [FILE or folder]...

Nearly all of clang-tidy's time goes into Eigen and the standard library, again for each file. So files that are compiled
with the same flags are included into one and checked together. If that does not compile (two of them have helpers of the
same name), each half is checked by itself. A file that a stage has taken over unchanged from the stage before
is not checked again, and nor is what was clean before: texts after the preprocessor that had no warnings are
remembered by their hashes, in build-tsan/lint/clean/ or the folder that LINT_CACHE names.
"""

import collections
import concurrent.futures
import functools
import hashlib
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
FILES_AT_ONCE = 12


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
    """(flags, files) to check together: files of common/, of a stage or of tests/, as long as their definitions agree."""
    by_flags, seen = collections.defaultdict(list), set()
    for entry in json.loads((build / "compile_commands.json").read_text(encoding="utf-8")):
        file = pathlib.Path(entry["file"])
        if file in seen or file.suffix != ".cpp" or not file.is_relative_to(ROOT) or file.is_relative_to(build):
            continue
        seen.add(file)
        if not is_taken_over(file) and (not wanted or any(file.is_relative_to(path) for path in wanted)):
            flags = flags_of(entry)
            by_flags[(file.relative_to(ROOT).parts[0], tuple(word for word in flags if not word.startswith("-D")))].append(
                (file, dict(word.partition("=")[::2] for word in flags if word.startswith("-D"))))
    for (_, flags), files in by_flags.items():
        together, definitions = [], {}
        for file, own in files:
            if len(together) == FILES_AT_ONCE or any(definitions.get(name, own[name]) != own[name] for name in own):
                yield with_definitions(flags, definitions), together
                together, definitions = [], {}
            together = together + [file]
            definitions = definitions | own
        yield with_definitions(flags, definitions), together


def with_definitions(flags, definitions):
    return [*flags, *(f"{name}={value}" if value else name for name, value in definitions.items())]


@functools.cache
def rules():
    """What a verdict depends on beside the text: the version, the checks and this file."""
    version = subprocess.run(["clang-tidy", "--version"], stdout=subprocess.PIPE, check=True).stdout
    return version + (ROOT / ".clang-tidy").read_bytes() + pathlib.Path(__file__).read_bytes()


def fingerprint(source, flags, files):
    """A hash of all that clang-tidy sees, comments and macros included; None if it does not compile."""
    result = subprocess.run([*flags, "-E", "-C", "-dD", "-P", str(source)], stdout=subprocess.PIPE,
                            stderr=subprocess.DEVNULL, check=False)
    if result.returncode != 0:
        return None
    names = "\n".join(str(file.relative_to(ROOT)) for file in files).encode()
    # The source includes its files by absolute paths, which differ between checkouts.
    text = result.stdout.replace(str(ROOT).encode(), b"")
    return hashlib.sha256(rules() + b"\0" + names + b"\0" + text).hexdigest()


def tidy(folder, source, flags, files):
    """Returns clang-tidy's exit status and what it printed about all these files together."""
    clean = pathlib.Path(os.environ.get("LINT_CACHE") or folder / "clean")
    key = fingerprint(source, flags, files)
    if key and (clean / key).exists():
        return 0, ""
    # -bugprone-suspicious-include: it is about this file.
    command = ["clang-tidy", "--quiet", f"--config-file={ROOT / '.clang-tidy'}", "--checks=-bugprone-suspicious-include",
               rf"--header-filter={re.escape(str(ROOT))}/(common|tests|stage[0-9]+[^/]*)/.*\.(h|cpp)$",
               str(source), "--", *flags[1:]]
    result = subprocess.run(command, cwd=folder.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
                            encoding="utf-8", errors="replace")
    if key and result.returncode == 0:
        clean.mkdir(parents=True, exist_ok=True)
        (clean / key).touch()
    return result.returncode, result.stdout


def compiles(source, flags):
    return subprocess.run([*flags, "-fsyntax-only", str(source)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                          check=False).returncode == 0


def check(folder, name, flags, files):
    source = folder / f"{name}.cpp"
    source.write_text("".join(f'#include "{file}"\n' for file in files), encoding="utf-8")
    if len(files) > 1 and not compiles(source, flags):
        half = len(files) // 2
        results = [check(folder, f"{name}_{part}", flags, some) for part, some in enumerate((files[:half], files[half:]))]
        return max(result[0] for result in results), "".join(result[1] for result in results)
    return tidy(folder, source, flags, files)


def main():
    build = pathlib.Path(sys.argv[1]).resolve()
    wanted = {pathlib.Path(name).resolve() for name in sys.argv[2:]}
    folder = build / "lint"
    folder.mkdir(exist_ok=True)
    jobs = list(groups(build, wanted))
    failed = 0
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        running = [pool.submit(check, folder, f"group{number}", *job) for number, job in enumerate(jobs)]
        for (_, files), future in zip(jobs, running):
            status, output = future.result()
            failed += status != 0
            if status != 0:
                print(output)
    print(f"checked {sum(len(files) for _, files in jobs)} files in {len(jobs)} groups, {failed} failures")
    return 1 if failed or not jobs else 0


if __name__ == "__main__":
    sys.exit(main())
