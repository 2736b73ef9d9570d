"""``dllm doctor --serve --on CARD``: arithmetic on data sheets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dllm.cli.capacity import CARDS, PER_STEP, ROWS, Card, table, tokens_per_second
from dllm.errors import UnknownNameError
from dllm.eval.cost import Shape

from .conftest import Run
from .test_doctor import LLADA_8B

PAGE = Path(__file__).parents[2] / "docs" / "serving-reference.md"


@pytest.fixture
def llada(tmp_path: Path) -> Path:
    folder = tmp_path / "LLaDA-8B-Instruct"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLADA_8B))
    return folder


def test_a_product_is_bound_by_reading_and_then_by_arithmetic() -> None:
    shape = Shape(100, 1, 1, 1, 100, 50, 10)
    rates = Card(operations=1e6, bandwidth=1e4, memory=1e6).rates(shape)  # both at 100 rows
    reading = 2 * 100 * 50 / 1e4
    for rows in (1, 7, 99, 100):
        assert 2 * rows * 5000 / rates.at(rows) == pytest.approx(reading)
    for rows in (101, 250, 5000):
        assert rates.at(rows) == pytest.approx(1e6)


def test_llada_on_an_h100(llada: Path) -> None:
    """By hand: 14 GFLOP per position, 1.04 GFLOP per scored one, 0.5 MiB of keys and values."""
    lines = table(str(llada), 512, 256, 0, "H100")
    assert "in bfloat16 on H100" in lines[0]
    row = 2 * 32 * 4096 * 2 * 768
    fit = (80e9 * 0.9 - 2 * 8.016e9) / row
    assert int(lines[1].split()[3]) == pytest.approx(fit, abs=1)
    first = lines[3].split()
    layers = 32 * (4 * 4096**2 + 3 * 4096 * 12288)
    read = 2 * 4096 * 126464 / 3.35e12  # the head scores 32 positions: it is only read
    step = (2 * 768 * layers + 4 * 768 * 768 * 4096 * 32) / 989e12 + read
    assert float(first[1]) == pytest.approx(1000 * step, abs=0.06)
    assert int(first[3]) == pytest.approx(PER_STEP / step, rel=0.01)
    last = lines[3 + ROWS.index(64)].split()
    assert float(last[3].replace(",", "")) < 1.2 * int(first[3])  # whole canvases gain nothing
    assert float(last[6].replace(",", "")) > 2.9 * float(first[6].replace(",", ""))


def test_the_table_of_the_documentation(llada: Path) -> None:
    lines = table(str(llada), 512, 256, 0, "H100")
    assert "\n".join(lines) in PAGE.read_text(encoding="utf-8")


def test_the_option(llada: Path, cli: Run) -> None:
    how = ("doctor", "-m", str(llada), "--serve", "--on")
    done = cli(*how, "H200", "--prompt-tokens", "64", "--new-tokens", "64")
    assert done.exit_code == 0 and done.stdout.startswith("LLaDA-8B-Instruct in bfloat16 on H200")
    assert cli(*how, "h100").exit_code == 2
    assert cli("doctor", "-m", str(llada), "--on", "H100").exit_code == 2
    with pytest.raises(UnknownNameError, match="did you mean 'H100'"):
        table(str(llada), 512, 256, 0, "H10")
    assert all(100 < card.operations / card.bandwidth < 512 for card in CARDS.values())


@pytest.mark.slow
def test_a_speed_is_predicted_in_every_precision(tmp_path: Path) -> None:
    """From config.json alone, before there are weights; more than a tenth and less than ten times
    what the shape's operations take at 100 billion a second."""
    from dllm.models.checkpoint import open_checkpoint

    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 576,
        "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "vocab_size": 49152, "max_position_embeddings": 2048, "mask_token_id": 5, "eos_token_id": 0,
        "dllm": {"family": "llada"},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    plain, cached = tokens_per_second(open_checkpoint(tmp_path), "int8", 2048) or (0, 0)
    operations = 2 * 768 * 30 * (4 * 576**2 + 3 * 576 * 1536)
    expected = 4 / (operations / 100e9)
    assert expected / 10 < plain < 10 * expected and cached > 2 * plain
