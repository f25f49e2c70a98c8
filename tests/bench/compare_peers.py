#!/usr/bin/env python3
"""Times decode attention of this stage and of the kernels that production systems use, on this machine.

    compare_peers.py                                          every peer that can be imported, the usual cells
    compare_peers.py --cells 1x1024,32xragged --shapes 64/8x128

Peers over pages of 16 tokens: FlashInfer (flashinfer-python; compiles its kernels at the first run), FlashAttention-3
(flash_attn_interface), cuDNN (nvidia-cudnn-frontend). Over a contiguous cache, which is no substitute but a yardstick:
PyTorch's scaled_dot_product_attention. What is missing is skipped with a line. Needs PyTorch and a GPU.

Method: bfloat16; a CUDA graph of calls on many batches (600 MB of K and V or more in all, so that none is found in
the cache), pages in random order, the median of the replays. All launches of a call count; plans, made once a step, do
not. Every peer's output is compared with float32 arithmetic before it is timed. This stage's own figures come from
`build/kernel_bench decode`, run first, on the same machine and by the same method (with blocks shuffled over all sets, not set by set).
"""

import argparse
import dataclasses
import importlib
import pathlib
import re
import statistics
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from bench.peers import PEERS, Batch, Missing, kv_bytes_of  # noqa: E402

PROGRAM = pathlib.Path(__file__).resolve().parent.parent.parent / "build" / "kernel_bench"
MACHINE = re.compile(r"^(?P<gpu>.+), driver \S+, CUDA \S+, read ceiling [\d,]+ GB/s$")
CELLS = "1x1024,1x8192,8x1024,8x8192,32x1024,32x8192,128x1024,32xragged"
SHAPES = "32/8x128,32/32x128"


class InputError(Exception):
    """What the caller can put right: one line for stderr."""


def split_row(line):
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def read_tables(text):
    """The Markdown tables of a text: for each a list of rows, a row being {header: cell}."""
    tables, header = [], None
    for line in text.splitlines():
        if not line.startswith("|"):
            header = None
        elif header is None:
            header = split_row(line)
            tables.append([])
        elif not re.fullmatch(r"[|:\- ]+", line):
            cells = split_row(line)
            if len(cells) != len(header):
                raise InputError(f"a row has {len(cells)} cells, its header {len(header)}: {line}")
            tables[-1].append(dict(zip(header, cells)))
    return tables


def read_machine(text):
    """The first line that describes a machine, as a match with the group gpu."""
    for line in text.splitlines():
        if match := MACHINE.match(line.strip()):
            return match
    raise InputError("no line names the machine: is this the output of `build/kernel_bench`?")


@dataclasses.dataclass(frozen=True)
class Shape:
    num_heads: int
    num_kv_heads: int
    head_dim: int

    def __str__(self):
        return f"{self.num_heads}/{self.num_kv_heads}x{self.head_dim}"


@dataclasses.dataclass(frozen=True)
class Cell:
    batch: int
    context: int  # 0: ragged

    def __str__(self):
        return f"{self.batch}x{self.context or 'ragged'}"


def parse_shape(text):
    try:
        heads, head_dim = text.split("x")
        shape = Shape(*(int(number) for number in (*heads.split("/"), head_dim)))
    except (ValueError, TypeError) as error:
        raise InputError(f"a shape is query heads / kv heads x head_dim, as 32/8x128, not {text!r}") from error
    if min(dataclasses.astuple(shape)) < 1 or shape.num_heads % shape.num_kv_heads:
        raise InputError(f"query heads share kv heads evenly, not so in {text!r}")
    return shape


def parse_cell(text):
    try:
        batch, context = text.split("x")
        cell = Cell(int(batch), 0 if context == "ragged" else int(context))
    except ValueError as error:
        raise InputError(f"a cell is sequences x tokens, as 8x1024 or 32xragged, not {text!r}") from error
    if cell.batch < 1 or cell.context < 0 or (cell.context == 0 and context != "ragged"):
        raise InputError(f"a cell has sequences and tokens, not so in {text!r}")
    return cell


def read_own(text):
    """{(shape, cell): microseconds} of what `build/kernel_bench decode` printed."""
    own = {}
    for table in read_tables(text):
        if table and {"heads", "cell", "us", "ceiling"} <= set(table[0]):
            for row in table:
                name = row["heads"].replace(" ", "")
                if row["us"] != "-" and "," not in name:  # else other block sizes: "32/8 x 128, blocks of 32"
                    own[name, row["cell"]] = float(row["us"].replace(",", ""))
    if not own:
        raise InputError("the stage's program printed no table of decode attention")
    return own


def measure_own(program):
    try:
        run = subprocess.run((str(program), "decode"), capture_output=True, text=True)
    except OSError as error:
        raise InputError(f"cannot run {program}: {error}; build it, or name it with --program") from error
    if run.returncode:
        raise InputError(f"{program} failed: {(run.stderr.strip() or run.stdout.strip())[-300:]}")
    return run.stdout


def microseconds_per_call(torch, calls):
    """The median over replays of one graph of all calls, a call."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:2]:  # what a peer sets up at its first call does not belong into the graph
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    times, spent = [], 0.0
    for replay in range(60):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        graph.replay()
        last.record()
        last.synchronize()
        if replay >= 2:
            times.append(1e3 * first.elapsed_time(last))
            spent += times[-1]
        if len(times) >= 5 and spent > 60e3:
            break
    return statistics.median(times) / len(calls)


def time_peer(torch, peer, batch):
    batch.output.fill_(float("nan"))
    calls = peer.calls(batch)
    output = calls[0]()
    torch.cuda.synchronize()
    error = batch.error(output, peer.layout)
    if not error < 1e-2:
        raise Missing(f"wrong result, relative error {error:.1e}")
    return microseconds_per_call(torch, calls)


def find_peers(names, say):
    peers = []
    for name in names:
        if name not in PEERS:
            raise InputError(f"there is no peer {name!r}; there are {', '.join(PEERS)}")
        try:
            peers.append(PEERS[name]())
        except Missing as error:
            say(f"skipped: {name}: {error}")
    return peers


def result_row(shape, cell, own, times, peers):
    """One row of the table: cells as text, "-" for what there is not."""
    def text(microseconds):
        return "-" if microseconds is None else f"{microseconds:.3g}" if microseconds < 1000 else f"{microseconds:.0f}"

    paged = [times[peer.name] for peer in peers if peer.paged and times[peer.name] is not None]
    ratio = f"{min(paged) / own:.2f}" if paged and own else "-"
    return [str(shape), str(cell), f"{kv_bytes_of(shape, cell) / 1e6:.1f}", text(own),
            *(text(times[peer.name]) for peer in peers), ratio]


def compare(torch, options, say):
    shapes = [parse_shape(text) for text in options.shapes.split(",")]
    cells = [parse_cell(text) for text in options.cells.split(",")]
    peers = find_peers(options.peers.split(","), say)
    own = {}
    if not options.no_own:
        text = options.own.read_text(encoding="utf-8") if options.own else measure_own(options.program)
        print(read_machine(text)[0])
        own = read_own(text)
    header = ["heads", "cell", "MB", "this stage", *(peer.name for peer in peers), "best paged peer / this stage"]
    print(f"| {' | '.join(header)} |\n|{' --- |' * len(header)}", flush=True)
    for shape in shapes:
        for cell in cells:
            batch, times = None, {}
            for peer in peers:
                times[peer.name] = None
                try:
                    batch = batch or Batch(torch, shape, cell)
                    times[peer.name] = time_peer(torch, peer, batch)
                except Missing as error:
                    say(f"skipped: {peer.name} on {shape} {cell}: {error}")
                except Exception as error:  # one peer that fails must not take the others with it
                    say(f"failed: {peer.name} on {shape} {cell}: {type(error).__name__}: {str(error)[:200]}")
            row = result_row(shape, cell, own.get((str(shape), str(cell))), times, peers)
            print(f"| {' | '.join(row)} |", flush=True)
            del batch
            torch.cuda.empty_cache()


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", default=CELLS, help="sequences x tokens, separated by commas (default: %(default)s)")
    parser.add_argument("--shapes", default=SHAPES, help="query heads / kv heads x head_dim (default: %(default)s)")
    parser.add_argument("--peers", default=",".join(PEERS), help="which to try (default: %(default)s)")
    parser.add_argument("--program", type=pathlib.Path, default=PROGRAM,
                        help="the benchmark (default: %(default)s)")
    parser.add_argument("--own", type=pathlib.Path, help="what it printed with `build/kernel_bench decode`, from a file")
    parser.add_argument("--no-own", action="store_true", help="measure the peers alone")
    options = parser.parse_args(arguments)
    try:
        for text in options.shapes.split(","):
            parse_shape(text)
        for text in options.cells.split(","):
            parse_cell(text)
        try:
            torch = importlib.import_module("torch")
        except ImportError as error:
            raise InputError(f"the peers need PyTorch: {error}") from error
        if not torch.cuda.is_available():
            raise InputError("PyTorch sees no GPU")
        print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}; microseconds a call", flush=True)
        compare(torch, options, lambda line: print(line, file=sys.stderr, flush=True))
    except (InputError, OSError) as error:
        print(f"compare_peers.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
