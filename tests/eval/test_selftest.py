"""``dllm doctor --selftest`` and ``--serve``, on a CPU."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from dllm.cli.app import app
from dllm.eval import selftest
from dllm.eval.selftest import Check, report
from dllm.kernels import linear

FIELDS = {
    "architectures": ["A2DLlamaLMHeadModel"], "model_type": "a2d-llama", "vocab_size": 128,
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
    "hidden_act": "silu", "tie_word_embeddings": False, "rope_theta": 1e4, "mask_token_id": 127,
    "eos_token_id": 126, "torch_dtype": "float32",
}  # fmt: skip


@pytest.mark.slow
def test_everything_agrees_here_and_is_one_block_of_text() -> None:
    result = CliRunner().invoke(app, ["doctor", "--selftest"])
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == "dllm selftest" and torch.__version__ in lines[1]
    names = " ".join(lines[2:])
    for what in ("token statistics, torch, bfloat16", "rotation, torch", "keyed noise",
                 "attention, eager", "padded steps",
                 "batch = alone, float32, cache dual"):  # fmt: skip
        assert f"ok       {what}" in names
    assert f"{'ok      ' if linear.available() else 'skipped '} packed weights" in names
    assert "skipped  attention, flash_attention_2: no GPU" in names and "DIFFERS" not in names


def test_a_wrong_kernel_differs_and_the_switch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults put in on purpose: each turns exactly its own check."""
    right = selftest.token_statistics

    def wrong(*given: Any, backend: str, **named: Any) -> Any:
        result = right(*given, backend=backend, **named)
        return result if backend == "naive" else replace(result, token=result.token + 1)

    monkeypatch.setattr(selftest, "token_statistics", wrong)
    assert all(check.same is False for check in selftest.statistics("cpu"))
    if linear.available():
        product = linear.product
        monkeypatch.setattr(
            linear, "product", lambda x, *rest: product(x, *rest) * (1 + 0.1 * (len(x) > 1))
        )
        both = list(selftest.products("cpu"))
        assert len(both) == len(linear.dtypes()) and all(
            "mkldnn.enabled = False" in str(check) for check in both
        )
        monkeypatch.setattr(linear, "product", product)
    decode = selftest._decode
    monkeypatch.setattr(
        selftest, "_decode",
        lambda *given, **named: [ids[1:] for ids in decode(*given, **named)]
        if named.get("cuda_graphs") else decode(*given, **named),
    )  # fmt: skip
    (check,) = selftest.padded_steps("cpu")
    assert check.same is False and "avoid it with cuda_graphs=False" in str(check)


def test_a_check_that_raises_counts_as_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: str) -> Any:
        raise RuntimeError("no such\nkernel")
        yield

    broken.__name__ = "rotation"
    for name in ("statistics", "random_numbers", "attention", "products",
                 "padded_steps", "batches"):  # fmt: skip
        monkeypatch.setattr(selftest, name, lambda _: iter(()))
    monkeypatch.setattr(selftest, "rotation", broken)
    checks = list(selftest.run("cpu"))
    assert [(c.name, c.same) for c in checks] == [("rotation", False)]
    assert "no such kernel" in report(checks)
    monkeypatch.setattr(selftest, "run", lambda: iter([Check("x", False, "1 differs", "y=1")]))
    assert CliRunner().invoke(app, ["doctor", "--selftest"]).exit_code == 1
