#!/usr/bin/env python3
"""Checks the graph of the includes: no circle, no arrow upwards.

    python3 tests/repo/include_check.py          check
    python3 tests/repo/include_check.py --draw   print which folder includes which

A unit is a header with the source file of its name: what scheduler.cpp includes, the scheduler depends on.

Circles     No unit of common/ or of a stage depends on itself, directly or through others. Nor does a source file do so
            through headers that sources of other names implement: who includes such a header depends on its sources.
Layers      A folder of common/ includes only its own files and those of the folders before it in LAYERS.
Production  A folder of a stage's production/ is included by production/ and by one other unit, which chooses.
Paged       Of common/paged/ a stage includes the interface that its own kernels implement. The rest is included by one
            unit of the stage, which chooses, and by the last rows of ladder/, which are its kernels.
"""

import argparse
import pathlib
import re
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from diff_check import INCLUDE, STAGE_FOLDER, find_stages, list_files

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
SUFFIXES = (".h", ".cpp", ".cu", ".cuh")
# What an unindented line of a header declares: a class, an object or a function that is defined elsewhere.
DECLARED = re.compile(r"^(?:(?:class|struct) (\w+)(?: final)?(?: :|\s*\{)"
                      r"|extern [\w:<> ]+ (\w+)"
                      r"|(?!using|inline|constexpr|#|/)[\w:<>,&* ]+[ &*](\w+)\()", re.MULTILINE)
# A later folder may include earlier ones. The longest name that fits counts.
LAYERS = ["common/base", "common/math", "common/model", "common/cuda", "common/cuda/runtime", "common/cuda/several",
          "common/cuda/model", "common/paged", "common/app", "common/serving"]
INTERFACE = ("common/paged/page_shape", "common/paged/paged_kernels", "common/paged/checks",
             "common/paged/shared_reading",  # for production/ on a CPU too
             "common/paged/shared_plan", "common/paged/shared_attention",  # for production/ on a GPU
             "common/paged/windowed_kernels")  # there too
LAST_ROWS = ("ladder/production", "ladder/prompt_production")


def sources(root):
    """Paths relative to the root."""
    for folder in ["common", *find_stages(root)]:
        for name in list_files(root / folder) if (root / folder).is_dir() else []:
            if name.endswith(SUFFIXES):
                yield pathlib.PurePosixPath(folder, name)


def includes_of(root, file):
    """The project's own files that a file includes, without generated headers and other projects' headers."""
    for line in (root / file).read_text(encoding="utf-8").split("\n"):
        include = INCLUDE.match(line)
        if include and '"' in line:
            beside = pathlib.PurePosixPath(normalise(file.parent / include.group(1)))
            for path in (beside, pathlib.PurePosixPath(include.group(1))):
                if (root / path).is_file():
                    yield path
                    break


def normalise(path):
    parts = []
    for part in path.parts:
        if part == ".." and parts:
            parts.pop()
        else:
            parts.append(part)
    return "/".join(parts)


def unit_of(file):
    return str(file.with_suffix(""))


def graph_of(root):
    """{unit: {unit that it includes: the file that includes it}}."""
    graph = {}
    for file in sources(root):
        arrows = graph.setdefault(unit_of(file), {})
        for included in includes_of(root, file):
            if unit_of(included) != unit_of(file):
                arrows.setdefault(unit_of(included), str(file))
    return graph


def implemented_elsewhere(root, files):
    """{header without a source of its name: the sources that include it and define what it declares}."""
    with_source = {unit_of(file) for file in files if file.suffix in (".cpp", ".cu")}
    texts = {file: (root / file).read_text(encoding="utf-8") for file in files}
    sources_of = {}
    for source in files:
        for header in includes_of(root, source) if source.suffix in (".cpp", ".cu") else []:
            if header not in texts or header.suffix != ".h" or unit_of(header) in with_source:
                continue
            defined = [rf"{name}\b[({{]|{name}::~?\w+\(" for found in DECLARED.findall(texts[header])
                       for name in found if name]
            if defined and re.search(rf"^(?:[\w:<>,&*]+[ &*]+)*(?:{'|'.join(defined)})", texts[source], re.MULTILINE):
                sources_of.setdefault(header, []).append(source)
    return sources_of


def source_graph(root):
    """{source: {source of another name that implements a header that it includes: the header}}."""
    files = list(sources(root))
    sources_of = implemented_elsewhere(root, files)
    graph = {}
    for file in files:
        arrows = graph.setdefault(str(file), {}) if file.suffix in (".cpp", ".cu") else {}
        for header in includes_of(root, file):
            if file not in sources_of.get(header, []):
                arrows.update((str(source), str(header)) for source in sources_of.get(header, []))
    return graph


def find_circles(graph):
    """One circle for each strongly connected set of units, as a list of units."""
    circles, state, path = [], {}, []

    def visit(unit):
        state[unit] = "open"
        path.append(unit)
        for other in sorted(graph.get(unit, ())):
            if state.get(other) == "open":
                circles.append(path[path.index(other):] + [other])
            elif other not in state:
                visit(other)
        path.pop()
        state[unit] = "done"

    sys.setrecursionlimit(10000)
    for unit in sorted(graph):
        if unit not in state:
            visit(unit)
    return circles


def layer_of(unit):
    fitting = [layer for layer in LAYERS if unit.startswith(layer + "/")]
    return max(fitting, key=len, default=None)


def check(root):
    """All failures, one line each."""
    graph = graph_of(root)
    failures = ["a circle of includes: " + " -> ".join(circle)
                for circle in find_circles(graph) + find_circles(source_graph(root))]
    choosers = {}
    for unit, arrows in sorted(graph.items()):
        for included, file in sorted(arrows.items()):
            below, above = layer_of(included), layer_of(unit)
            if above is not None and below is not None and LAYERS.index(below) > LAYERS.index(above):
                failures.append(f"{file}: {above} comes before {below} and includes {included}")
            stage = pathlib.PurePosixPath(unit).parts[0]
            if not STAGE_FOLDER.match(stage):
                continue
            of_production = included.startswith(f"{stage}/production/") and not unit.startswith(f"{stage}/production/")
            of_paged = included.startswith("common/paged/") and included not in INTERFACE \
                and unit not in [f"{stage}/{row}" for row in LAST_ROWS]
            if of_production or of_paged:
                choosers.setdefault((stage, str(pathlib.PurePosixPath(included).parent)), set()).add(unit)
    for (_, folder), units in sorted(choosers.items()):
        if len(units) > 1:
            failures.append(f"{folder}/ is included by more than the one place that chooses: "
                            + ", ".join(sorted(units)))
    return failures


def draw(root, log=print):
    """Arrows between folders, and the number of units that have each."""
    arrows = {}
    for unit, others in graph_of(root).items():
        for other in others:
            ends = (str(pathlib.PurePosixPath(unit).parent), str(pathlib.PurePosixPath(other).parent))
            if ends[0] != ends[1]:
                arrows[ends] = arrows.get(ends, 0) + 1
    for (begin, end), count in sorted(arrows.items()):
        log(f"{begin} -> {end}  {count}")


def main():
    parser = argparse.ArgumentParser(description="Checks that includes have no circle and no arrow upwards.")
    parser.add_argument("--draw", action="store_true", help="print the arrows between folders")
    if parser.parse_args().draw:
        draw(ROOT)
        return 0
    failures = check(ROOT)
    for failure in failures:
        print(f"error: {failure}")
    print(f"checked the includes of {sum(1 for _ in sources(ROOT))} files, {len(failures)} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
