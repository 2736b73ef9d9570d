"""Packed attention equals separate calls; LLaDA rotates in float32."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import flex_attention

import dllm
from dllm.models import DiffusionModel, Segment, load
from dllm.models.attention import attend

PREPARED = torch.empty(1, 1, 1, 1)  # a 4-D mask: transformers takes it as is


def ids_of(*lengths: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 250, (1, n), generator=generator) for n in lengths]


def packed(
    model: DiffusionModel, rows: list[torch.Tensor], segments: list[Segment]
) -> torch.Tensor:
    positions = torch.cat([torch.arange(row.shape[1]) for row in rows])[None]
    with torch.inference_mode():
        hidden = model.backbone(
            torch.cat(rows, 1), position_ids=positions, attention_mask=PREPARED, segments=segments
        )[0]
        logits: torch.Tensor = model.head(hidden)
    return logits


@pytest.fixture
def uncompiled_flex(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention as PyTorch writes it down: compiling it takes a CPU a minute."""
    monkeypatch.setattr(
        "transformers.integrations.flex_attention.compile_friendly_flex_attention",
        lambda *args, training, **kwargs: flex_attention(*args, **kwargs),
    )


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of how transformers makes its masks
@pytest.mark.usefixtures("uncompiled_flex")
@pytest.mark.parametrize(
    "attention", ["sdpa", "eager", pytest.param("flex_attention", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", ["llada-tiny", "dream-tiny"])  # dream has grouped heads
def test_packed_rows_equal_rows_alone(checkpoints: Path, name: str, attention: str) -> None:
    model = load(checkpoints / name, attn_implementation=attention)
    rows = ids_of(11, 7, 9, 9)
    bounds = [slice(0, 11), slice(11, 18), slice(18, 27), slice(27, 36)]
    shuffled = torch.randperm(7, generator=torch.Generator().manual_seed(1)) + 11
    grouped = Segment(slice(18, 36), slice(18, 27), rows=2, key_stride=9)
    variants = {
        "ragged": [Segment(b, b) for b in bounds],
        "key list": [Segment(bounds[0], bounds[0]), Segment(bounds[1], shuffled), grouped],
        "grouped list": [
            *(Segment(b, b) for b in bounds[:2]),
            Segment(slice(18, 36), torch.arange(18, 27), rows=2, key_stride=9),
        ],
    }
    with torch.inference_mode():
        alone = torch.cat([model.hf(row).logits for row in rows], 1)
    for kind, segments in variants.items():
        error = (packed(model, rows, segments) - alone).abs().max()
        assert error < 1e-4, kind


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the compiler's own
def test_compiled_flex_attention_decides_what_sdpa_does(checkpoints: Path) -> None:
    plain, flex = (
        load(checkpoints / "dream-tiny", attn_implementation=a) for a in ("sdpa", "flex_attention")
    )
    prompts = [[5, 6, 7, 8], [9, 4, 3, 2, 1, 7]]
    cases: list[dict[str, Any]] = [{"cache": "dual"}, {"cache": "window_diffusion"}]
    for options in cases:
        options |= {"max_new_tokens": 16, "block_length": 8}
        a, b = (dllm.generate(model, prompts, **options) for model in (plain, flex))
        assert [r.tokens for r in a] == [r.tokens for r in b]


def test_rows_read_any_keys(dream: DiffusionModel) -> None:
    """Fewer queries than keys, gaps, shared keys: against a masked call on the same tensors."""
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(1, 4, 10, 16, generator=generator)
    k, v = torch.randn(2, 1, 2, 40, 16, generator=generator)
    segments = [
        Segment(slice(0, 3), slice(5, 20)),
        Segment(slice(3, 5), torch.tensor([0, 7, 31])),
        Segment(slice(5, 9), slice(2, 12), rows=2, key_stride=20),
    ]
    allowed = torch.zeros(10, 40, dtype=torch.bool)
    allowed[0:3, 5:20] = True
    allowed[3:5, [0, 7, 31]] = True
    allowed[5:7, 2:12] = True
    allowed[7:9, 22:32] = True
    module: Any = dream.hf.model.layers[0].self_attn
    got, _ = attend(module, q, k, v, None, base="sdpa", scaling=0.25, segments=segments)
    many = (x.repeat_interleave(2, 1) for x in (k, v))
    wanted = F.scaled_dot_product_attention(q, *many, attn_mask=allowed[None, None], scale=0.25)
    torch.testing.assert_close(got[:, :9], wanted.transpose(1, 2)[:, :9], rtol=0, atol=1e-6)
    assert got.shape == (1, 10, 4, 16) and not got[:, 9].any()


def test_shared_keys(dream: DiffusionModel) -> None:
    q, k = torch.randn(1, 4, 6, 16), torch.randn(1, 2, 8, 16)
    module: Any = dream.hf.model.layers[0].self_attn
    both = [Segment(slice(0, 6), slice(0, 8), rows=2)]
    got, _ = attend(module, q, k, k, None, base="sdpa", segments=both)
    wanted, _ = attend(module, q, k, k, None, base="sdpa")
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-6)


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def by_hand(model: DiffusionModel, ids: torch.Tensor, rotation: torch.dtype) -> torch.Tensor:
    """LLaDA from its weights alone, with queries and keys rotated in ``rotation``."""
    w = model.hf.state_dict()
    x = w["model.embed_tokens.weight"][ids]
    length, heads = ids.shape[1], 4
    frequency = 1.0 / 500000.0 ** (torch.arange(0, 16, 2) / 16)
    angle = (torch.arange(length)[:, None] * frequency).repeat(1, 2)
    cos, sin = angle.cos().to(rotation), angle.sin().to(rotation)

    def rotate(t: torch.Tensor) -> torch.Tensor:
        t = t.to(rotation)
        half = torch.cat((-t[..., 8:], t[..., :8]), -1)
        return (t * cos + half * sin).to(x.dtype)

    for i in range(3):
        layer = f"model.layers.{i}."
        h = norm(x, w[layer + "input_layernorm.weight"])
        qkv = (F.linear(h, w[f"{layer}self_attn.{n}_proj.weight"]) for n in "qkv")
        q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in qkv)
        a = F.scaled_dot_product_attention(rotate(q), rotate(k), v).transpose(1, 2).flatten(2)
        x = x + F.linear(a, w[layer + "self_attn.o_proj.weight"])
        h = norm(x, w[layer + "post_attention_layernorm.weight"])
        gate, up = (F.linear(h, w[f"{layer}mlp.{n}_proj.weight"]) for n in ("gate", "up"))
        x = x + F.linear(F.silu(gate) * up, w[layer + "mlp.down_proj.weight"])
    return F.linear(norm(x, w["model.norm.weight"]), w["lm_head.weight"])


@pytest.mark.usefixtures("uncompiled")
def test_bfloat16_llada_rotates_in_float32(checkpoints: Path) -> None:
    model = load(checkpoints / "llada-tiny", dtype="bfloat16")
    (ids,) = ids_of(300)
    with torch.inference_mode():
        logits = model.hf(ids).logits
    assert logits.dtype == torch.bfloat16
    exact = (logits - by_hand(model, ids, torch.float32)).abs().max()
    rounded = (logits - by_hand(model, ids, torch.bfloat16)).abs().max()
    assert exact == 0 and rounded > 0.05


def test_casting_a_whole_network_keeps_its_frequencies(checkpoints: Path) -> None:
    exact = load(checkpoints / "llada-tiny", dtype="bfloat16")
    network: Any = load(checkpoints / "llada-tiny").hf
    cast = load(network, dtype="bfloat16", family="llada", mask_token_id=255)
    (ids,) = ids_of(200)
    with torch.inference_mode():
        assert torch.equal(cast.hf(ids).logits, exact.hf(ids).logits)


def test_a_base_gets_no_options_that_are_not_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []

    def base(module: Any, q: Any, k: Any, v: Any, mask: Any, **options: Any) -> Any:
        given.append(options)
        return q.transpose(1, 2), None

    monkeypatch.setattr("dllm.models.attention._base", lambda name, module: base)
    x, segments = torch.zeros(1, 2, 3, 4), [Segment(slice(0, 3), slice(0, 3))]
    attend(
        torch.nn.Module(), x, x, x, None, base="eager", scaling=1.0, segments=segments,
        scored=torch.tensor([2]), position_ids=torch.arange(3)[None],
    )  # fmt: skip
    assert given == [{"scaling": 1.0, "dropout": 0.0, "is_causal": False}]
