"""Random ways of decoding: a sampler, a cache, settings and prompts from one seed."""

import random
from dataclasses import dataclass, field
from typing import Any

import dllm
from dllm.core.errors import ConfigError

from ..settings import OWN_MODELS, SMALL, every_sampler

SAMPLERS = [*every_sampler(), "localleap+prophet", "adablock(4, delimiters=(3,))+localleap",
            "lopa(localleap, k=2)", "freedave(threshold(tau=0.8))", 
            "remdm(n=2, start=0.4)+blocks(6)", "eb(gamma=1)+whole"]  # fmt: skip
CACHES = [cache for name, cache in SMALL.items() if name not in OWN_MODELS]
POLICIES = ("none", "prefix_complete", "first_commit", "block_contains", "block_all", "suppress",
            "rank_last")  # fmt: skip
LENGTHS = ("append(block=3)", "append(block=4, lookahead=0)",
           "daedal(initial=2, expand=2, tokens=4, enough=0.05, low=0.4)")  # fmt: skip
# On canvases of random tokens: what is there for them alone, the caches that go with them.
UNIFORM = ("entropy_bound(max_denoising_steps=6, entropy_bound=2)",
           "entropy_bound(max_denoising_steps=4, confidence_threshold=9)",
           "ddim(7, corrector_steps=1, corrector_k=3)", "ddim(6, confidence_threshold=9)",
           "ddim(5)", "threshold(0.1)+edit(0.2)")  # fmt: skip
CONTEXT = 48
Outcome = tuple[list[int], list[int], int, int, str, str]


@dataclass(frozen=True)
class Case:
    """What to decode and how; ``seed`` makes it again."""

    seed: int
    prompts: list[list[int]]
    how: dict[str, Any] = field(default_factory=dict)
    max_batch_size: int = 32


def case(seed: int, model: dllm.DiffusionModel) -> Case:
    """The case of a seed.  Some are combinations that are refused."""
    rng = random.Random(seed)
    ids = [i for i in range(3, model.facts.vocab_size - 1) if i != model.facts.mask_token_id]
    length = rng.randint(2, 20)
    how: dict[str, Any] = {
        "sampler": rng.choice(SAMPLERS), "cache": rng.choice(CACHES), "max_new_tokens": length,
        "seed": rng.randrange(2**40),
    }  # fmt: skip
    often: list[tuple[float, str, Any]] = [
        (0.4, "temperature", rng.choice([0.3, 1.0, 2.0])),
        (0.15, "cfg_scale", rng.choice([0.5, 2.0])),
        (0.3, "block_length", rng.randint(1, length)),
        (0.2, "steps", rng.randint(1, 2 * length)),
        (0.2, "eos_policy", rng.choice(POLICIES)),
        (0.2, "min_new_tokens", rng.randint(0, length)),
        (0.2, "stop_strings", tuple(rng.sample(["a", "Tom", " ", "e", "1"], 2))),
        (0.2, "constraints", {rng.randrange(length): rng.choice(ids)}),
        (0.2, "max_batch_tokens", rng.choice([1, 60, 200])),
    ]
    how |= {name: value for chance, name, value in often if rng.random() < chance}
    if "temperature" in how and rng.random() < 0.4:
        how |= {"top_p": rng.choice([0.3, 0.9]), "top_k": rng.choice([0, 3, 50])}
    later = random.Random(f"{seed}/lengths")  # on its own: older cases stay what they are
    if later.random() < 0.1:
        how["length"] = later.choice(LENGTHS)
    if later.random() < 0.2:
        how["initial_text"] = [later.choice([-1, *ids]) for _ in range(later.randint(1, length))]
        low = later.randrange(len(how["initial_text"]))
        how["remask"] = [low, (low, later.randint(low + 1, len(how["initial_text"])))]
    if model.facts.uniform:
        how.pop("cfg_scale", None)
        own = random.Random(f"{seed}/uniform")
        how["cache"] = own.choice(["none", "block"])
        if own.random() < 0.4:
            how["sampler"] = own.choice(UNIFORM)
        if own.random() < 0.1:
            how["length"] = "append"
    lengths = [rng.randint(1, CONTEXT) for _ in range(rng.randint(2, 5))]
    prompts = [[rng.choice(ids) for _ in range(n)] for n in lengths]
    if rng.random() < 0.3:
        prompts[-1] = prompts[0]  # the same prompt again has noise of its own
    return Case(seed, prompts, how, rng.choice([1, 2, 3, 32]))


def together(model: dllm.DiffusionModel, case: Case) -> list[Outcome] | None:
    """All prompts in one call; None where the combination is refused."""
    try:
        return [
            outcome(result)
            for result in dllm.generate(
                model, case.prompts, max_batch_size=case.max_batch_size, **case.how
            )
        ]
    except ConfigError as error:
        assert len(str(error)) < 500 and "\n" not in str(error), error
        return None


def alone(model: dllm.DiffusionModel, case: Case) -> list[Outcome]:
    """Each prompt in a call of its own."""
    result = []
    for i, prompt in enumerate(case.prompts):
        repetition = case.prompts[:i].count(prompt)
        (out,) = dllm.generate(model, [prompt], repetitions=[repetition], **case.how)
        result.append(outcome(out))
    return result


def outcome(out: dllm.Result) -> Outcome:
    return out.tokens, out.order, out.nfe, out.computed, out.text, out.finish_reason
