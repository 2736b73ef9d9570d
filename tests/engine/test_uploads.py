"""What a step moves between host and device, whatever its rows: one array up, one back."""

import sys
from typing import Any
from unittest.mock import MagicMock, patch

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import dllm
from dllm import cache as caches
from dllm.core.canvas import Canvas
from dllm.core.config import GenerationConfig
from dllm.engine import Engine, MaskedRecipe, forward, packing
from dllm.kernels import transfer
from dllm.samplers import compose

from ..decoding import canvas_for
from ..thin import some

WAITS = ("aten._local_scalar_dense.default", "aten.nonzero.default", "aten.item.default")


class Watch(TorchDispatchMode):
    """Operators for which the host waits for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if str(function) in WAITS:
            self.waits.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("rows", some([32, 1], 1))
@pytest.mark.parametrize(
    ("spec", "settings"),
    [
        ("fixed(2)", {}),
        ("fixed(2)", {"temperature": 0.8, "seed": 3}),
        ("fixed(2)", {"temperature": 0.8, "top_p": 0.9}),
        ("credit+fixed(2)", {}),  # asks for ids
    ],
)
@pytest.mark.parametrize("cache", ["none", "dual"])
def test_a_step_moves_one_array_each_way(
    tiny: dllm.DiffusionModel, rows: int, spec: str, settings: dict[str, Any], cache: str
) -> None:
    """Also in the first step, whose layouts go up, too."""
    recipe = MaskedRecipe(compose(spec), config=GenerationConfig(**settings))
    try:
        Engine(tiny, caches.compose(cache)).check(recipe)
    except dllm.ConfigError:
        pytest.skip("they do not go together")
    engine = Engine(tiny, caches.compose(cache), max_batch_tokens=100_000)
    for row in range(rows):
        engine.admit(canvas_for(tiny, np.arange(5, 9 + row % 3), 8, row=row), recipe)
    up, back = list[int](), list[int]()
    upload, to_host = packing.upload, forward.ToHost

    def counted(count: list[int], function: Any) -> Any:
        def call(*args: Any) -> Any:
            count.append(1)
            return function(*args)

        return call

    with patch.object(packing, "upload", counted(up, upload)), \
         patch.object(forward, "ToHost", counted(back, to_host)), Watch() as watch:  # fmt: skip
        for step in range(1, 4):
            assert len(engine.step()) == rows
            assert (len(up), len(back)) == (step, step)
    assert not watch.waits


MIXED: list[tuple[str, dict[str, Any]]] = [
    ("fixed(2)", {}),
    ("credit+fixed(2)", {}),
    ("fixed(2)", {"temperature": 0.8, "seed": 3}),
    ("fixed(2)", {"temperature": 0.8, "top_p": 0.9}),
    ("fixed(2)", {"min_new_tokens": 3}),
    ("fixed(2)", {"cfg_scale": 1.5}),
    ("fixed(2)", {"temperature": 0.8, "cfg_scale": 0.5}),
    ("fixed(1)", {}),
]


@pytest.mark.parametrize("cache", some(["dual", "none"], 1))
def test_rows_of_unlike_options_share_both_copies(tiny: dllm.DiffusionModel, cache: str) -> None:
    """And each has what it has alone.  Nothing else becomes a tensor on the way."""
    recipes = [MaskedRecipe(compose(s), config=GenerationConfig(**how)) for s, how in MIXED * 2]

    def canvas(row: int) -> Canvas:
        return canvas_for(tiny, np.arange(5, 9 + row % 3), 8, row=row)

    alone = []
    for row, recipe in enumerate(recipes):
        own = canvas(row)
        for _ in Engine(tiny, caches.compose(cache)).run([own], recipe):
            pass
        alone.append(own)
    engine = Engine(tiny, caches.compose(cache), max_batch_tokens=100_000)
    together = [canvas(row) for row in range(len(recipes))]
    for one, recipe in zip(together, recipes, strict=True):
        engine.admit(one, recipe)
    up, back, made = list[int](), list[int](), list[int]()
    upload, to_host, from_numpy = packing.upload, forward.ToHost, torch.from_numpy

    def counted(count: list[int], function: Any) -> Any:
        return lambda *args: count.append(1) or function(*args)  # type: ignore[func-returns-value]

    def counted_tensor(array: Any) -> Any:
        caller = sys._getframe(1).f_globals["__name__"]
        if caller.startswith("dllm.engine"):
            made.append(1)
        return from_numpy(array)

    with patch.object(packing, "upload", counted(up, upload)), \
         patch.object(forward, "ToHost", counted(back, to_host)), \
         patch.object(torch, "from_numpy", counted_tensor), Watch() as watch:  # fmt: skip
        step = 0
        while engine.live:
            step += 1
            engine.step()
            assert (len(up), len(back), len(made)) == (step, step, 0)
    assert not watch.waits
    for one, other in zip(alone, together, strict=True):
        assert (one.tokens == other.tokens).all() and (one.commit_step == other.commit_step).all()
        np.testing.assert_allclose(one.logprob, other.logprob, rtol=1e-4, atol=1e-6)


def test_what_goes_up_together_is_cut_apart() -> None:
    arrays = [
        np.arange(3), np.arange(8).reshape(2, 4), np.arange(0), np.arange(5)[::-1],
        np.ones((3, 5), np.bool_), np.float32([[1.5], [2.5], [-0.0]]), np.array([2**40, -1]),
    ]  # fmt: skip
    cpu = transfer.upload(arrays, torch.device("cpu"))
    elsewhere = transfer.cut(transfer.joined(cpu), cpu)  # as on any other device
    for array, one, other in zip(arrays, cpu, elsewhere, strict=True):
        assert (one.numpy() == array).all() and one.shape == array.shape
        assert other.dtype == one.dtype and torch.equal(one, other)


def test_what_comes_back_is_waited_for_on_its_own_device() -> None:
    """An event of the present device says nothing about the copies of another."""
    far = MagicMock(device=torch.device("cuda:1"))
    with patch.multiple(transfer, joined=lambda _: far, cut=MagicMock()), patch("torch.empty"), \
         patch("torch.cuda.Event") as event, patch("torch.cuda.current_stream", str):  # fmt: skip
        transfer.ToHost([far])
    event.return_value.record.assert_called_once_with("cuda:1")
