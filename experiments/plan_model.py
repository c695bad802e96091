"""A model's shape, from its `config.json` alone: parameters, bytes of weights, bytes of KV."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

_TWO_MATRICES: Final = ("opt", "gpt_neox", "phi", "starcoder2", "gpt_bigcode")
"""Model types whose MLP has no gate."""
_BITS: Final = {"fp8": 8.0, "fbgemm_fp8": 8.0, "mxfp4": 4.25, "bitsandbytes": 4.5}
_EXPERTS: Final = ("num_local_experts", "num_experts", "n_routed_experts")


class PlanError(ValueError):
    """A model, a machines file or a wish that cannot be planned with; names field, value and remedy."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What of a decoder-only transformer costs time and memory.

    Attributes:
        name: of the model, for people.
        layers, hidden, heads, kv_heads, head_dim: as in the configuration.
        longest: tokens that positions go up to; None if the configuration does not say.
        embedding: parameters of the token embedding; the head has as many.
        tied: whether the head is the embedding.
        layer_shared: parameters of one layer that every token uses.
        layer_experts: parameters of one layer's routed experts, all together; 0 without experts.
        expert_share: of these, the share that one token uses.
        bits: of a weight within a layer, with its share of scales and zero points.
        other_bits: of embedding and head, which quantization leaves out.
        kv_bits: of an element of the KV cache.
        notes: what was taken for granted.

    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    longest: int | None
    embedding: int
    tied: bool
    layer_shared: int
    layer_experts: int
    expert_share: float
    bits: float
    other_bits: float = 16
    kv_bits: float = 16
    notes: tuple[str, ...] = ()

    @property
    def parameters(self) -> int:
        """All of them."""
        return self.layers * (self.layer_shared + self.layer_experts) + self.embedding * (2 - self.tied)

    @property
    def active(self) -> float:
        """Parameters that a token is multiplied with; looking up its embedding is none of them."""
        return self.layers * (self.layer_shared + self.expert_share * self.layer_experts) + self.embedding

    @property
    def layer_bytes(self) -> float:
        """Weights of one layer."""
        return (self.layer_shared + self.layer_experts) * self.bits / 8

    @property
    def embedding_bytes(self) -> float:
        """Weights of the embedding; those of the head are as many."""
        return self.embedding * self.other_bits / 8

    @property
    def weights(self) -> float:
        """Bytes of all weights."""
        return self.layers * self.layer_bytes + self.embedding_bytes * (2 - self.tied)

    @property
    def kv_per_token(self) -> float:
        """Bytes of KV of a token over all layers: keys and values of every key-value head."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.kv_bits / 8

    def weighing(self, size: float) -> "Shape":
        """This shape with weights of `size` bytes in all, as the files on disk say."""
        within = size - self.embedding_bytes * (2 - self.tied)
        if within <= 0:
            raise PlanError(
                f"--weights is {size / 1e9:.1f} GB, less than the embedding of {self.name}; "
                "give all bytes of its weight files"
            )
        return replace(self, bits=within * 8 / (self.layers * (self.layer_shared + self.layer_experts)))


def read(model: str) -> Shape:
    """The shape of `model`: a folder, a `config.json`, or a hub id that is in the local cache.

    Nothing is downloaded. Raises PlanError if there is no such model here, or its KV cannot be told.
    """
    path = _config_path(model)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PlanError(f"MODEL: {path} is no readable JSON ({error}); give a model's config.json") from error
    if not isinstance(config, dict):
        raise PlanError(f"MODEL: {path} holds no mapping; give a model's config.json")
    name = path.parent.name if path.name == "config.json" and Path(model).exists() else path.stem
    return shape(config, name if Path(model).exists() else model)


def shape(config: Mapping[str, Any], name: str) -> Shape:
    """The shape that a configuration describes; raises PlanError if it does not say enough."""
    inner = config.get("text_config")
    config = {**config, **inner} if isinstance(inner, dict) else config
    if config.get("kv_lora_rank") or config.get("layers_block_type"):
        field = "kv_lora_rank" if config.get("kv_lora_rank") else "layers_block_type"
        raise PlanError(
            f"config.json: {field} is {config[field]!r}: what latent attention or state spaces keep is not "
            f"modelled; plan with a model of plain attention"
        )
    layers, hidden = _whole(config, "num_hidden_layers"), _whole(config, "hidden_size")
    heads, vocabulary = _whole(config, "num_attention_heads"), _whole(config, "vocab_size")
    kv_heads = _whole(config, "num_key_value_heads", heads)
    width = _whole(config, "head_dim", hidden // heads)
    matrices = 2 if config.get("model_type") in _TWO_MATRICES else 3
    attention = 2 * hidden * heads * width + 2 * hidden * kv_heads * width + 2 * hidden
    experts = next((config[key] for key in _EXPERTS if config.get(key)), 0)
    notes = []
    if experts:
        used = _whole(config, "num_experts_per_tok")
        inner_size = _whole(config, "moe_intermediate_size", config.get("intermediate_size"))
        routed = experts * matrices * hidden * inner_size
        shared = matrices * hidden * (config.get("shared_expert_intermediate_size") or 0)
        shared += (config.get("n_shared_experts") or 0) * matrices * hidden * inner_size
        attention += shared + hidden * experts
    else:
        used, routed = 0, 0
        attention += matrices * hidden * _whole(config, "intermediate_size")
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        notes.append(f"sliding_window {config['sliding_window']}: KV is counted as if every layer kept all")
    bits, other = _bits(config)
    return Shape(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=width,
        longest=config.get("max_position_embeddings"),
        embedding=vocabulary * hidden,
        tied=bool(config.get("tie_word_embeddings")),
        layer_shared=attention,
        layer_experts=routed,
        expert_share=used / experts if experts else 0,
        bits=bits,
        other_bits=other,
        notes=tuple(notes),
    )


def _config_path(model: str) -> Path:
    path = Path(model).expanduser()
    if path.is_file():
        return path
    if path.is_dir():
        if (path / "config.json").is_file():
            return path / "config.json"
        raise PlanError(f"MODEL: {model} has no config.json; give a model folder, or the file itself")
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(model, "config.json")
    except HFValidationError:
        cached = None
    if not isinstance(cached, str):
        raise PlanError(
            f"MODEL: {model!r} is neither a folder nor a file, and no hub model in the local cache; "
            f"nothing is downloaded: give a path to its config.json, or fetch that first"
        )
    return Path(cached)


def _whole(config: Mapping[str, Any], key: str, otherwise: Any = None) -> int:
    value = config.get(key) if config.get(key) is not None else otherwise
    if type(value) is not int or value < 1:
        raise PlanError(f"config.json: {key} is {value!r}; a whole number is needed there to plan with")
    return value


def _bits(config: Mapping[str, Any]) -> tuple[float, float]:
    """Bits of a layer's weight and of the embedding's.

    AWQ and GPTQ keep a 16 bit scale and a zero point for each group of weights (AWQ, Lin et al. 2023).
    """
    dtype = str(config.get("torch_dtype") or config.get("dtype") or "bfloat16").removeprefix("torch.")
    plain = 32.0 if dtype in ("float32", "float") else 16.0
    quantization = config.get("quantization_config")
    if not isinstance(quantization, dict):
        return plain, plain
    method = quantization.get("quant_method")
    bits, group = quantization.get("bits"), quantization.get("group_size", 128)
    if method in ("awq", "gptq") and isinstance(bits, int) and isinstance(group, int):
        return bits + ((16 + bits) / group if group > 0 else 0), 16.0
    if method == "bitsandbytes" and quantization.get("load_in_8bit"):
        return 8.0, 16.0
    if method in _BITS:
        return _BITS[method], 16.0
    raise PlanError(
        f"config.json: quantization_config.quant_method is {method!r}; known: awq, gptq, {', '.join(_BITS)}; "
        f"for others remove it and give --weights SIZE, the bytes of the weight files"
    )
