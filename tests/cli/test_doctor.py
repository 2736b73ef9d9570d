"""``dllm doctor``: the report, and whether a model fits."""

import json
import re
import shutil
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import dllm
from dllm.cli import doctor as module
from dllm.cli.doctor import BAD, GOOD, examine, fit
from dllm.core import errors
from dllm.eval.bounds import Device, measure, step_of
from dllm.kernels import cpu, linear
from dllm.models import footprint as sizes
from dllm.models import precision, probe
from dllm.models.checkpoint import open_checkpoint
from dllm.models.footprint import Footprint, footprint

from ..thin import some
from .conftest import Run

LLADA_8B: dict[str, Any] = {
    "architectures": ["LLaDAModelLM"], "model_type": "llada", "torch_dtype": "bfloat16",
    "auto_map": {"AutoModel": "modeling_llada.LLaDAModelLM"},
    "d_model": 4096, "n_heads": 32, "n_kv_heads": 32, "n_layers": 32, "mlp_hidden_size": 12288,
    "vocab_size": 126464, "embedding_size": 126464, "max_sequence_length": 4096,
    "rms_norm_eps": 1e-5, "rope": True, "rope_theta": 500000.0, "rope_full_precision": True,
    "block_type": "llama", "block_group_size": 1, "layer_norm_type": "rms",
    "activation_type": "silu", "weight_tying": False, "include_bias": False,
    "include_qkv_bias": False, "mask_token_id": 126336, "eos_token_id": 126081,
}  # fmt: skip


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the process that tries tokenizers (tests/models/test_probe.py): it takes seconds."""
    monkeypatch.setattr(probe, "probe", lambda *_: None)


@pytest.fixture
def llada_8b(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with nothing but a config.json, on a processor that has bfloat16."""
    monkeypatch.setattr(precision, "native_bfloat16", lambda: True)
    (tmp_path / "config.json").write_text(json.dumps(LLADA_8B))
    return tmp_path


def test_the_report_names_versions_devices_and_extras(cli: Run) -> None:
    result = cli("doctor")
    assert (result.exit_code, result.stderr) == (0, "")
    topics = {line[2:].split("  ")[0]: line for line in result.stdout.splitlines()}
    for name in ("dllm", "python", "torch", "transformers", "numpy", "cpu", "cpu batches", "nano",
                 "nano-ar"):  # fmt: skip
        assert name in topics
    assert torch.__version__.split("+")[0] in topics["torch"] and dllm.__version__ in topics["dllm"]
    assert "GiB" in topics["cpu"]


@pytest.mark.slow  # a compiler runs; tests/kernels have what it makes
def test_kernels_are_compiled_once_and_reported(
    cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def line(*options: str) -> str:
        cpu.library.cache_clear()
        lines = cli("doctor", *options).stdout.splitlines()
        return next((line for line in lines if line[2:].startswith("cpu kernels")), "")

    monkeypatch.setenv("DLLM_KERNELS", str(tmp_path))
    assert "PyTorch's" in line()
    made = line("--compile")
    if cpu.missing_features() or not made:  # an error: tests/kernels/test_cpu.py
        assert made == ""
    else:
        assert str(tmp_path) in made and line() == made
    monkeypatch.setenv("DLLM_KERNELS", "")
    cpu.library.cache_clear()


PROMISED = {  # the rows of docs/hardware.md: with and without packed products, oneDNN's, compiled
    ("AVX-512", True, True, False): "float32, bfloat16, int8, int4",
    ("AVX2, compiled", True, False, True): "float32, bfloat16, int8, int4",
    ("AVX2", True, False, False): "float32 only",
    ("NEON, compiled", False, False, True): "float32, bfloat16, int8, int4",
    ("NEON", False, False, False): "not promised on this processor",
}


@pytest.mark.parametrize(("unit", "text"), PROMISED.items())
def test_what_is_promised_of_batches_is_said(
    monkeypatch: pytest.MonkeyPatch, unit: tuple[str, bool, bool, bool], text: str
) -> None:
    _, onednn, bfloat16, compiled = unit
    native = (torch.float32, torch.bfloat16)[: 1 + bfloat16]
    monkeypatch.setattr(linear, "onednn", lambda: onednn)
    monkeypatch.setattr(linear, "_native", lambda: native)
    monkeypatch.setattr(linear, "library", lambda: object() if compiled else None)
    said = module.batches()
    assert (said.topic, said.text) == ("cpu batches", f"bitwise identical: {text}")


def test_extras_come_with_the_command_that_installs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    declared = [
        "torch>=2.9", 'flash-attn>=2.7; extra == "flash"', "fastapi>=0.1; extra == 'serve'",
        'dllm[test]; extra == "serve"', 'pytest>=8; extra == "test"', 'dllm[test]; extra == "dev"',
        'openai; extra == "clients"',
    ]  # fmt: skip
    monkeypatch.setattr(errors, "requires", lambda name: declared)
    installed = {"fastapi": "0.9"}
    monkeypatch.setattr(module, "distribution_version", installed.get)
    flash, serve = module.extras()
    assert flash.topic == "extra flash" and "'.[flash]'" in flash.text
    assert "CUDA" in flash.text and flash.state != GOOD
    assert (serve.text, serve.state) == ("fastapi 0.9", GOOD)


def test_a_checkout_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> list[str]:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(errors, "requires", unknown)
    (found,) = module.extras()
    assert "not installed" in found.text and found.state != GOOD
    assert errors.missing_module(ModuleNotFoundError(name="torch")) is None


def test_a_checkpoint_is_measured_exactly(
    tiny: dllm.DiffusionModel, tiny_folder: Path, tmp_path: Path
) -> None:
    needs = footprint(open_checkpoint(tiny_folder))
    assert needs.parameters == tiny.hf.num_parameters()
    assert (needs.dtype, needs.weights) == ("float32", 4 * needs.parameters)
    assert needs.context == 128
    assert needs.keys_values == 2 * 2 * (2 * 8) * 128 * 4  # k and v, layers, heads, context, bytes
    config = json.loads((tiny_folder / "config.json").read_text()) | {"dtype": "float64"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    twice = footprint(open_checkpoint(tmp_path))
    assert (twice.weights, twice.keys_values) == (2 * needs.weights, 2 * needs.keys_values)


def test_an_official_config_is_enough(llada_8b: Path) -> None:
    needs = footprint(open_checkpoint(llada_8b))
    assert needs.parameters == 8_015_581_184
    assert (needs.dtype, needs.weights) == ("bfloat16", 2 * needs.parameters)
    assert needs.keys_values == 2 * 32 * 4096 * 4096 * 2


@pytest.mark.parametrize(("free", "code"), some([(12 * 2**30, 1), (80 * 2**30, 0)], 1))
def test_whether_it_fits(
    cli: Run, llada_8b: Path, monkeypatch: pytest.MonkeyPatch, free: int, code: int
) -> None:
    monkeypatch.setattr(module, "device_memory", lambda: ("a GPU", free))
    result = cli("doctor", "--model", str(llada_8b))
    assert result.exit_code == code
    assert "8.02B" in result.stdout and "14.9 GiB in bfloat16" in result.stdout
    assert "not needed and never run" in result.stdout
    assert ("does not fit" in result.stdout) == (code == 1)
    assert ("load_in_4bit" in result.stdout) == ("device_map" in result.stdout) == (code == 1)
    assert "--dtype bfloat16" not in result.stdout


def test_weights_that_rounding_leaves_as_they_are_are_said() -> None:
    plain = Footprint(1000, "bfloat16", 2000, 10, 100)
    mixture = Footprint(1000, "bfloat16", 2000, 10, 100, {"int8": 1950, "int4": 1920})
    for needs, count in ((plain, 0), (mixture, 2)):
        texts = [finding.text for finding in fit(needs, "the main memory", 1000)]
        assert sum("experts are not rounded" in text for text in texts) == count


def test_products_are_timed_as_networks_multiply(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch multiplies bfloat16 at a hundredth of our speed on processors with AVX2 only."""
    used, own = list[Any](), linear.Packed.parts
    monkeypatch.setattr(linear.Packed, "parts", lambda *given: used.append(own(*given)) or used[-1])
    assert measure(torch.device("cpu"), torch.float32).speed > 0
    assert used and (None not in used) == linear.available()


def test_what_bounds_a_step(llada_8b: Path) -> None:
    """The numbers of docs/kernels.md, for an H100."""
    needs = footprint(open_checkpoint(str(llada_8b)))
    h100 = Device(3.35e12, 989e12, 5e-6)
    steps = {rows: step_of(needs, rows) for rows in (1, 32)}
    assert [round(s.moved / 1e9, 1) for s in steps.values()] == [15.3, 23.6]
    assert [round(s.operations / 1e12, 2) for s in steps.values()] == [0.49, 15.63]
    times = steps[32].seconds(h100)
    assert {name: round(1e3 * t, 1) for name, t in times.items()} == {
        "launches": 2.4, "memory": 7.0, "products": 15.8,
    }  # fmt: skip


def test_a_position_is_multiplied_with_its_own_experts(tmp_path: Path) -> None:
    config = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 32,
        "intermediate_size": 64, "moe_intermediate_size": 16, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 100,
        "num_experts": 8, "num_experts_per_tok": 2, "tie_word_embeddings": False,
        "max_position_embeddings": 64, "dtype": "float32",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    needs = footprint(open_checkpoint(str(tmp_path)))
    experts = 2 * 8 * 3 * 32 * 16
    assert needs.read == needs.parameters - 100 * 32
    assert needs.active == needs.read - experts * 6 // 8
    assert needs.copies == (4 * experts if linear.available() else 0)  # which its file holds apart
    own = config | {"dllm": {"family": "autoregressive"}}
    (tmp_path / "config.json").write_text(json.dumps(own))
    assert footprint(open_checkpoint(str(tmp_path))).copies == 0


def test_no_copy_of_a_head_that_every_step_reads_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = Path(__file__).parents[1] / "golden/data/dgemma-tiny/config.json"
    config = json.loads(tiny.read_text()) | {"dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(sizes, "loaded_dtype", lambda *_: "float32")
    counted = []
    whole = sizes.copied_bytes
    monkeypatch.setattr(
        sizes, "copied_bytes", lambda *asked: counted.append(whole(*asked[:2])) or whole(*asked)
    )
    needs = footprint(open_checkpoint(str(tmp_path)))
    text = config["text_config"]
    head = 4 * text["vocab_size"] * text["hidden_size"]
    assert needs.copies == max(0, counted[0] - head)  # none at all where nothing is packed


def test_this_machine_and_its_steps_are_told() -> None:
    found = {f.topic: f.text for f in examine("nano", ("here", 2**40))}
    assert "GFLOP/s in float32" in found["this machine"]
    kinds = "launches", "memory", "products"
    times = ", ".join(rf"{kind} [\d.]+" for kind in kinds)
    told = rf"bound by ({'|'.join(kinds)}); ms: {times}"  # by which, depends on the machine
    assert re.fullmatch(told, found["step, rows: 32"])


@pytest.mark.slow
def test_a_mask_is_none_where_the_noise_is_uniform() -> None:
    folder = Path(__file__).parents[2] / "examples" / "nano-uniform"
    (mask,) = [f for f in examine(str(folder), ("here", 2**40)) if f.topic == "mask token"]
    assert mask.text == "none: the noise is uniform, ends (0,)"


def test_a_float32_model_that_does_not_fit_is_offered_bfloat16() -> None:
    needs = Footprint(1000, "float32", 4000, 10, 100)
    states = {finding.text.split(":")[0]: finding.state for finding in fit(needs, "a GPU", 4100)}
    assert "--dtype bfloat16" in states
    assert next(iter(states.values())) == BAD


@pytest.mark.parametrize("architecture", ["DiffusionGemmaModel", "Unheard"])
def test_an_architecture_that_nothing_reads(llada_8b: Path, architecture: str) -> None:
    config = LLADA_8B | {"architectures": [architecture]}
    (llada_8b / "config.json").write_text(json.dumps(config))
    findings = list(examine(str(llada_8b), ("a GPU", 2**40)))
    assert findings[-1].state == BAD and architecture in findings[-1].text


@pytest.mark.slow
def test_an_autoregressive_model(tmp_path: Path) -> None:
    config = {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 32,
        "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 100, "max_position_embeddings": 64,
        "tie_word_embeddings": True, "dtype": "float16",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = {f.topic: f for f in examine(str(tmp_path), ("a GPU", 2**30))}
    assert result["family"].text == "autoregressive" and result["fits"].state == GOOD
    assert "float16" in result["weights"].text


@pytest.mark.slow
def test_what_is_wrong_with_the_files(cli: Run, tiny_folder: Path, tmp_path: Path) -> None:
    """Said before `generate` fails, or answers nonsense."""
    folder = tmp_path / "copy"
    shutil.copytree(tiny_folder, folder)
    whole = cli("doctor", "-m", str(folder))
    assert whole.exit_code == 0 and "complete, every number finite" in whole.stdout
    for name in ("tokenizer.json", "vocab.json"):
        (folder / name).unlink(missing_ok=True)
    bare = cli("doctor", "-m", str(folder))
    assert bare.exit_code == 0 and "none: text needs one (--tokenizer" in bare.stdout
    say = ("generate", "Copy: Tom.", "--max-new-tokens", "8", "--block-length", "8")
    assert "without a tokenizer" in cli(*say, "-m", str(folder)).stderr
    lent = cli(*say, "-m", str(folder), "--tokenizer", str(tiny_folder))
    assert lent.exit_code == 0 and lent.stdout == cli(*say, "-m", str(tiny_folder)).stdout
    weights = load_file(folder / "model.safetensors")
    name = sorted(weights)[0]
    weights[name].view(-1)[0] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    broken = cli("doctor", "-m", str(folder))
    assert broken.exit_code == 1
    assert f"NaN or infinite numbers in {name}" in broken.stdout
    weights.pop(name)
    save_file({"a": torch.zeros(3)}, folder / "model.safetensors", metadata={"format": "pt"})
    empty = cli("doctor", "-m", str(folder))
    assert empty.exit_code == 1 and "weights are missing" in empty.stdout
