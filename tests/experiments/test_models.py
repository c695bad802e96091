import json
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from experiments import models
from experiments.models import MARKER, PRESETS, ModelError, kv_bytes_per_token, make


def quiet(_: str) -> None:
    pass


def digests(folder: Path) -> dict[str, str]:
    return {f.name: sha256(f.read_bytes()).hexdigest() for f in folder.iterdir()}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("models") / "tiny", "tiny", quiet)


def test_two_makes_give_identical_files(tiny: Path, tmp_path: Path) -> None:
    assert digests(make(tmp_path / "again", "tiny", quiet)) == digests(tiny)


def test_another_seed_gives_other_weights(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PRESETS, "tiny", replace(PRESETS["tiny"], seed=1))
    other, first = digests(make(tmp_path / "other", "tiny", quiet)), digests(tiny)
    assert {f for f in first if first[f] != other[f]} == {
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        MARKER,
    }


def test_the_index_names_every_tensor_where_it_is(tiny: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    pytest.importorskip("torch")
    index = json.loads((tiny / "model.safetensors.index.json").read_text())
    total = 0
    found = {}
    for file in sorted(set(index["weight_map"].values())):
        with safetensors.safe_open(tiny / file, "pt") as shard:
            for name in shard.keys():  # noqa: SIM118 (not a mapping)
                tensor = shard.get_tensor(name)
                assert str(tensor.dtype) == "torch.bfloat16"
                found[name] = (file, tuple(tensor.shape))
                total += tensor.numel() * 2
    assert {n: f for n, (f, _) in found.items()} == index["weight_map"]
    assert {n: s for n, (_, s) in found.items()} == PRESETS["tiny"].shapes()
    assert total == index["metadata"]["total_size"]
    assert 31e6 < total / 2 < 33e6


def test_rounding_to_bfloat16_is_that_of_torch() -> None:
    torch = pytest.importorskip("torch")
    values = np.random.default_rng(0).standard_normal(10_000, dtype=np.float32)
    values[:4] = [1 + 2**-8, 1 + 3 * 2**-8, -0.0, 1e-30]  # two ties, a signed zero, a small one
    ours = models._bfloat16(values)
    assert np.array_equal(ours, torch.from_numpy(values).bfloat16().view(torch.uint16).numpy())


@pytest.mark.parametrize(
    "text", ["", "def f(x):\n\treturn x", "Grüße 你好 🦀\u200d🔥 \x00\x7f", " a  b \r\n", "<s>x</s>"]
)
def test_the_tokenizer_round_trips_any_text(tiny: Path, text: str) -> None:
    tokenizer = Tokenizer.from_file(str(tiny / "tokenizer.json"))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.encode(text).ids == [tokenizer.token_to_id("<s>"), *ids]
    assert tokenizer.get_vocab_size() == PRESETS["tiny"].vocab


def test_the_chat_template_renders(tiny: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny)
    turns = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "content": "1"},
    ]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    text = tokenizer.apply_chat_template(turns, tools=tools, tokenize=False, add_generation_prompt=True)
    assert text.startswith('<s><|system|>Tools: [{"type"')
    assert "</s><|system|>be brief</s><|user|>hi</s><|assistant|>[{" in text
    assert text.endswith("<|tool|>1</s><|assistant|>")
    assert tokenizer(text, add_special_tokens=False).input_ids[0] == tokenizer.bos_token_id
    with pytest.raises(Exception, match="unknown role poet"):
        tokenizer.apply_chat_template([{"role": "poet", "content": ""}], tokenize=False)


def test_output_varies_and_follows_from_an_early_token(tiny: Path) -> None:
    """The reason for these weights: a wrong KV cache must give wrong tokens."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny)
    assert model.dtype == torch.bfloat16
    prompts = torch.randint(7, 4096, (4, 500), generator=torch.Generator().manual_seed(0))
    changed = prompts.clone()
    changed[:, 5] = (changed[:, 5] + 1000) % 4000 + 50
    both = torch.cat([prompts, changed])
    made = model.generate(both, attention_mask=torch.ones_like(both), do_sample=False, max_new_tokens=32)
    made = made[:, 500:].tolist()
    assert all(len(set(tokens)) > 12 for tokens in made)
    assert all(tokens != other for tokens, other in zip(made[:4], made[4:], strict=True))
    assert len({tuple(tokens) for tokens in made[:4]}) == 4
    assert not any(token < len(models.SPECIALS) for tokens in made for token in tokens)


def test_kv_bytes_of_the_presets() -> None:
    assert kv_bytes_per_token(PRESETS["tiny"].config()) == 8_192
    per_token = kv_bytes_per_token(PRESETS["kv-heavy"].config())
    assert per_token == 122_880
    assert per_token * 871 == pytest.approx(109e6, rel=0.03)


def test_kv_bytes_fall_back_to_the_query_heads_and_hidden_size() -> None:
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
    assert kv_bytes_per_token(config) == 2 * 2 * 4 * 16 * 2
    assert kv_bytes_per_token(config | {"torch_dtype": "float32"}) == 2 * 2 * 4 * 16 * 4


def test_a_complete_folder_is_left_as_it_is(tiny: Path) -> None:
    before = {f: f.stat().st_mtime_ns for f in tiny.iterdir()}
    said: list[str] = []
    assert make(tiny, "tiny", said.append) == tiny
    assert {f: f.stat().st_mtime_ns for f in tiny.iterdir()} == before
    assert said == [f"{tiny} already holds tiny"]


@pytest.mark.parametrize("force", [False, True])
def test_a_foreign_folder_is_refused_and_kept(tmp_path: Path, force: bool) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=rf"{tmp_path.name}.*no {MARKER}.*--force does not"):
        make(tmp_path, "tiny", quiet, force=force)
    assert (tmp_path / "config.json").read_text() == "{}"


def test_a_file_in_the_way_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "model").write_text("mine")
    with pytest.raises(ModelError, match="remove it yourself"):
        make(tmp_path / "model", "tiny", quiet, force=True)
    assert (tmp_path / "model").read_text() == "mine"


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(folder: Path, *_: object) -> None:
        (folder / "model.safetensors.index.json").write_text("{}")

    monkeypatch.setattr(models, "_write_weights", write)


@pytest.mark.usefixtures("no_weights")
def test_another_or_damaged_model_of_ours_is_replaced_only_with_force(tmp_path: Path) -> None:
    path = make(tmp_path / "model", "tiny", quiet)
    with pytest.raises(ModelError, match=r"preset 'tiny', wanted 'kv-heavy'.*--force"):
        make(path, "kv-heavy", quiet)
    make(path, "kv-heavy", quiet, force=True)
    assert json.loads((path / MARKER).read_text())["preset"] == "kv-heavy"
    (path / "tokenizer.json").write_text("cut sho")
    with pytest.raises(ModelError, match="damaged"):
        make(path, "kv-heavy", quiet)
    make(path, "kv-heavy", quiet, force=True)
    assert [f.name for f in tmp_path.iterdir()] == ["model"]


@pytest.mark.usefixtures("no_weights")
def test_the_loser_of_a_race_takes_the_winners_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = models._train_tokenizer
    racing: list[Path] = []

    def train_while_another_finishes(spec: models.Preset) -> object:
        if not racing:
            racing.append(tmp_path)
            make(tmp_path / "model", "tiny", quiet)
        return train(spec)

    monkeypatch.setattr(models, "_train_tokenizer", train_while_another_finishes)
    assert make(tmp_path / "model", "tiny", quiet) == tmp_path / "model"
    assert racing
    assert [f.name for f in tmp_path.iterdir()] == ["model"]


def test_a_failure_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(models, "_write_weights", full)
    with pytest.raises(OSError, match="No space"):
        make(tmp_path / "model", "tiny", quiet)
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_preset_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"'huge'.*tiny, kv-heavy"):
        make(tmp_path / "model", "huge", quiet)
