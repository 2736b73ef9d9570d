"""One token and one pair of numbers after the other: the oracle."""

import torch


def rotate_scatter(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
    slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """As `dllm.kernels.rotation.rotate_scatter`."""
    out = torch.empty_like(q, dtype=keys.dtype)
    for i, slot in enumerate(slots.tolist()):
        for head in range(len(q)):
            out[head, i] = turned(q[head, i], cos[i], sin[i])
        for head in range(len(k)):
            keys[head, slot] = turned(k[head, i], cos[i], sin[i])
            values[head, slot] = v[head, i]
    return out


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """A head (dh,) turned: number j together with number j + dh / 2."""
    half, kind = len(x) // 2, torch.promote_types(x.dtype, cos.dtype)

    def rounded(number: float) -> float:
        return float(torch.tensor(number, dtype=torch.float64).to(kind))

    out = torch.empty(len(x), dtype=torch.float64, device=x.device)
    for j in range(half):
        a, b = float(x[j]), float(x[j + half])
        one, two = rounded(a * float(cos[j])), rounded(-b * float(sin[j]))
        out[j] = rounded(one + two)
        one, two = rounded(b * float(cos[j + half])), rounded(a * float(sin[j + half]))
        out[j + half] = rounded(one + two)
    return out
