"""Statistics of full logits in float64, one row after the other: the oracle."""

import numpy as np
import numpy.typing as npt
import torch

from ..noise import naive as noise
from .filters import FAR, Filters
from .heads import Head, full_logits
from .result import Inputs, Options, TokenStatistics

Float64Array = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]


def token_statistics(
    hidden: torch.Tensor, head: Head, options: Options, inputs: Inputs
) -> TokenStatistics:
    """As `dllm.kernels.statistics.token_statistics`; materialises everything."""
    return logits_statistics(full_logits(hidden, head), options, inputs)


def logits_statistics(logits: torch.Tensor, options: Options, inputs: Inputs) -> TokenStatistics:
    """As `dllm.kernels.statistics.logits_statistics`; copies the logits to float64."""
    banned, where, keys = inputs.banned, inputs.banned_rows, inputs.noise_keys
    x = logits[:, : inputs.vocab_size].detach().to("cpu", torch.float64).numpy().copy()
    if banned is not None:
        for j, token in enumerate(np.asarray(banned).tolist()):
            if token < x.shape[1]:
                rows = slice(None) if where is None else where[:, j].cpu().numpy()
                x[rows, token] = -np.inf
    if inputs.lowered is not None:
        x[np.arange(len(x)), inputs.lowered[0].numpy()] -= inputs.lowered[1]
    chosen = None if inputs.select is None else inputs.select.tolist()
    shares = None if inputs.uniforms is None else inputs.uniforms.tolist()
    result = [
        _row(x[r], options, None if keys is None else keys[r].tolist(),
             None if chosen is None else chosen[r], None if shares is None else shares[r])
        for r in range(len(x))
    ]  # fmt: skip
    soft = None
    if inputs.embeddings is not None:
        p = torch.from_numpy(np.stack([np.exp(log_softmax(row)) for row in x]))
        soft = (p @ inputs.embeddings(0, x.shape[1]).double()).float()
    return TokenStatistics(
        soft=soft,
        **{
            name: torch.tensor(
                np.array([row[name] for row in result]),
                dtype=torch.int64 if name.endswith("token") else torch.float32,
                device=logits.device,
            )
            for name in result[0]
        },
    )


def _row(
    x: Float64Array, options: Options, key: list[int] | None, select: int | None,
    share: float | None = None,
) -> dict[str, object]:  # fmt: skip
    temperature = options.temperature
    warm = x / temperature if temperature > 0 else x
    keep = kept(warm, options.filters)
    filtered = np.where(keep, warm, -np.inf if options.classes is None else warm - FAR)
    token, drawn = int(np.argmax(x)), np.zeros(len(x))
    if temperature > 0 and key is not None:
        drawn = noise.gumbel(*key, np.arange(len(x))).astype(np.float64)
        token = int(np.argmax(filtered + drawn))
    if options.inverse and share is not None:
        p = np.exp(log_softmax(filtered))
        possible = filtered > -np.inf
        sums = ((1 - options.floor) * p + options.floor * possible / possible.sum()).cumsum()
        token = int((sums <= share * sums[-1]).sum())
    described = filtered if options.tempered else x
    logp = log_softmax(described)
    p = np.exp(logp)
    order = np.argsort(-described, kind="stable")
    first, second = np.append(-np.sort(-x), -np.inf)[:2]
    row: dict[str, object] = {"token": token, "logprob": logp[token]}
    result = {
        "margin": p[order[0]] - (p[order[1]] if len(x) > 1 else 0.0),
        "gap": 0.0 if first == -np.inf else first - second,
        "entropy": -np.sum(p[p > 0] * logp[p > 0]) + 0.0,
        "max_logprob": logp[order[0]],
    }
    row |= {name: value for name, value in result.items() if name in options.needs}
    if options.top:
        row |= {"top_token": order[: options.top], "top_logprob": logp[order[: options.top]]}
    if options.classes is not None:
        cut = filtered if options.filtered else warm
        row |= _classes(options, logp, cut, cut + drawn)
    if select is not None:
        row["select_logprob"] = logp[select] if 0 <= select < len(x) else -np.inf
    return row


def _classes(
    options: Options, logp: Float64Array, warm: Float64Array, ranked: Float64Array
) -> dict[str, object]:
    """Columns of the classes, one class after the other."""
    assert options.classes is not None
    of, count = options.classes.of[: len(logp)], options.classes.count
    token, chosen = np.zeros(count, np.int64), np.full(count, -np.inf)
    total, weight = chosen.copy(), chosen.copy()
    for c in range(count):
        ids = np.flatnonzero(of == c)
        if ids.size:
            token[c] = ids[np.argmax(ranked[ids])]
            chosen[c] = logp[token[c]]
            total[c] = np.logaddexp.reduce(logp[ids])
            weight[c] = np.logaddexp.reduce(warm[ids])
    row: dict[str, object] = {
        "class_token": token, "class_token_logprob": chosen, "class_logprob": total,
    }  # fmt: skip
    filtered = options.filtered and not options.tempered
    if options.temperature > 0 and (options.scale != options.temperature or filtered):
        row["class_weight"] = weight
    return row


def log_softmax(x: Float64Array) -> Float64Array:
    """Log-probabilities; -inf throughout where nothing is possible."""
    if x.max() == -np.inf:
        return x
    # over the others only, so that a probability near one keeps its distance to one
    best = int(np.argmax(x))
    return np.asarray(x - x[best] - np.log1p(np.exp(np.delete(x, best) - x[best]).sum()))


def kept(x: Float64Array, filters: Filters) -> BoolArray:
    """Tokens that top-p, then top-k, then min-p leave, (V,) bool."""
    _, top_p, top_k, min_p, k_first = filters
    if k_first and top_k > 0:
        x = np.where(kept(x, Filters(top_k=top_k)), x, -np.inf)
    order = np.argsort(-x, kind="stable")
    keep = np.ones(len(x), np.bool_)
    if top_p < 1:
        before = np.append(0.0, np.cumsum(np.exp(log_softmax(x)[order]))[:-1])
        keep[order] = before <= top_p
        keep[order[0]] = True
    if top_k > 0:
        left = np.sort(x[keep])[::-1]
        keep &= x >= left[min(top_k, len(left)) - 1]
    if min_p > 0:
        keep &= x >= x.max() + np.log(min_p)
    return keep
