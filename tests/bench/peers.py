"""The other kernels: how each is called, on the same pages. compare_peers.py times them.

A peer is a class whose constructor imports what it needs, and whose calls(batch) gives one function for each page set.
There are two kinds of batches: decode (Batch, one query for each sequence) and causal prompts (PromptBatch, a chunk for
each sequence).
"""

import importlib
import itertools
import math
import random

BYTES_OF_ALL_SETS = 600_000_000
BLOCK_SIZE = 16


class Missing(Exception):
    """A peer cannot be used here, or not for this cell: the reason."""


def lengths_of(cell):
    """Tokens of each sequence; the ragged mix has 250 to 32,765 in geometric steps, shuffled."""
    if cell.context:
        return [cell.context] * cell.batch
    lengths = [round(250 * (32765 / 250) ** (i / max(1, cell.batch - 1))) for i in range(cell.batch)]
    random.Random(3).shuffle(lengths)
    return lengths


def blocks_of(length):
    return -(-length // BLOCK_SIZE)


def kv_bytes_of(shape, cell):
    return sum(lengths_of(cell)) * shape.num_kv_heads * shape.head_dim * 2 * 2  # K and V, 2 bytes each


def num_sets_of(shape, cell):
    return max(2, math.ceil(BYTES_OF_ALL_SETS / kv_bytes_of(shape, cell)))


def block_tables_of(lengths):
    """A table for each sequence: the blocks of one set in random order. All sets use the same numbers, each in its own
    stretch of memory."""
    blocks = list(range(sum(blocks_of(length) for length in lengths)))
    random.Random(1).shuffle(blocks)
    tables = []
    for length in lengths:
        tables.append(blocks[:blocks_of(length)])
        del blocks[:blocks_of(length)]
    return tables


class Pages:
    """num_sets copies of K and V for `lengths` tokens, on the device, each with num_rows rows of queries."""

    def __init__(self, torch, shape, lengths, num_sets, num_rows):
        self.torch, self.shape, self.lengths, self.num_sets = torch, shape, lengths, num_sets
        self.tables = block_tables_of(self.lengths)
        self.num_blocks = sum(len(table) for table in self.tables)
        size = (self.num_sets, self.num_blocks, shape.num_kv_heads, BLOCK_SIZE, shape.head_dim)
        torch.manual_seed(0)
        self.keys = torch.randn(size, device="cuda", dtype=torch.bfloat16)
        self.values = torch.randn(size, device="cuda", dtype=torch.bfloat16)
        self.queries = torch.randn((num_rows, shape.num_heads, shape.head_dim), device="cuda", dtype=torch.bfloat16)
        self.output = torch.full_like(self.queries, float("nan"))

    def integers(self, values):
        return self.torch.tensor(values, device="cuda", dtype=self.torch.int32)

    def padded_tables(self):
        longest = max(len(table) for table in self.tables)
        return self.integers([table + [0] * (longest - len(table)) for table in self.tables])

    def page_lists(self):
        """FlashInfer's form of the tables: where each begins, all tables joined, and the tokens in each last page."""
        starts = [0, *itertools.accumulate(len(table) for table in self.tables)]
        last = [(length - 1) % BLOCK_SIZE + 1 for length in self.lengths]
        return self.integers(starts), self.integers(sum(self.tables, [])), self.integers(last)

    def rows_first(self, pages):
        """The same memory viewed as [blocks, tokens, kv heads, head_dim], for peers that need this order."""
        return pages.view(self.num_blocks, BLOCK_SIZE, self.shape.num_kv_heads, self.shape.head_dim)

    def contiguous(self, pages):
        if len(set(self.lengths)) > 1 or self.lengths[0] % BLOCK_SIZE:
            raise Missing("contexts differ")
        return pages.view(len(self.lengths), self.shape.num_kv_heads, self.lengths[0], self.shape.head_dim)

    def gather(self, pages, sequence, layout):
        """K or V of one sequence as a peer sees the memory: [kv heads, length, head_dim] in float32."""
        if layout == "contiguous":
            return self.contiguous(pages)[sequence].float()
        table = self.torch.tensor(self.tables[sequence], device="cuda")
        if layout == "rows first":
            tokens = self.rows_first(pages)[table].transpose(1, 2)
        else:
            tokens = pages[table]
        flat = tokens.transpose(0, 1).reshape(self.shape.num_kv_heads, -1, self.shape.head_dim)
        return flat[:, :self.lengths[sequence]].float()

    def row_error(self, output, row, sequence, visible, layout):
        """The relative error of a row of set 0's output that sees `visible` tokens of a sequence, or infinity."""
        torch, group = self.torch, self.shape.num_heads // self.shape.num_kv_heads
        keys = self.gather(self.keys[0], sequence, layout)[:, :visible]
        values = self.gather(self.values[0], sequence, layout)[:, :visible]
        query = self.queries[row].float().view(self.shape.num_kv_heads, group, self.shape.head_dim)
        weights = torch.softmax(query @ keys.transpose(1, 2) / math.sqrt(self.shape.head_dim), dim=-1)
        expected = (weights @ values).view(self.shape.num_heads, self.shape.head_dim)
        error = ((output[row].float() - expected).norm() / expected.norm()).item()
        return error if math.isfinite(error) else math.inf


class Batch(Pages):
    """A step of decoding: one query for each sequence of a cell."""

    def __init__(self, torch, shape, cell):
        super().__init__(torch, shape, lengths_of(cell), num_sets_of(shape, cell), cell.batch)

    def error(self, output, layout):
        """The largest relative error over a few sequences, or infinity."""
        last = len(self.lengths) - 1
        return max(self.row_error(output, i, i, self.lengths[i], layout) for i in sorted({0, last // 2, last}))


class PromptBatch(Pages):
    """Causal prompts: for each sequence the queries of its last new[i] tokens, one sequence after the other."""

    def __init__(self, torch, shape, prompts):
        self.new, self.past = list(prompts.new), prompts.past
        self.starts = [0, *itertools.accumulate(self.new)]
        super().__init__(torch, shape, [length + self.past for length in self.new], 1, self.starts[-1])

    def error(self, output, layout):
        """The largest relative error over the first, some middle and the last rows of a few sequences, or infinity."""
        worst, last = 0.0, len(self.new) - 1
        for sequence in sorted({0, last // 2, last}):
            for row in sorted({0, 1, self.new[sequence] // 2, self.new[sequence] - 1}):
                worst = max(worst, self.row_error(output, self.starts[sequence] + row, sequence, self.past + row + 1,
                                                  layout))
        return worst


class Peer:
    """calls(batch) returns a function for each set, which runs attention once and returns [rows, heads, head_dim]."""

    paged = True
    layout = "heads first"

    def module(self, name):
        try:
            return importlib.import_module(name)
        except Exception as error:  # a package may fail in any way while it is imported
            raise Missing(f"{type(error).__name__}: {error}".splitlines()[0]) from error


class FlashInfer(Peer):
    def __init__(self, tensor_cores):
        self.name = "FlashInfer, tensor cores" if tensor_cores else "FlashInfer, CUDA cores"
        self.tensor_cores = tensor_cores
        self.flashinfer = self.module("flashinfer")

    def calls(self, batch):
        torch, shape = batch.torch, batch.shape
        workspace = torch.zeros(512 << 20, device="cuda", dtype=torch.uint8)
        wrapper = self.flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND",
                                                                      use_tensor_cores=self.tensor_cores)
        wrapper.plan(*batch.page_lists(), shape.num_heads, shape.num_kv_heads, shape.head_dim, BLOCK_SIZE,
                     q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16)
        return [lambda s=s: wrapper.run(batch.queries, (batch.keys[s], batch.values[s]), out=batch.output)
                for s in range(batch.num_sets)]


class FlashInferPrompts(Peer):
    def __init__(self, backend):
        self.name = f"FlashInfer, {backend.upper()} backend"
        self.backend = backend
        self.flashinfer = self.module("flashinfer")

    def calls(self, batch):
        torch, shape = batch.torch, batch.shape
        workspace = torch.zeros(512 << 20, device="cuda", dtype=torch.uint8)
        wrapper = self.flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND", backend=self.backend)
        wrapper.plan(batch.integers(batch.starts), *batch.page_lists(), shape.num_heads, shape.num_kv_heads,
                     shape.head_dim, BLOCK_SIZE, causal=True, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16)
        return [lambda s=s: wrapper.run(batch.queries, (batch.keys[s], batch.values[s]), out=batch.output)
                for s in range(batch.num_sets)]


class FlashAttention3(Peer):
    name = "FlashAttention-3"
    layout = "rows first"

    def __init__(self):
        self.attend = self.module("flash_attn_interface").flash_attn_with_kvcache

    def calls(self, batch):
        tables, lengths = batch.padded_tables(), batch.integers(batch.lengths)

        def call(s):
            return self.attend(batch.queries.unsqueeze(1), batch.rows_first(batch.keys[s]),
                               batch.rows_first(batch.values[s]), cache_seqlens=lengths, page_table=tables,
                               causal=True).squeeze(1)

        return [lambda s=s: call(s) for s in range(batch.num_sets)]


class VllmFlashAttention3(Peer):
    """The FlashAttention-3 that vLLM ships, of decodes and of prompts; as vLLM calls it, or without a schedule made
    before."""

    layout = "rows first"

    def __init__(self, scheduled):
        self.name = f"vLLM's FlashAttention-3, {'scheduled' if scheduled else 'unscheduled'}"
        self.scheduled = scheduled
        self.module("vllm")
        self.library = self.module("vllm.vllm_flash_attn")

    def calls(self, batch):
        shape = batch.shape
        new = getattr(batch, "new", [1] * len(batch.lengths))
        starts = batch.integers([0, *itertools.accumulate(new)])
        tables, lengths = batch.padded_tables(), batch.integers(batch.lengths)
        options = {"max_seqlen_q": max(new), "max_seqlen_k": max(batch.lengths), "cu_seqlens_q": starts,
                   "seqused_k": lengths, "block_table": tables, "causal": True,
                   "softmax_scale": 1 / math.sqrt(shape.head_dim), "fa_version": 3}
        if self.scheduled:
            options["scheduler_metadata"] = self.library.get_scheduler_metadata(
                batch_size=len(new), max_seqlen_q=max(new), max_seqlen_k=max(batch.lengths),
                num_heads_q=shape.num_heads, num_heads_kv=shape.num_kv_heads, headdim=shape.head_dim,
                cache_seqlens=lengths, qkv_dtype=batch.torch.bfloat16, cu_seqlens_q=starts, page_size=BLOCK_SIZE,
                causal=True)
        return [lambda s=s: self.library.flash_attn_varlen_func(
                    q=batch.queries, k=batch.rows_first(batch.keys[s]), v=batch.rows_first(batch.values[s]),
                    out=batch.output, **options)
                for s in range(batch.num_sets)]


class CuDnn(Peer):
    name = "cuDNN"

    def __init__(self):
        self.cudnn = self.module("cudnn")

    def calls(self, batch):
        torch, shape, cudnn = batch.torch, batch.shape, self.cudnn
        handle = cudnn.create_handle()
        graph = cudnn.pygraph(io_data_type=cudnn.data_type.BFLOAT16, intermediate_data_type=cudnn.data_type.FLOAT,
                              compute_data_type=cudnn.data_type.FLOAT, handle=handle)
        tables = batch.padded_tables()[:, None, :, None]
        query = batch.queries.unsqueeze(2)
        inputs = {"q": query, "k": batch.keys[0], "v": batch.values[0],
                  "seq_len_q": batch.integers([1] * len(batch.lengths)).view(-1, 1, 1, 1),
                  "seq_len_kv": batch.integers(batch.lengths).view(-1, 1, 1, 1),
                  "paged_attention_k_table": tables, "paged_attention_v_table": tables.clone()}
        nodes = {name: graph.tensor_like(tensor) for name, tensor in inputs.items()}
        output, _ = graph.sdpa(name="decode", generate_stats=False, use_padding_mask=True,
                               attn_scale=1 / math.sqrt(shape.head_dim),
                               paged_attention_max_seq_len_kv=max(batch.lengths), **nodes)
        output.set_output(True).set_dim(list(query.size())).set_stride(list(query.stride()))
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A])
        graph.check_support()
        graph.build_plans()
        workspace = torch.empty(max(1, graph.get_workspace_size()), device="cuda", dtype=torch.uint8)

        def call(s):
            cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
            tensors = {nodes[name]: tensor for name, tensor in inputs.items()}
            tensors |= {nodes["k"]: batch.keys[s], nodes["v"]: batch.values[s], output: batch.output.unsqueeze(2)}
            graph.execute(tensors, workspace, handle=handle)
            return batch.output

        return [lambda s=s: call(s) for s in range(batch.num_sets)]


class TorchAttention(Peer):
    paged = False
    layout = "contiguous"

    def __init__(self, backend):
        self.name = f"{'cuDNN' if backend.startswith('CUDNN') else 'FlashAttention-2'} in PyTorch, contiguous"
        attention = self.module("torch.nn.attention")
        self.backend = getattr(attention.SDPBackend, backend)
        self.choose = attention.sdpa_kernel

    def calls(self, batch):
        attend = batch.torch.nn.functional.scaled_dot_product_attention
        query = batch.queries.unsqueeze(2)
        pairs = [(batch.contiguous(batch.keys[s]), batch.contiguous(batch.values[s])) for s in range(batch.num_sets)]
        grouped = batch.shape.num_heads != batch.shape.num_kv_heads

        def call(keys, values):
            with self.choose([self.backend]):
                return attend(query, keys, values, enable_gqa=grouped).squeeze(2)

        return [lambda pair=pair: call(*pair) for pair in pairs]


class TorchPrompts(TorchAttention):
    def calls(self, batch):
        if batch.past:
            raise Missing("its causal mask has no tokens before the queries")
        attend = batch.torch.nn.functional.scaled_dot_product_attention
        keys, values = batch.contiguous(batch.keys[0]), batch.contiguous(batch.values[0])
        rows = (len(batch.new), batch.new[0], batch.shape.num_heads, batch.shape.head_dim)
        query = batch.queries.view(rows).transpose(1, 2)
        grouped = batch.shape.num_heads != batch.shape.num_kv_heads

        def call():
            with self.choose([self.backend]):
                output = attend(query, keys, values, is_causal=True, enable_gqa=grouped)
                return output.transpose(1, 2).flatten(0, 1)

        return [call]


PEERS = {
    "flashinfer": lambda: FlashInfer(tensor_cores=True),
    "flashinfer-cuda-cores": lambda: FlashInfer(tensor_cores=False),
    "fa3": FlashAttention3,
    "vllm-fa3": lambda: VllmFlashAttention3(scheduled=True),
    "vllm-fa3-unscheduled": lambda: VllmFlashAttention3(scheduled=False),
    "cudnn": CuDnn,
    "torch-flash": lambda: TorchAttention("FLASH_ATTENTION"),
    "torch-cudnn": lambda: TorchAttention("CUDNN_ATTENTION"),
}

PROMPT_PEERS = {
    "flashinfer-fa2": lambda: FlashInferPrompts("fa2"),
    "flashinfer-fa3": lambda: FlashInferPrompts("fa3"),
    "vllm-fa3": lambda: VllmFlashAttention3(scheduled=True),
    "vllm-fa3-unscheduled": lambda: VllmFlashAttention3(scheduled=False),
    "torch-flash": lambda: TorchPrompts("FLASH_ATTENTION"),
    "torch-cudnn": lambda: TorchPrompts("CUDNN_ATTENTION"),
}
