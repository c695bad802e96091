"""Random-weight models in the Hugging Face layout, for machines that cannot download one.

A made model goes through the same loaders as a real one (vLLM, transformers, tokenizers). Its words mean
nothing, but its greedy output is a strict witness of the KV cache: it varies, and it follows from the whole
prompt, so a wrong or missing piece of cache shows as wrong tokens.
"""

import json
import re
import shutil
import sysconfig
import uuid
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

MARKER = "handoff_model.json"
GENERATOR = 1  # raised whenever the same preset and seed would give other files
PAD, BOS, EOS = "<pad>", "<s>", "</s>"
SPECIALS = (PAD, BOS, EOS, "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
SHARDS = 2

CHAT_TEMPLATE = """\
{{- bos_token }}
{%- if tools %}{{- '<|system|>Tools: ' + (tools | tojson) + eos_token }}{% endif %}
{%- for message in messages %}
    {%- set role = 'system' if message['role'] == 'developer' else message['role'] %}
    {%- if role not in ['system', 'user', 'assistant', 'tool'] %}
        {{- raise_exception('unknown role ' + role) }}
    {%- endif %}
    {{- '<|' + role + '|>' + (message['content'] or '') }}
    {%- if message['tool_calls'] %}{{- message['tool_calls'] | tojson }}{% endif %}
    {{- eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{% endif %}"""

_BYTES_OF = {"bfloat16": 2, "float16": 2, "float32": 4, "float8_e4m3fn": 1, "float8_e5m2": 1}


class ModelError(ValueError):
    """A model cannot be made; the message names the path or preset and the remedy."""


@dataclass(frozen=True, slots=True)
class Init:
    """Scales of the random weights, for unit-variance inputs of every matrix.

    The defaults were chosen by measurement on ``tiny``. More attention (``sharpness``, ``attention``) makes
    the output more sensitive to early tokens and to bfloat16 rounding alike; fewer likely next words
    (``grammar``, ``successors``) widen the gap between the best two logits.

    Args:
        sharpness: standard deviation of the attention scores before softmax.
        attention: gain of a layer's attention branch.
        mlp: gain of a layer's MLP branch.
        logits: scale of the logits; best ones below 8 keep the bfloat16 step at 1/32.
        successors: how many words are likely after each word.
        grammar: how much likelier those are.
        repulsion: how much the last token's own logit is lowered, against one-token loops.
        unsaid: factor on the output rows of byte fragments and symbols, so that output reads as words.

    """

    sharpness: float = 2.0
    attention: float = 1.4
    mlp: float = 0.4
    logits: float = 0.8
    successors: int = 4
    grammar: float = 1.0
    repulsion: float = 1.0
    unsaid: float = 0.5


@dataclass(frozen=True, slots=True)
class Preset:
    """The geometry of a model; ``summary`` is one line for a help text."""

    name: str
    summary: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int = 4096
    max_positions: int = 8192
    seed: int = 0
    init: Init = Init()

    def config(self) -> dict[str, Any]:
        """Return the contents of ``config.json``."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "dtype": "bfloat16",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.max_positions,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "pad_token_id": SPECIALS.index(PAD),
            "bos_token_id": SPECIALS.index(BOS),
            "eos_token_id": SPECIALS.index(EOS),
        }

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor by its Hugging Face name, in the order of the forward pass."""
        h, q, kv = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab, h)}
        for layer in range(self.layers):
            at = f"model.layers.{layer}"
            shapes |= {
                f"{at}.input_layernorm.weight": (h,),
                f"{at}.self_attn.q_proj.weight": (q, h),
                f"{at}.self_attn.k_proj.weight": (kv, h),
                f"{at}.self_attn.v_proj.weight": (kv, h),
                f"{at}.self_attn.o_proj.weight": (h, q),
                f"{at}.post_attention_layernorm.weight": (h,),
                f"{at}.mlp.gate_proj.weight": (self.intermediate, h),
                f"{at}.mlp.up_proj.weight": (self.intermediate, h),
                f"{at}.mlp.down_proj.weight": (h, self.intermediate),
            }
        return shapes | {"model.norm.weight": (h,), "lm_head.weight": (self.vocab, h)}


PRESETS = {
    p.name: p
    for p in (
        Preset(
            "tiny",
            "32 M parameters, 8 kB of KV per token: for tests and first trials",
            layers=8,
            hidden=512,
            intermediate=1792,
            heads=8,
            kv_heads=4,
            head_dim=64,
        ),
        Preset(
            "kv-heavy",
            "few weights, 123 kB of KV per token (107 MB at 871 tokens): for measuring transports",
            layers=15,
            hidden=256,
            intermediate=512,
            heads=16,
            kv_heads=16,
            head_dim=128,
            init=Init(attention=0.8, mlp=0.3),  # about twice the layers: less from each
        ),
    )
}


def make(path: Path, preset: str, progress: Callable[[str], None] = print, force: bool = False) -> Path:
    """Write the model ``preset`` to the folder ``path`` and return the folder.

    The folder appears complete or not at all. The same preset gives identical files wherever the Python
    standard library (the tokenizer's training text) and the library versions are the same; the marker file
    records the digest of that text.

    Args:
        path: the folder to write. If it already holds the complete preset, nothing is done.
        preset: a name in ``PRESETS``.
        progress: takes one line per step.
        force: replace another, older or damaged model that this function wrote. Other folders are never
            touched.

    Raises:
        ModelError: unknown preset, or ``path`` holds something else.

    """
    if preset not in PRESETS:
        raise ModelError(f"unknown preset {preset!r}: choose one of {', '.join(PRESETS)}")
    spec = PRESETS[preset]
    path = Path(path).expanduser().resolve()
    if _is_complete(path, spec) and not force:
        progress(f"{path} already holds {preset}")
        return path
    _refuse_foreign(path, spec, force)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.partial")
    partial.mkdir()
    try:
        _write_model(partial, spec, progress)
        _put_in_place(partial, path, spec)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    progress(f"made {preset} in {path}: {_total_bytes(spec) / 1e6:.0f} MB of weights")
    return path


def kv_bytes_per_token(config: dict[str, Any]) -> int:
    """Return the size in bytes of one token's keys and values over all layers.

    ``layers * 2 * kv_heads * head_dim * bytes per element``, from a Hugging Face ``config.json``: without
    ``num_key_value_heads`` every query head has its own, without ``head_dim`` it is ``hidden_size / heads``.
    The element is the model's dtype (``dtype``, in older files ``torch_dtype``), bfloat16 if absent.
    """
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    dtype = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    return int(config["num_hidden_layers"] * 2 * kv_heads * head_dim * _BYTES_OF[dtype])


# --- the folder


def _read_marker(path: Path) -> dict[str, Any] | None:
    try:
        marker = json.loads((path / MARKER).read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return marker if isinstance(marker, dict) else None


def _identity(spec: Preset) -> dict[str, Any]:
    return {"preset": spec.name, "seed": spec.seed, "version": GENERATOR}


def _is_complete(path: Path, spec: Preset) -> bool:
    marker = _read_marker(path)
    if marker is None or {k: marker.get(k) for k in _identity(spec)} != _identity(spec):
        return False
    sizes: dict[str, int] = marker.get("files", {})
    return all((path / f).is_file() and (path / f).stat().st_size == size for f, size in sizes.items())


def _refuse_foreign(path: Path, spec: Preset, force: bool) -> None:
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    marker = _read_marker(path) if path.is_dir() else None
    if marker is None:
        raise ModelError(
            f"{path} exists and was not written by `handoff model make` (no {MARKER}): "
            "choose another path, or remove it yourself; --force does not"
        )
    if not force:
        raise ModelError(
            f"{path} holds another, older or damaged model (preset {marker.get('preset')!r}, "
            f"wanted {spec.name!r}): choose another path, or replace it with --force"
        )


def _put_in_place(partial: Path, path: Path, spec: Preset) -> None:
    replaced = partial.with_suffix(".replaced")
    if _read_marker(path) is not None:
        path.rename(replaced)
    try:
        partial.rename(path)  # replaces an empty folder
    except OSError:
        if replaced.exists() and not path.exists():
            replaced.rename(path)
        if not _is_complete(path, spec):  # else another process made the same model first
            raise
    shutil.rmtree(replaced, ignore_errors=True)


def _write_model(folder: Path, spec: Preset, progress: Callable[[str], None]) -> None:
    config = spec.config()
    _write_json(folder / "config.json", config)
    token_ids = {k: config[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / "generation_config.json", token_ids)
    progress("training the tokenizer on the Python standard library")
    tokenizer, digest = _train_tokenizer(spec)
    _write_tokenizer(folder, tokenizer, spec)
    _write_weights(folder, spec, _said(tokenizer, spec.vocab), progress)
    files = {f.name: f.stat().st_size for f in sorted(folder.iterdir())}
    _write_json(folder / MARKER, _identity(spec) | {"corpus_sha256": digest, "files": files})


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", "utf-8")


# --- the tokenizer


def _corpus() -> Iterator[str]:
    """Yield the top-level modules of the standard library by name; private ones differ by machine."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = [f for f in sorted(folder.glob("[a-z]*.py")) if f.stem not in ("sitecustomize", "usercustomize")]
    if len(files) < 50:
        raise ModelError(
            f"no Python sources in {folder} to train the tokenizer on: "
            "use a Python whose standard library is a folder of .py files"
        )
    for file in files:
        yield file.read_text("utf-8", errors="replace")


def _train_tokenizer(spec: Preset) -> tuple[Any, str]:
    texts = list(_corpus())
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=spec.vocab,
            special_tokens=list(SPECIALS),
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A {BOS}:1 $B:1",
        special_tokens=[(BOS, SPECIALS.index(BOS))],
    )
    return tokenizer, sha256("\0".join(texts).encode()).hexdigest()


def _write_tokenizer(folder: Path, tokenizer: Any, spec: Preset) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD}
    _write_json(folder / "special_tokens_map.json", named)
    _write_json(
        folder / "tokenizer_config.json",
        named
        | {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": spec.max_positions,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def _said(tokenizer: Any, vocab: int) -> NDArray[np.bool_]:
    """Mark the tokens that the model says: a space and a lower-case word."""
    return np.array([bool(re.fullmatch("Ġ[a-z]{3,}", tokenizer.id_to_token(t) or "")) for t in range(vocab)])


# --- the weights


def _normal(spec: Preset, name: str) -> NDArray[np.float32]:
    """Draw a tensor from N(0, 1); its stream depends on the seed and its name only, not on the order."""
    rng = np.random.default_rng([spec.seed, zlib.crc32(name.encode())])
    return rng.standard_normal(spec.shapes()[name], dtype=np.float32)


def _tensor(spec: Preset, name: str, said: NDArray[np.bool_]) -> NDArray[np.float32]:
    init = spec.init
    if name.endswith("norm.weight"):
        return np.ones(spec.shapes()[name], np.float32)
    if name == "model.embed_tokens.weight":
        return _normal(spec, name)
    gain = {
        "q_proj": init.sharpness**0.5,
        "k_proj": init.sharpness**0.5,
        "v_proj": 1.0,
        "o_proj": init.attention,
        "gate_proj": 2**0.5,
        "up_proj": 2**0.5,
        "down_proj": init.mlp,
        "lm_head": init.logits,
    }[name.split(".")[-2]]
    weight = _normal(spec, name)
    if name == "lm_head.weight":
        embedding, words = _normal(spec, "model.embed_tokens.weight"), np.flatnonzero(said)
        weight -= init.repulsion * embedding
        order = np.random.default_rng([spec.seed, zlib.crc32(b"grammar")])
        for _ in range(init.successors):
            weight[order.permutation(words)] += init.grammar * embedding[words]
        weight[~said] *= init.unsaid
        weight[: len(SPECIALS)] = 0  # a logit of 0 is far below the best: greedy output never ends by chance
    return weight * np.float32(gain / weight.shape[1] ** 0.5)


def _bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round finite values to bfloat16 (nearest, ties to even) and return the bits."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


def _nbytes(shape: tuple[int, ...]) -> int:
    return 2 * int(np.prod(shape))


def _total_bytes(spec: Preset) -> int:
    return sum(_nbytes(shape) for shape in spec.shapes().values())


def _write_weights(
    folder: Path, spec: Preset, said: NDArray[np.bool_], progress: Callable[[str], None]
) -> None:
    names = list(spec.shapes())
    per_shard = -(-len(names) // SHARDS)
    weight_map: dict[str, str] = {}
    for shard in range(SHARDS):
        file = f"model-{shard + 1:05}-of-{SHARDS:05}.safetensors"
        mine = names[shard * per_shard : (shard + 1) * per_shard]
        progress(f"writing {file}")
        _write_shard(folder / file, spec, mine, said)
        weight_map |= dict.fromkeys(mine, file)
    index = {"metadata": {"total_size": _total_bytes(spec)}, "weight_map": weight_map}
    _write_json(folder / "model.safetensors.index.json", index)


def _write_shard(path: Path, spec: Preset, names: list[str], said: NDArray[np.bool_]) -> None:
    """Write a safetensors file, one tensor in memory at a time.

    The format (https://github.com/huggingface/safetensors#format): the length of the header as a
    little-endian 64-bit integer, the header as JSON, padded with spaces to 8 bytes, then the tensors. Its
    library would need torch or ml_dtypes for bfloat16.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    shapes, at = spec.shapes(), 0
    for name in names:
        end = at + _nbytes(shapes[name])
        header[name] = {"dtype": "BF16", "shape": shapes[name], "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            out.write(_bfloat16(_tensor(spec, name, said)).data)
