#!/usr/bin/env python3
"""Times attention of this stage and of the kernels that production systems use, on this machine, in one run.

    compare_peers.py                                          decode and prompts, every peer that can be imported
    compare_peers.py decode --cells 1x1024,32xragged --shapes 64/8x128
    compare_peers.py prompts
    compare_peers.py chunks                                   a few new tokens after a cached prefix

Peers over pages of 16 tokens: FlashInfer (flashinfer-python; compiles its kernels at the first run), FlashAttention-3
(flash_attn_interface, decode only; vllm has its own, for everything), cuDNN (nvidia-cudnn-frontend, decode only).
PyTorch's scaled_dot_product_attention runs over a contiguous cache, which is a yardstick and no substitute. A peer that
is missing is skipped with a line. Needs PyTorch and a GPU.

Method for decode: bfloat16; a CUDA graph of calls on many batches (600 MB of K and V or more in all, so that none is
found in the cache), pages in random order, the median of the replays. For prompts and chunks: the same on one batch. All launches of a call count; plans, made once a step, do not. Every peer's output is compared with
float32 arithmetic before it is timed. This stage's own figures come from `build/kernel_bench`, run first, on the same
machine and by the same method (decode with blocks shuffled over all sets, not set by set).
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
from bench.peers import PEERS, PROMPT_PEERS, Batch, Missing, PromptBatch, kv_bytes_of  # noqa: E402

PROGRAM = pathlib.Path(__file__).resolve().parent.parent.parent / "build" / "kernel_bench"
MACHINE = re.compile(r"^(?P<gpu>.+), driver \S+, CUDA \S+, read ceiling [\d,]+ GB/s$")
CELLS = "1x1024,1x8192,8x1024,8x8192,32x1024,32x8192,128x1024,32xragged"
SHAPES = "32/8x128,32/32x128"


class InputError(Exception):
    """An error that the user can put right: one line for stderr."""


def split_row(line):
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def read_tables(text):
    """The Markdown tables of a text, each a list of rows, each row a dictionary {header: cell}."""
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


@dataclasses.dataclass(frozen=True)
class Prompts:
    """Chunks of new tokens, each after `past` tokens that are cached."""
    name: str
    new: tuple[int, ...]
    past: int = 0

    def tera_operations(self, shape):
        visible = sum(length * length / 2 + length * self.past for length in self.new)
        return 4 * shape.num_heads * shape.head_dim * visible / 1e12


ONE, MANY = Prompts("1x8192", (8192,)), Prompts("16x512", (512,) * 16)
GROUPED = Shape(32, 8, 128)
PROMPT_ROWS = [  # as in `build/kernel_bench ragged`
    (GROUPED, ONE), (GROUPED, Prompts("4x2048", (2048,) * 4)), (GROUPED, MANY),
    (GROUPED, Prompts("4096 … 64", (4096, 2048, 1024, 512, 256, 128, 64, 64))),
    (GROUPED, Prompts("4x512 after 4096", (512,) * 4, 4096)),
    (Shape(32, 32, 128), ONE), (Shape(32, 32, 128), MANY), (Shape(9, 3, 64), ONE), (Shape(9, 3, 64), MANY),
    (Shape(28, 4, 128), ONE), (Shape(64, 8, 128), ONE), (Shape(16, 8, 256), ONE),
]

SMALL = Shape(32, 8, 64)
CHUNK_ROWS = [  # as in `build/kernel_bench chunks`: sequences, new tokens of each, tokens before them
    (GROUPED, (1, 8, 4000)), (GROUPED, (1, 16, 4000)), (GROUPED, (1, 8, 32000)), (GROUPED, (1, 64, 1000)),
    (GROUPED, (1, 128, 8000)), (GROUPED, (1, 512, 16000)), (GROUPED, (1, 512, 32000)), (GROUPED, (1, 2000, 2000)),
    (GROUPED, (2, 200, 3000)), (GROUPED, (4, 64, 2000)), (GROUPED, (4, 16, 30000)), (GROUPED, (6, 300, 12000)),
    (GROUPED, (8, 256, 4000)), (GROUPED, (8, 32, 8000)), (GROUPED, (16, 128, 4000)), (GROUPED, (16, 100, 2000)),
    (GROUPED, (16, 32, 1000)), (GROUPED, (32, 100, 8000)), (GROUPED, (32, 64, 6000)), (GROUPED, (64, 16, 2000)),
    (GROUPED, (64, 8, 500)), (GROUPED, (64, 64, 500)), (GROUPED, (64, 128, 0)), (GROUPED, (16, 512, 0)),
    (GROUPED, (1, 8192, 0)), (Shape(32, 32, 128), (1, 128, 8000)), (Shape(32, 32, 128), (8, 64, 2000)),
    (Shape(64, 8, 128), (1, 128, 8000)), (Shape(64, 8, 128), (8, 16, 4000)), (Shape(64, 8, 128), (1, 2000, 0)),
    (Shape(64, 8, 128), (3, 3000, 0)), (SMALL, (1, 16, 4000)), (SMALL, (8, 128, 4000)), (SMALL, (1, 8192, 0)),
]


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


def read_own_prompts(text, column="prompts"):
    """{(shape, prompts): microseconds} of what `build/kernel_bench ragged` printed, or chunks."""
    own = {}
    for table in read_tables(text):
        if table and {"heads", column, "us"} <= set(table[0]):
            for row in table:
                own[row["heads"].replace(" ", ""), row[column]] = float(row["us"].replace(",", ""))
    if not own:
        raise InputError(f"the stage's program printed no table of {column}")
    return own


def measure_own(program, kernels):
    try:
        run = subprocess.run((str(program), kernels), capture_output=True, text=True)
    except OSError as error:
        raise InputError(f"cannot run {program}: {error}; build it, or name it with --program") from error
    if run.returncode:
        raise InputError(f"{program} failed: {(run.stderr.strip() or run.stdout.strip())[-300:]}")
    return run.stdout


def microseconds_per_call(torch, calls):
    """Microseconds of a call: the median over replays of one graph of all calls (at least four: a replay costs time too).

    One batch is replayed for 200 ms, as in kernel_bench: the clock falls under power, so that a shorter run looks faster.
    """
    budget = 60e3 if len(calls) > 1 else 200e3
    calls = calls * -(-4 // len(calls))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:2]:  # what a peer sets up at its first call does not belong in the graph
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
        if len(times) >= 3 and spent > budget:
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


def find_peers(names, say, all_peers=PEERS):
    peers = []
    for name in names:
        if name not in PEERS | PROMPT_PEERS:
            raise InputError(f"there is no peer {name!r}; there are {', '.join(PEERS | PROMPT_PEERS)}")
        if name not in all_peers:
            continue  # it is for the other table
        try:
            peers.append(all_peers[name]())
        except Missing as error:
            say(f"skipped: {name}: {error}")
    return peers


def microseconds_text(microseconds):
    return "-" if microseconds is None else f"{microseconds:.3g}" if microseconds < 999.5 else f"{microseconds:.0f}"


def ratio_text(own, times, peers):
    """The best paged peer's time over this stage's."""
    paged = [times[peer.name] for peer in peers if peer.paged and times[peer.name] is not None]
    return f"{min(paged) / own:.2f}" if paged and own else "-"


def result_row(shape, cell, own, times, peers):
    """One row of the table: cells as text, "-" for a missing figure."""
    return [str(shape), str(cell), f"{kv_bytes_of(shape, cell) / 1e6:.1f}", microseconds_text(own),
            *(microseconds_text(times[peer.name]) for peer in peers), ratio_text(own, times, peers)]


def time_peers(torch, peers, make_batch, what, say):
    """{name: microseconds, or None} of each peer on one batch."""
    batch, times = None, {}
    for peer in peers:
        times[peer.name] = None
        try:
            batch = batch or make_batch()
            times[peer.name] = time_peer(torch, peer, batch)
        except Missing as error:
            say(f"skipped: {peer.name} on {what}: {error}")
        except Exception as error:  # one peer that fails must not take the others with it
            say(f"failed: {peer.name} on {what}: {type(error).__name__}: {str(error)[:200]}")
    del batch
    torch.cuda.empty_cache()
    return times


def print_header(header):
    print(f"| {' | '.join(header)} |\n|{' --- |' * len(header)}", flush=True)


def own_text(options, kernels):
    return options.own.read_text(encoding="utf-8") if options.own else measure_own(options.program, kernels)


def compare_decode(torch, options, say):
    shapes = [parse_shape(text) for text in options.shapes.split(",")]
    cells = [parse_cell(text) for text in options.cells.split(",")]
    peers = find_peers(options.peers.split(","), say)
    own = {}
    if not options.no_own:
        text = own_text(options, "decode")
        print(read_machine(text)[0])
        own = read_own(text)
    print("\nDecode, microseconds a call:\n")
    print_header(["heads", "cell", "MB", "this stage", *(peer.name for peer in peers), "best paged peer / this stage"])
    for shape in shapes:
        for cell in cells:
            times = time_peers(torch, peers, lambda s=shape, c=cell: Batch(torch, s, c), f"{shape} {cell}", say)
            row = result_row(shape, cell, own.get((str(shape), str(cell))), times, peers)
            print(f"| {' | '.join(row)} |", flush=True)


def prompt_row(shape, prompts, own, times, peers):
    """One row of the table: cells as text, "-" for a missing figure."""
    def text(microseconds):
        return f"{prompts.tera_operations(shape) / microseconds * 1e6:.0f}" if microseconds else "-"

    return [str(shape), prompts.name, text(own), *(text(times[peer.name]) for peer in peers), ratio_text(own, times, peers)]


def compare_prompts(torch, options, say):
    peers = find_peers(options.peers.split(","), say, PROMPT_PEERS)
    own = {} if options.no_own else read_own_prompts(own_text(options, "ragged"))
    print("\nCausal prompts, TFLOP/s:\n")
    print_header(["heads", "prompts", "this stage", *(peer.name for peer in peers), "best paged peer / this stage"])
    for shape, prompts in PROMPT_ROWS:
        times = time_peers(torch, peers, lambda s=shape, p=prompts: PromptBatch(torch, s, p),
                           f"{shape} {prompts.name}", say)
        row = prompt_row(shape, prompts, own.get((str(shape), prompts.name)), times, peers)
        print(f"| {' | '.join(row)} |", flush=True)


def compare_chunks(torch, options, say):
    peers = [peer for peer in find_peers(options.peers.split(","), say, PROMPT_PEERS) if peer.paged]
    own = {} if options.no_own else read_own_prompts(own_text(options, "chunks"), "chunks")
    print("\nChunks after a cached prefix, microseconds a call:\n")
    print_header(["heads", "chunks", "this stage", *(peer.name for peer in peers), "best paged peer / this stage"])
    for shape, (batch, new, past) in CHUNK_ROWS:
        chunks = Prompts(f"{batch}x{new} after {past}", (new,) * batch, past)
        times = time_peers(torch, peers, lambda s=shape, c=chunks: PromptBatch(torch, s, c), f"{shape} {chunks.name}", say)
        microseconds = own.get((str(shape), chunks.name))
        row = [str(shape), chunks.name, microseconds_text(microseconds),
               *(microseconds_text(times[peer.name]) for peer in peers), ratio_text(microseconds, times, peers)]
        print(f"| {' | '.join(row)} |", flush=True)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("decode", "prompts", "chunks", "all"), default="all",
                        help="what to compare (default: %(default)s)")
    parser.add_argument("--cells", default=CELLS,
                        help="of decode: sequences x tokens, separated by commas (default: %(default)s)")
    parser.add_argument("--shapes", default=SHAPES,
                        help="of decode: query heads / kv heads x head_dim (default: %(default)s)")
    parser.add_argument("--peers", default=",".join(PEERS | PROMPT_PEERS), help="which to try (default: %(default)s)")
    parser.add_argument("--program", type=pathlib.Path, default=PROGRAM,
                        help="the benchmark (default: %(default)s)")
    parser.add_argument("--own", type=pathlib.Path, help="what it printed, from a file")
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
        print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}", flush=True)
        for what, table in (("decode", compare_decode), ("prompts", compare_prompts), ("chunks", compare_chunks)):
            if options.what in (what, "all"):
                table(torch, options, lambda line: print(line, file=sys.stderr, flush=True))
    except (InputError, OSError) as error:
        print(f"compare_peers.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
