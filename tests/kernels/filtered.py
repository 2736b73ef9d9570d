"""Token statistics whose filters are named one by one, as examples and strategies name them."""

from typing import Any

import torch

from dllm.kernels import statistics
from dllm.kernels.statistics import Filters, TokenStatistics
from dllm.kernels.statistics.result import Options


def gathered(named: dict[str, Any]) -> dict[str, Any]:
    """The same arguments with one value in place of the filters among them."""
    rest = {name: value for name, value in named.items() if name not in Filters._fields}
    filters = {name: value for name, value in named.items() if name in Filters._fields}
    return {**rest, "filters": Filters(**filters)} if filters else rest


def token_statistics(hidden: torch.Tensor, head: Any, **named: Any) -> TokenStatistics:
    return statistics.token_statistics(hidden, head, **gathered(named))


def logits_statistics(logits: torch.Tensor, **named: Any) -> TokenStatistics:
    return statistics.logits_statistics(logits, **gathered(named))


def options(**named: Any) -> Options:
    return Options(**gathered(named))
