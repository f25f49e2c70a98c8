#!/usr/bin/env python3
"""What llama.cpp computes, for test_peers.cpp and golden_tokenizers.json. Needs llama-cpp-python, gguf and numpy.

    python3 tests/common/peer_cases.py golden                       rewrites tests/golden/golden_tokenizers.json
    python3 tests/common/peer_cases.py tokenizer OUT FILE.gguf ...  300 texts in the tokens of each of these vocabularies
    python3 tests/common/peer_cases.py models OUT                   small models of random weights and their logits
    COURSE_PEERS=OUT build/tests/test_peers                         compares with all that is in OUT

The source package of llama-cpp-python carries vocabularies of published models in vendor/llama.cpp/models
(ggml-vocab-llama-bpe.gguf, -qwen2, -gpt-2, -llama-spm).
"""

import argparse
import ctypes
import json
import pathlib
import random
import sys
import tempfile

import gguf
import llama_cpp
import numpy

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tests/support"))

from float32_gguf import write_float32

TALES = ROOT / "common/model/tales/tales-5m-q8_0.gguf"
GOLDEN = ROOT / "tests/golden/golden_tokenizers.json"
NUM_TEXTS = 300
NUM_GOLDEN_TEXTS = 60


@llama_cpp.llama_log_callback
def ignore_log(level, text, user_data):
    pass


# --- Texts -------------------------------------------------------------------------------------------------------------

# None has "</s>": llama.cpp treats it as a control token even in vocabularies where it is ordinary text.
FIXED = [
    "", " ", "  ", "\n", "\n\n", " \n", "\n ", "\t", "\r\n", "a", " a", "  a", "a ", "a  ", "a\n", "Hello, world!",
    "I'm you're he's we'll they've it'd don't", "I'M YOU'RE HE'S WE'LL THEY'VE IT'D DON'T", "'S 'sa 's' ''s '",
    "1", "12", "123", "1234", "12345 123456 1234567", " 1 12 123", "3.14159e-10", "0x7FFF_FFFF", "1,000,000", "Ⅻ ½ ²³ १२३ ٣٤٥",
    "for (int i = 0; i < n; ++i) {\n    sum += a[i] * b[i];\n}\n", "def f(x):\n\treturn x**2  # square\n\n\n",
    "SELECT * FROM t WHERE a<>'b';", "a=b;c==d;e!=f;x->y::z", "    four\n        eight\n\ttab\n", "<html><p class=\"x\">&amp;</p>",
    "https://example.org/a?b=c&d=%20#e", "snake_case camelCase PascalCase kebab-case", "$+<=>^~| `\"'()[]{}", "!!! ??? ... --- ***",
    "你好，世界！今天天气很好。", "日本語のテキスト、カタカナとひらがな。", "한국어 텍스트입니다.", "Привет, мир! Как дела?", "Γειά σου Κόσμε",
    "مرحبا بالعالم", "שלום עולם", "नमस्ते दुनिया", "สวัสดีชาวโลก", "Tiếng Việt có dấu", "café naïve Zürich Straße ſ ŉ", "e\u0301 a\u0308 \u200d\u200b",
    "😀", "😀😃😄", "👩‍👩‍👧‍👦 family", "🇩🇪🇫🇷", "👍🏽 ok", "a😀b", "\u00a0nbsp\u2003em\u3000wide", "x\u0085y\u2028z", "\ufeffbom",
    "\x00\x01\x7f", "\U0001f9d1\u200d\U0001f680 𝒳𝓎 𐍈 \U0010fffd", "tab\there\r\nand\rthere\n\r\n", "trailing   \n   \n  x", "a\n\n\n\nb",
    "Once upon a time there was a king who had three sons.", "The quick brown fox jumps over the lazy dog. 12 times!",
    "<|im_start|>user\nHi<|im_end|>\n", "<|begin_of_text|><|eot_id|>x<|end_of_text|>", "<s>x <unk> y", "<|endoftext|> after",
    "a<|endoftext|>", "[PAD151646] [INST] x [/INST]",
]
PARTS = [
    "the", " king", " and", "Wolf", " 7", "42", "2024", " ", "  ", "\n", "\n\n", "\t", ", ", ". ", "!", "?", "'s", "'LL", "'t", " 'x'", "\"", "(", ")",
    " {", "}\n", "==", " += ", "->", "#", "_", "/", "\\", "é", "ß", " Ж", "中文", "日", "한", "ا", "😀", "👍🏽", "\u00a0", "\u3000", "²", "½", "٣", "a\u0301",
    "x", "Y", "zz", "$", "^", "~", "|", "`", "\r\n", "-", "…", "“quoted”", "\u200d", "𝒳", "<|", "|>",
]
# Ill-formed: they are refused. As hexadecimal digits.
INVALID = ["ff", "c3", "61c328", "e28082e2", "eda080", "c0af", "f4908080", "80", "f8888080", "61e4bd"]


def texts(count):
    generator = random.Random(20261122)
    result = list(FIXED)
    while len(result) < count:
        result.append("".join(generator.choice(PARTS) for _ in range(generator.randrange(1, 30))))
    return result[:count]


# --- Tokenizers --------------------------------------------------------------------------------------------------------

class Vocabulary:
    def __init__(self, path):
        parameters = llama_cpp.llama_model_default_params()
        parameters.vocab_only = True
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), parameters)
        self.vocabulary = llama_cpp.llama_model_get_vocab(self.model)

    def tokenize(self, text, parse_special):
        data = text.encode()
        tokens = (llama_cpp.llama_token * (len(data) + 16))()
        count = llama_cpp.llama_tokenize(self.vocabulary, data, len(data), tokens, len(tokens), False, parse_special)
        assert count >= 0
        return list(tokens[:count])


def write_vocabulary(path, model, keys, lists):
    writer = gguf.GGUFWriter(path, "llama")
    # llama.cpp wants a shape even of a file without weights.
    for key, value in {"block_count": 1, "context_length": 64, "embedding_length": 64, "feed_forward_length": 64,
                       "attention.head_count": 1, "rope.dimension_count": 64}.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_string("tokenizer.ggml.model", model)
    for key, value in keys.items():
        (writer.add_string if isinstance(value, str) else writer.add_uint32)(f"tokenizer.ggml.{key}", value)
    for key, values in lists.items():
        writer.add_array(f"tokenizer.ggml.{key}", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def byte_spellings():
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {**{chr(byte): byte for byte in printable}, **{chr(256 + i): byte for i, byte in enumerate(others)}}


def sentence_piece_lists(tokens):
    """SentencePiece's way with the tokens of the bundled model that are text: test_peers.cpp makes the same."""
    spellings = byte_spellings()
    pieces, types = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)], [2, 3, 3] + [6] * 256
    for token in tokens[1:]:
        try:
            text = bytes(spellings[character] for character in token).decode()
        except UnicodeDecodeError:
            continue
        if "\n" in text or ord(text[0]) < 32 or text == "\x7f":
            continue
        pieces.append(text.replace(" ", "\u2581"))
        types.append(1)
    scores = [0.0] * 259 + [-float(i) for i in range(len(pieces) - 259)]
    return {"tokens": pieces, "scores": scores, "token_type": types}


def write_golden():
    reader = gguf.GGUFReader(TALES)
    lists = {key: reader.fields[f"tokenizer.ggml.{key}"].contents() for key in ("tokens", "merges", "token_type")}
    cases = []
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "vocabulary.gguf"
        for rule in ["gpt-2", "smollm", "llama-bpe", "qwen2", "default", "sentencepiece"]:
            if rule == "sentencepiece":
                write_vocabulary(path, "llama", {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0},
                                 sentence_piece_lists(lists["tokens"]))
            else:
                write_vocabulary(path, "gpt2", {"pre": rule, "bos_token_id": 0, "eos_token_id": 0}, lists)
            vocabulary = Vocabulary(path)
            chosen = texts(NUM_TEXTS)
            cases += [{"rule": rule, "text": text, "ids": vocabulary.tokenize(text, True)}
                      for text in chosen[:len(FIXED)] + chosen[-NUM_GOLDEN_TEXTS:]]
    lines = ",\n".join(json.dumps(case, ensure_ascii=True, separators=(",", ":")) for case in cases)
    GOLDEN.write_text('{"source":"llama.cpp, by tests/common/peer_cases.py","cases":[\n' + lines + "\n]}\n")


def write_tokenizer_cases(folder, paths):
    for path in paths:
        vocabulary = Vocabulary(path)
        cases = [{"text": text, "special": special, "ids": vocabulary.tokenize(text, special)}
                 for text in texts(NUM_TEXTS) for special in (False, True)]
        target = folder / (path.stem + ".tokens.json")
        target.write_text(json.dumps({"file": str(path.resolve()), "cases": cases, "invalid": INVALID}))
        print(f"{target}: {len(cases)} cases")


# --- Models ------------------------------------------------------------------------------------------------------------

HIDDEN, FEED_FORWARD, LAYERS, VOCABULARY = 256, 512, 2, 300
SHAPES = [(8, 2, 32), (4, 4, 64), (6, 3, 64)]  # heads, kv heads, head size
MODELS = [  # architecture, keys, tied, types of the matrices in turn, shape
    ("llama", {}, True, ["F32"], 0), ("llama", {}, False, ["F16", "BF16"], 1),
    ("llama", {"scaling": "linear"}, False, ["F32"], 2), ("llama", {"scaling": "yarn"}, False, ["F32"], 1),
    ("llama", {"factors": True}, True, ["F32"], 1),
    ("qwen2", {}, True, ["F32"], 0), ("qwen2", {}, False, ["F16"], 1), ("qwen2", {"scaling": "yarn"}, False, ["F32"], 1),
    ("qwen3", {}, True, ["F32"], 0), ("qwen3", {}, False, ["BF16"], 2), ("qwen3", {"scaling": "linear"}, False, ["F32"], 1),
    ("gemma3", {}, True, ["F32"], 0), ("gemma3", {}, True, ["Q8_0"], 1), ("gemma3", {"scaling": "linear"}, True, ["F32"], 2),
]
TYPES = ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL"]


def random_blocks(generator, name, count):
    """Random bytes with small scales: also of types that the package cannot quantise to."""
    size, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    data = generator.integers(0, 256, (count // size, num_bytes), dtype=numpy.uint8)
    scale, minimum, centre = {"Q8_0": (0, None, 0), "Q4_0": (0, None, 0), "Q4_1": (0, 2, -7.5), "Q5_0": (0, None, 0),
                              "Q5_1": (0, 2, -15.5), "Q2_K": (80, 82, 1.5), "Q3_K": (108, None, 0), "Q4_K": (0, 2, 7.5),
                              "Q5_K": (0, 2, 15.5), "Q6_K": (208, None, 0), "IQ4_NL": (0, None, 0)}[name]

    def put(value):
        data[:, scale:scale + 2] = numpy.frombuffer(numpy.float16(value).tobytes(), numpy.uint8)
        if minimum is not None:
            data[:, minimum:minimum + 2] = numpy.frombuffer(numpy.float16(value * centre).tobytes(), numpy.uint8)

    put(1.0)
    put(1.5 / HIDDEN**0.5 / gguf.dequantize(data, gguf.GGMLQuantizationType[name]).std())
    return data


def write_model(path, architecture, options, tied, types, shape):
    generator = numpy.random.default_rng(7)
    heads, kv_heads, head_dim = SHAPES[shape]
    if architecture == "qwen2":  # its files do not say the size of a head
        heads, kv_heads, head_dim = [(8, 2, 32), (4, 4, 64), (4, 2, 64)][shape]
    layers = 7 if architecture == "gemma3" else LAYERS  # every sixth layer sees all tokens, the others a window of 24
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {"block_count": layers, "context_length": 256, "embedding_length": HIDDEN, "feed_forward_length":
                       FEED_FORWARD, "attention.head_count": heads, "attention.head_count_kv": kv_heads}.items():
        writer.add_uint32(f"{architecture}.{key}", value)
    if architecture != "qwen2":
        writer.add_uint32(f"{architecture}.attention.key_length", head_dim)
        writer.add_uint32(f"{architecture}.attention.value_length", head_dim)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-5)
    if architecture == "gemma3":
        writer.add_uint32(f"{architecture}.attention.sliding_window", 24)
    writer.add_float32(f"{architecture}.rope.freq_base", 1e6 if architecture == "gemma3" else 10000.0)
    if "scaling" in options:
        writer.add_string(f"{architecture}.rope.scaling.type", options["scaling"])
        writer.add_float32(f"{architecture}.rope.scaling.factor", 4.0)
        writer.add_uint32(f"{architecture}.rope.scaling.original_context_length", 64)
    tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    tokens += [f"t{i}" for i in range(VOCABULARY - len(tokens))]
    writer.add_string("tokenizer.ggml.model", "llama")
    writer.add_array("tokenizer.ggml.tokens", tokens)
    writer.add_array("tokenizer.ggml.scores", [0.0] * VOCABULARY)
    writer.add_array("tokenizer.ggml.token_type", [2, 3, 3] + [6] * 256 + [1] * (VOCABULARY - 259))

    count = 0

    def add(name, rows, cols=None):
        nonlocal count
        if cols is None:
            mean = 0.0 if name.endswith("bias") else 1.0
            writer.add_tensor(name, (mean + 0.3 * generator.standard_normal(rows)).astype(numpy.float32))
            return
        kind = types[count % len(types)]
        count += 1
        if kind in TYPES:
            blocks = random_blocks(generator, kind, rows * cols)
            writer.add_tensor(name, blocks.reshape(rows, -1), raw_dtype=gguf.GGMLQuantizationType[kind])
            return
        values = (1.5 / cols**0.5 * generator.standard_normal((rows, cols))).astype(numpy.float32)
        if kind == "BF16":
            values = gguf.quantize(values, gguf.GGMLQuantizationType.BF16)
            writer.add_tensor(name, values, raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(name, values.astype(numpy.float16 if kind == "F16" else numpy.float32))

    add("token_embd.weight", VOCABULARY, HIDDEN)
    add("output_norm.weight", HIDDEN)
    if not tied:
        add("output.weight", VOCABULARY, HIDDEN)
    if "factors" in options:
        writer.add_tensor("rope_freqs.weight", numpy.linspace(1, 8, head_dim // 2, dtype=numpy.float32))
    for layer in range(layers):
        prefix = f"blk.{layer}."
        add(prefix + "attn_norm.weight", HIDDEN)
        for part, rows in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            add(f"{prefix}attn_{part}.weight", rows * head_dim, HIDDEN)
            if architecture == "qwen2":
                add(f"{prefix}attn_{part}.bias", rows * head_dim)
            if architecture in ("qwen3", "gemma3") and part != "v":
                add(f"{prefix}attn_{part}_norm.weight", head_dim)
        add(prefix + "attn_output.weight", HIDDEN, heads * head_dim)
        add(prefix + "ffn_norm.weight", HIDDEN)
        if architecture == "gemma3":
            add(prefix + "post_attention_norm.weight", HIDDEN)
            add(prefix + "post_ffw_norm.weight", HIDDEN)
        add(prefix + "ffn_gate.weight", FEED_FORWARD, HIDDEN)
        add(prefix + "ffn_up.weight", FEED_FORWARD, HIDDEN)
        add(prefix + "ffn_down.weight", HIDDEN, FEED_FORWARD)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def logits_of(path, tokens):
    parameters = llama_cpp.llama_model_default_params()
    parameters.use_extra_bufts = False
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), parameters)
    assert model, path
    options = llama_cpp.llama_context_default_params()
    options.n_ctx, options.n_threads, options.n_threads_batch = 256, 2, 2
    options.type_k = options.type_v = 0  # F32
    options.flash_attn_type = 0
    context = llama_cpp.llama_init_from_model(model, options)
    array = (llama_cpp.llama_token * len(tokens))(*tokens)  # the batch only points to it
    assert llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(array, len(tokens))) == 0
    logits = llama_cpp.llama_get_logits_ith(context, -1)
    result = [float(logits[i]) for i in range(VOCABULARY)]
    llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(model)
    return result


def write_model_cases(folder):
    generator = random.Random(1)
    quantised = [("llama" if i % 2 else "qwen2", {}, False, [kind], 1) for i, kind in enumerate(TYPES)]
    mixed = [("qwen3", {}, False, ["Q4_K", "Q4_K", "Q6_K"], 1), ("llama", {}, True, ["Q5_K", "Q8_0", "F16"], 1)]
    for architecture, options, tied, types, shape in MODELS + quantised + mixed:
        details = [key if value is True else value for key, value in options.items()]
        name = "-".join([architecture, *details, "tied" if tied else "untied", *types, str(shape)])
        path = folder / f"{name}.gguf"
        write_model(path, architecture, options, tied, types, shape)
        # llama.cpp rounds activations to 8 bits for quantised weights, and to 16 bits for weights of 16 bits. So it gets
        # the same weights as F32.
        exact = folder / "float32.tmp"
        write_float32(path, exact)
        tokens = [generator.randrange(VOCABULARY) for _ in range(100)]
        case = {"file": str(path.resolve()), "tokens": tokens, "logits": logits_of(exact, tokens)}
        exact.unlink()
        (folder / f"{name}.logits.json").write_text(json.dumps(case))
        print(name)


def main():
    llama_cpp.llama_log_set(ignore_log, ctypes.c_void_p(0))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("golden")
    tokenizer = commands.add_parser("tokenizer")
    models = commands.add_parser("models")
    for command in (tokenizer, models):
        command.add_argument("folder", type=pathlib.Path)
    tokenizer.add_argument("files", type=pathlib.Path, nargs="+")
    options = parser.parse_args()
    if options.command == "golden":
        write_golden()
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.command == "tokenizer":
        write_tokenizer_cases(options.folder, options.files)
    else:
        write_model_cases(options.folder)


if __name__ == "__main__":
    main()
