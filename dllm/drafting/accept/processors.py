"""What acts on the verifier's logits besides sampling: its own ``generation_config``, and forms.

A draft that leaves the form is one that the verifier gives no probability, so drafts need no check
of their own, and the text is that of decoding plainly with the same form.
"""

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...core.canvas import IntArray
from ...core.errors import ConfigError
from ...models import DiffusionModel
from ...structured.format import Format
from .rows import LogitsProcessor

# They do not act on one row of logits given its history, so that drafting cannot honour them.
REFUSED: dict[str, tuple[Any, ...]] = {
    "num_beams": (None, 1),
    "guidance_scale": (None, 1, 1.0),
    "watermarking_config": (None,),
    "penalty_alpha": (None, 0, 0.0),
    "dola_layers": (None,),
    "constraints": (None,),
    "force_words_ids": (None,),
}


def own_processors(
    model: DiffusionModel, prompt: IntArray, limit: int, without: tuple[str, ...] = ()
) -> tuple[LogitsProcessor, ...]:
    """The processors that ``generate(do_sample=False)`` of transformers would use by default.

    Penalties, n-gram bans, suppressed, forced and biased tokens, least lengths: built by
    transformers itself, for a text of ``prompt`` (P,) and at most ``limit`` tokens in all.  Fields
    in ``without`` are left out, because the call says something else.  Raises `ConfigError` for
    what cannot be honoured.
    """
    hf: Any = model.hf
    if not hf.can_generate():
        return ()
    config = copy.deepcopy(hf.generation_config)
    for name, harmless in REFUSED.items():
        if getattr(config, name, None) not in harmless:
            raise ConfigError(
                f"generation_config of {model.name} sets {name}, which drafting cannot honour: "
                f"set model.hf.generation_config.{name} = None if you can do without"
            )
    for name in without:
        setattr(config, name, None)
    config.do_sample, config.max_length = False, limit
    ids = torch.from_numpy(prompt)[None].to(model.device)
    hf._prepare_special_tokens(config, device=model.device)
    processors = hf._get_logits_processor(
        generation_config=config, input_ids_seq_length=len(prompt), encoder_input_ids=ids,
        device=model.device, model_kwargs={},
    )  # fmt: skip
    return tuple(processors)


@dataclass(frozen=True)
class FormatProcessor:
    """A logits processor that leaves the tokens from which a text of the form can be completed.

    ``start``: tokens of the prompt; ``limit``: of prompt and answer together.
    """

    form: Format
    start: int
    limit: int

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        automaton, written = self.form.automaton, ids[0, self.start :].cpu().numpy()
        assert self.form.start is not None
        state = automaton.run(self.form.start, written)
        if state < 0:  # behind a drafted token that is refused already
            return scores
        follow, left = automaton.next[state], self.limit - self.start - len(written) - 1
        allowed = np.append((follow >= 0) & (automaton.need[follow] <= left), False)
        keep = torch.from_numpy(allowed[automaton.of]).to(scores.device)
        size = scores.shape[1]
        keep = torch.nn.functional.pad(keep, (0, max(0, size - len(keep))))[:size]
        return scores.masked_fill(~keep, -torch.inf)
