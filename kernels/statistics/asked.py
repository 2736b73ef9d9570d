"""Log-probabilities of a few given ids, from rows whose statistics are known."""

import torch

from .heads import Head, Shaped, full_logits, plain_linear


def logprobs_of(
    hidden: torch.Tensor, head: Head, ids: torch.Tensor, token: torch.Tensor, logprob: torch.Tensor
) -> torch.Tensor:
    """(R, m) float32 clean log-probabilities of ``ids`` (R, m) for hidden rows (R, d).

    ``token`` and ``logprob`` (R,) are a proposal and its clean log-probability (before temperature
    and filters): they fix the normalisation, so that only m + 1 logits per row are computed.
    """
    wanted = torch.cat([ids, token[:, None].to(ids.device)], 1)
    bent = head if isinstance(head, Shaped) else None
    linear = plain_linear(head if bent is None else bent.head)
    if linear is None:
        logits = full_logits(hidden, head).float().gather(1, wanted)
    else:
        weight, bias = linear
        logits = torch.einsum("rd,rmd->rm", hidden.float(), weight[wanted].float())
        if bias is not None:
            logits = logits + bias[wanted].float()
        logits = logits if bent is None else bent.shape(logits)
    return logits[:, :-1] - logits[:, -1:] + logprob[:, None].to(logits.device)
