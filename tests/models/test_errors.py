"""Every way a checkpoint can be broken is one clear error."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file

from dllm.core.errors import CheckpointError, ConfigError, UnknownNameError
from dllm.models import DiffusionModel, Family, families, family, load, register_family
from dllm.models.headers import not_finite
from dllm.models.loader import remembered

Copy = Callable[..., Path]
WEIGHTS = "model.safetensors"
FIRST_NORM = "model.transformer.blocks.0.attn_norm.weight"


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(FIRST_NORM), f"missing .*{FIRST_NORM}"),
        (lambda t: t.update(extra=torch.zeros(1)), r"no place .*extra"),
        (lambda t: t.update({FIRST_NORM: t[FIRST_NORM].int()}), "holds 'I32', no floating-point"),
    ],
)
def test_weights_that_are_not_the_networks(
    copy: Copy, capfd: pytest.CaptureFixture[str], change: Any, message: str
) -> None:
    folder = edit(copy("llada-tiny"), change)
    with pytest.raises(CheckpointError, match=message):
        load(folder)
    assert capfd.readouterr() == ("", "")  # transformers' own report stays out of sight


def test_old_rotation_buffers_are_no_surplus(copy: Copy, dream: DiffusionModel) -> None:
    buffers = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(8) for i in range(3)}
    model = load(edit(copy("dream-tiny"), lambda t: t.update(buffers)))
    assert torch.equal(model.hf.lm_head.weight, dream.hf.lm_head.weight)
    assert torch.equal(model.backbone.rotary_emb.inv_freq, dream.backbone.rotary_emb.inv_freq)


def test_truncated_and_corrupt_files(copy: Copy) -> None:
    folder = copy("llada-tiny")
    content = (folder / WEIGHTS).read_bytes()
    for broken in (content[: len(content) // 2], b"", b"not a tensor file"):
        (folder / WEIGHTS).write_bytes(broken)
        with pytest.raises(CheckpointError, match="truncated or corrupt"):
            load(folder)


def test_a_missing_shard(copy: Copy, llada: DiffusionModel, tmp_path: Path) -> None:
    llada.save_pretrained(tmp_path / "shards", max_shard_size=200_000)
    next((tmp_path / "shards").glob("*-00002-*")).unlink()
    with pytest.raises(CheckpointError, match=r"incomplete|missing"):
        load(tmp_path / "shards")


def test_a_weight_in_two_shards(llada: DiffusionModel, tmp_path: Path) -> None:
    llada.save_pretrained(tmp_path / "shards", max_shard_size=200_000)
    first, second = sorted((tmp_path / "shards").glob("*.safetensors"))[:2]
    name, weight = next(iter(load_file(first).items()))
    save_file(load_file(second) | {name: weight + 1}, second, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"two weight files in .* hold {name}: take both"):
        load(tmp_path / "shards")


def test_pickles_only(copy: Copy) -> None:
    folder = copy("llada-tiny")
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()
    with pytest.raises(CheckpointError, match=r"only pickles \(pytorch_model.bin\).*save_file"):
        load(folder)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(CheckpointError, match="no weights"):
        load(folder)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["MysteryLM"]}, "needs remote code, which is never run"),
        ({"architectures": ["MysteryLM"], "auto_map": {}}, "needs remote code"),
        (
            {"architectures": ["DiffusionGemmaForBlockDiffusion"]},
            "lacks text_config, canvas_length",
        ),
        ({"architectures": ["BD3LM"]}, "adaptive norms"),
        ({"architectures": ["LLaDAMoEModel"]}, "lacks hidden_size"),
        ({"architectures": None}, "(none)"),
        ({"block_group_size": 2}, "block_group_size=2"),
        ({"block_type": "sequential"}, "block_type='sequential'"),
        ({"rope": False}, "rope=False"),
        ({"include_qkv_bias": True}, "include_qkv_bias=True"),
        ({"layer_norm_type": "default"}, "layer_norm_type"),
        ({"mask_token_id": 256}, "mask_token_id 256 is outside the vocabulary of 256"),
        ({"mask_token_id": None}, "no mask token"),
        ({"mask_token_id": -1}, "mask_token_id -1 is outside"),  # it means noise elsewhere
        ({"eos_token_id": -1}, "eos_token_id -1 is outside"),
        ({"n_layers": "three"}, "n_layers=.three., which must be a whole number"),
        ({"mlp_hidden_size": 176}, r"shape .*160.* asks for .*176"),
        ({"drop": ("auto_map",), "architectures": ["MysteryLM"]},
         "is not supported; supported are A2DLlama"),
        *(({"drop": (name,)}, f"lacks {name}")  # is not guessed
          for name in ("rope_theta", "weight_tying", "block_type", "mask_token_id")),
        ({"architectures": -1}, "architectures=-1, which must be a list of names"),
        ({"torch_dtype": "x"}, "torch_dtype='x', which must be one of float32, bfloat16"),
        ({"d_model": 0}, "d_model=0, which must be a whole number from 1"),
        ({"vocab_size": 10**12}, "vocab_size=1000000000000, which must be"),
        ({"vocab_size": 2**31 - 1, "embedding_size": None}, "has shape .* asks for"),
        ({"n_layers": 2**31 - 1}, "asks for 2147483647 layers, the files hold 3"),
        ({"mlp_hidden_size": 2**30}, "has shape .* asks for .*1073741824"),
        ({"n_heads": 7}, "make no network|is invalid"),
        ({"mask_token_id": "x"}, "mask_token_id='x', which must be a whole number"),
        ({"mask_token_id": 3.5}, "mask_token_id=3.5, which must be"),
        ({"eos_token_id": [[1]]}, r"eos_token_id=\[\[1\]\], which must be a token id or a list"),
        ({"rope_theta": False}, "rope_theta=False, which must be a positive number"),
        ({"rope_theta": float("nan")}, "rope_theta=nan, which must be"),
        ({"quantization_config": {"quant_method": "dllm", "bits": [8]}}, r"bits=\[8\]: not 8 or 4"),
        ({"dllm": 3}, "dllm=3, which must be an object"),
        ({"dllm": {"context_length": "x"}}, "section of config.json has context_length='x'"),
        ({"dllm": {"logit_shift": 2}}, "logit_shift=2, which must be 0 or 1"),
        ({"dllm": {"score_source": []}}, "score_source=.* 'clean' or 'tempered'"),
        ({"dllm": {"stop_token_ids": 3}}, "stop_token_ids=3, which must be a list of token ids"),
        ({"dllm": {"family": 3}}, "family=3, which must be a name"),
        ({"dllm": {"generation": {"max_new_tokens": -5}}}, "max_new_tokens=-5, which must be"),
    ],
)  # fmt: skip
def test_configs_that_are_refused(copy: Copy, fields: dict[str, Any], message: str) -> None:
    """Before anything is built: a layer count of two thousand million takes no time."""
    with pytest.raises(CheckpointError, match=message) as caught:
        load(copy("llada-tiny", **fields))
    assert "\n" not in str(caught.value)


INDEX = "model.safetensors.index.json"
FILES = [
    ("config.json", "{", "not valid JSON"),
    ("config.json", "[" * 100_000, "not valid JSON"),
    ("config.json", "[]", "JSON object"),
    ("config.json", None, r"no config\.json"),
    *(("generation_config.json", json.dumps({name: value}),
       rf"generation_config\.json has {name}=.* must be")
      for name, value in (("eos_token_id", "x"), ("eos_token_id", 1.5), ("eos_token_id", [[1]]),
                          ("max_new_tokens", "many"), ("max_new_tokens", -5), ("delimiters", 4))),
    (INDEX, "{", "not valid JSON"),
    (INDEX, "[]", "does not hold a JSON object"),
    (INDEX, "3", "does not hold a JSON object"),
    (INDEX, "{}", "no weight_map"),
    (INDEX, '{"metadata": {}, "weight_map": {"a": 3}}', "names 3, which is no safetensors file"),
    (INDEX, '{"metadata": {}, "weight_map": {"a": "../model.safetensors"}}', "of this folder"),
    (INDEX, '{"metadata": {}, "weight_map": {"a": "/etc/passwd"}}', "of this folder"),
    (INDEX, '{"metadata": {}, "weight_map": {"a": "b.safetensors"}}', "b.safetensors is missing"),
    (INDEX, '{"weight_map": {"a": "m.safetensors"}}', "no metadata"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("file", "content", "message"), FILES, ids=[f"{i}-{case[0]}" for i, case in enumerate(FILES)]
)
def test_small_files_that_cannot_be_read(
    copy: Copy, file: str, content: str | None, message: str
) -> None:
    folder = copy("llada-tiny")
    if file == INDEX:
        (folder / WEIGHTS).rename(folder / "m.safetensors")
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_text(content)
    with pytest.raises(CheckpointError, match=message):
        load(folder)


def test_weights_under_another_name(copy: Copy) -> None:
    folder = copy("llada-tiny")
    (folder / WEIGHTS).rename(folder / "m.safetensors")
    with pytest.raises(CheckpointError, match=r"neither .* but m\.safetensors; .* rename"):
        load(folder)


def test_weights_that_are_not_finite(copy: Copy) -> None:
    nan, inf = float("nan"), float("inf")
    last = "model.transformer.ln_f.weight"
    folder = copy("llada-tiny")
    assert list(not_finite(folder)) == []
    edit(folder, lambda t: (t[FIRST_NORM].__setitem__(3, nan), t[last].__setitem__(0, -inf)))
    assert sorted(not_finite(folder)) == [FIRST_NORM, last]


def test_ids_that_contradict_the_release() -> None:
    """Compared by vocabulary size, so a fine-tune with other files is caught."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 126464, "hidden_size": 2, "intermediate_size": 2}
    layers = {"num_hidden_layers": 1, "num_attention_heads": 1}
    config = LlamaConfig(**sizes, **layers, eos_token_id=126081, pad_token_id=126081)
    hf = LlamaForCausalLM(config)
    hf.config.mask_token_id = 126335
    hf.config.is_causal = False
    with pytest.raises(CheckpointError, match=r"mask_token_id is 126335 .* but 126336"):
        load(hf)
    assert load(hf, mask_token_id=126335).facts.mask_token_id == 126335
    assert load(hf, mask_token_id=126336).facts.stop_token_ids == (126081,)


def test_arguments(checkpoints: Path, llada: DiffusionModel) -> None:
    folder = checkpoints / "llada-tiny"
    for dtype in ("float8", "int8", torch.int64, "fp32"):
        with pytest.raises(ConfigError, match="dtype is 'auto', 'float32'"):
            load(folder, dtype=dtype)
    with pytest.raises(UnknownNameError, match="did you mean 'sdpa'"):
        load(folder, attn_implementation="spda")
    with pytest.raises(ConfigError, match=r"'\.\[flash\]' in a checkout"):
        load(folder, attn_implementation="flash_attention_3")
    with pytest.raises(ConfigError, match="not both"):
        load(folder, device="cpu", device_map="auto")
    with pytest.raises(ConfigError, match="embeddings are on device 'meta' or offloaded to disk"):
        load(folder, device="meta")
    with pytest.raises(ConfigError, match="cannot be used"):
        load(folder, device=[0])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="never run"):
        load(folder, trust_remote_code=True)
    with pytest.raises(UnknownNameError, match="did you mean 'device_map'"):
        load(folder, devcie_map="auto")
    with pytest.raises(UnknownNameError, match="did you mean 'llada'"):
        load(folder, family="lada")
    with pytest.raises(CheckpointError, match="no dream checkpoint"):
        load(folder, family="dream")
    with pytest.raises(CheckpointError, match=r"no model_type 'llada' .*: 'llada' reads it"):
        load(folder, family="autoregressive")
    with pytest.raises(ConfigError, match="logit_shift is 0 or 1"):
        load(folder, logit_shift=2)
    with pytest.raises(ConfigError, match="score_source"):
        load(folder, score_source="dirty")
    with pytest.raises(ConfigError, match="mask_token_id is a whole number, not 'x'"):
        load(folder, mask_token_id="x")
    with pytest.raises(ConfigError, match="stop_token_ids is a list of token ids, not 3"):
        load(folder, stop_token_ids=3)


def test_names_that_lead_nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def offline(*_: Any, **__: Any) -> str:
        raise huggingface_hub.errors.LocalEntryNotFoundError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(CheckpointError, match=r"'a/b' is neither a folder nor a bundled.*failed"):
        load("a/b")
    with pytest.raises(CheckpointError, match="at revision 'v2'"):
        load("a/b", revision="v2")
    with pytest.raises(UnknownNameError, match="did you mean 'nano'"):
        load("nanoo")
    for path in (tmp_path / "absent", str(tmp_path / "absent"), "./absent", "~nobody/absent"):
        with pytest.raises(CheckpointError, match="there is no folder"):
            load(path)
    with pytest.raises(CheckpointError, match="is neither a folder"):
        remembered("a" * 5000)
    with pytest.raises(CheckpointError, match="is neither a folder"):
        load("")  # not the folder that the process is in
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="holds an adapter: load its model with adapter="):
        load(tmp_path)
    (tmp_path / "config.json").symlink_to(tmp_path / "absent")
    with pytest.raises(CheckpointError, match="holds an adapter"):
        remembered(tmp_path)


def test_a_bundled_model_that_is_absent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("dllm.models.checkpoint.resources.files", lambda _: tmp_path)
    with pytest.raises(CheckpointError, match="'nano' is not part of this installation"):
        load("nano")


def test_bundled_models_are_float32(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, checkpoints: Path
) -> None:
    half = load(checkpoints / "llada-tiny", dtype="float16")
    half.save_pretrained(tmp_path / "nano" / "nano")
    monkeypatch.setattr("dllm.models.checkpoint.resources.files", lambda _: tmp_path)
    model = load("nano")
    assert (model.name, model.dtype) == ("nano", torch.float32)
    assert load("nano", dtype="float16").dtype == torch.float16


def test_the_hub_is_asked_for_small_files_first(
    monkeypatch: pytest.MonkeyPatch, copy: Copy
) -> None:
    folder, asked = copy("llada-tiny"), []

    def download(repo: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((repo, revision, allow_patterns))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    model = load("someone/llada", revision="abc")
    assert model.name == "someone/llada"
    assert [patterns == ["*.safetensors"] for _, _, patterns in asked] == [False, True]
    assert {revision for _, revision, _ in asked} == {"abc"}
    assert not any(p.endswith((".py", ".bin", ".pt")) for _, _, ps in asked for p in ps)


def test_a_family_is_a_few_lines(copy: Copy) -> None:
    llada = families()["llada"]
    fields = {name: getattr(llada, name) for name in llada.__dataclass_fields__}
    mine = Family(**fields | {"name": "mine", "architectures": ("MineLM",), "logit_shift": 1})
    try:
        assert register_family(mine) is families()["mine"]
        model = load(copy("llada-tiny", architectures=["MineLM"]))
        assert (model.family.name, model.facts.logit_shift) == ("mine", 1)
    finally:
        family._FAMILIES.pop("mine")
