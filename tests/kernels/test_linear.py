"""Products by oneDNN and by compiled kernels: PyTorch's numbers, the same for a row alone."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from dllm.kernels import linear
from dllm.kernels.linear import Packed, pack, packed_of

from ..thin import covering
from .filtered import logits_statistics, token_statistics

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(192, 512), (512, 192), (576, 1536), (1536, 576), (2048, 130)]  # inputs, outputs


def layer(inputs: int, outputs: int, dtype: torch.dtype, bias: bool = False) -> nn.Linear:
    torch.manual_seed(inputs + outputs)
    result = nn.Linear(inputs, outputs, bias=bias).to(dtype)
    pack(result)
    return result


@pytest.fixture(autouse=True)
def can(request: pytest.FixtureRequest) -> None:
    """oneDNN knows bfloat16 with AVX-512 only, and is not asked where there is no AVX2."""
    if "kernels" in request.fixturenames:
        request.getfixturevalue("kernels")
    if not linear.available():
        pytest.skip("no AVX2, or no oneDNN")
    params = getattr(request.node, "callspec", None)
    if params and params.params.get("dtype", torch.float32) not in linear.dtypes():
        pytest.skip("no products in bfloat16")


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("shape", "dtype", "bias"), covering(SHAPES, DTYPES, [False, True]))
def test_the_numbers_are_those_of_pytorch(
    shape: tuple[int, int], dtype: torch.dtype, bias: bool
) -> None:
    inputs, outputs = shape
    packed = layer(inputs, outputs, dtype, bias)
    x = torch.randn(3, 7, inputs).to(dtype)
    with torch.inference_mode():
        exact = x.double() @ packed.weight.double().T
        exact = exact if packed.bias is None else exact + packed.bias.double()
        result = packed(x)
    assert result.dtype == dtype and result.shape == (3, 7, outputs)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(result.double(), exact, rtol=tolerance, atol=tolerance)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("shape", "dtype"), covering(SHAPES, DTYPES))
def test_a_row_does_not_depend_on_the_others(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """To the last bit, for any number of rows, with a copy of the weight and without."""
    inputs, outputs = shape
    packed, x = layer(inputs, outputs, dtype), torch.randn(300, inputs).to(dtype)
    with torch.inference_mode():
        whole = packed(x)
        for rows in (*range(1, 20), 31, 32, 33, 64, 65, 127, 256, 299):
            for first in {0, 1, 300 - rows}:
                here = slice(first, first + rows)
                assert torch.equal(packed(x[here]), whole[here]), (rows, first)
        uncopied = Packed(copy=False)
        assert torch.equal(linear.linear(x, packed.weight, None, uncopied), whole)
        assert torch.equal(linear.linear(x[5:6], packed.weight, None, uncopied), whole[5:6])


@pytest.mark.usefixtures("kernels")
def test_a_changed_weight_is_multiplied_as_it_is_now() -> None:
    packed, x = layer(192, 512, torch.float32), torch.randn(4, 192)
    with torch.inference_mode():
        packed(x)
    with torch.no_grad():
        packed.weight.mul_(2)  # in place: its version says so
        torch.testing.assert_close(packed(x), x @ packed.weight.T)
        packed.weight = nn.Parameter(torch.randn(512, 192))
        torch.testing.assert_close(packed(x), x @ packed.weight.T)
        packed.weight.data.add_(1)  # no version: a sample of its numbers says so
        found = packed_of(packed)
        assert found is not None
        found.check(packed.weight)
        torch.testing.assert_close(packed(x), x @ packed.weight.T, rtol=1e-5, atol=1e-4)
        packed.to(torch.float64)  # nothing for oneDNN: PyTorch multiplies
        torch.testing.assert_close(packed(x.double()), x.double() @ packed.weight.T)


@pytest.mark.usefixtures("kernels")
def test_training_copies_and_files_see_a_plain_layer() -> None:
    packed, x = layer(192, 512, torch.float32), torch.randn(4, 192)
    with torch.inference_mode():
        before = packed(x)
    packed(x).sum().backward()
    assert packed.weight.grad is not None
    assert set(packed.state_dict()) == {"weight"}
    for twin in (copy.deepcopy(packed), pickle.loads(pickle.dumps(packed))):
        own = packed_of(twin)
        assert own is not None and own is not packed_of(packed)
        with torch.no_grad():
            twin.weight.zero_()
            assert not twin(x).any()
            assert torch.equal(packed(x), before)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("top_k", [0, 5])
def test_statistics_of_a_packed_head(dtype: torch.dtype, top_k: int) -> None:
    """Those of its logits, and the same bits for a row alone: tiles do not depend on rows."""
    head = layer(64, 2 * linear.ROWS + 100, dtype, bias=True)  # three parts, the last one short
    hidden = torch.randn(40, 64).to(dtype) * 3
    how = {"top": 3, "top_k": top_k, "needs": ("entropy", "margin")}
    with torch.inference_mode():
        result = token_statistics(hidden, head, **how)  # type: ignore[arg-type]
        expected = logits_statistics(head(hidden), **how)  # type: ignore[arg-type]
        alone = token_statistics(hidden[9:10], head, **how)  # type: ignore[arg-type]
    for (name, a), (_, b), (_, c) in zip(
        result.columns(), expected.columns(), alone.columns(), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4, msg=name)
        assert torch.equal(a[9:10], c), name


class Products(TorchDispatchMode):
    """The numbers of rows that oneDNN multiplies."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name().startswith("mkldnn::_linear"):
            self.rows.add(len(args[0]))
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("uncompiled")
def test_few_numbers_of_rows_are_multiplied() -> None:
    """oneDNN keeps half a megabyte and more for each that it has met."""
    packed = layer(192, 96, torch.float32)
    with torch.inference_mode():
        with Products() as products:
            for rows in range(1, 1400, 9):
                x = torch.randn(rows, 192)
                assert packed(x).shape == (rows, 96)
        assert 10 < len(products.rows) < 40
        torch.testing.assert_close(packed(x), x @ packed.weight.T, rtol=1e-4, atol=1e-4)
        assert packed(x[:0]).shape == (0, 96)
