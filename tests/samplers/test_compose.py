"""Names, arguments, roles and needs."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest

from dllm.cache.dual import DualCache
from dllm.cache.elastic import ElasticCache
from dllm.core.canvas import BoolArray
from dllm.core.errors import ConfigError, UnknownNameError
from dllm.samplers import SAMPLERS, Selector, View, available, compose, register
from dllm.samplers.dream import Dream
from dllm.samplers.prophet import Prophet
from dllm.samplers.scorers import Margin, NegEntropy
from dllm.samplers.threshold import Threshold
from dllm.samplers.windows import StaticBlocks, WholeRegion

from .test_vectors import canvas_of, decide, predict


def test_a_bare_name_is_the_complete_method() -> None:
    sampler = compose("dream")
    assert sampler.selectors == (Dream(),)
    assert (sampler.window, sampler.scorer) == (WholeRegion(), NegEntropy())


def test_an_explicit_part_replaces_a_companion() -> None:
    assert compose("dream+blocks(16)").window == StaticBlocks(16)
    assert compose("dream(alg=topk_margin)").scorer == Margin()


def test_selectors_form_a_chain() -> None:
    names = [part.name for part in compose("threshold(0.9)+factor(0.5)").selectors]
    assert names == ["threshold", "factor"]


def test_objects_work_like_names() -> None:
    assert compose(Threshold(0.8)).selectors == compose("threshold(tau=0.8)").selectors
    assert compose((Threshold(0.8), StaticBlocks(8))).window == StaticBlocks(8)


def test_options_fill_open_fields() -> None:
    sampler = compose("llada", options={"steps": 7, "block_length": 5, "eos_policy": "none"})
    assert (sampler.selectors[0].steps, sampler.window.block_length) == (7, 5)  # type: ignore[attr-defined]


def test_a_bare_name_is_what_the_paper_uses_for_the_family() -> None:
    assert compose("llada").window == StaticBlocks()
    assert compose("dream", family="dream").window == WholeRegion()
    assert compose("dream+blocks(8)", family="dream").window == StaticBlocks(8)
    low = [
        compose(f"{spec}dcd(block_length=4, e_max=4)").window.tau_low  # type: ignore[attr-defined]
        for spec in ("", "dparallel+", "fixed+margin+")
    ]
    assert low == [0.3, -0.5, 0.3]


def test_options_reach_a_finished_sampler() -> None:
    options = {"steps": 7, "block_length": 5}
    finished = compose("lopa(llada, k=3)", stop_ids=(9,))
    changed = compose(finished, options=options, stop_ids=(4,))
    assert changed == compose("lopa(llada, k=3)", options=options, stop_ids=(4,))
    assert compose(finished, stop_ids=(9,)) == finished
    with pytest.raises(ConfigError, match="given twice: 7"):
        compose(changed, options={"steps": 8})
    with pytest.raises(ConfigError, match="takes no steps"):
        compose(compose("threshold"), options={"steps": 8})


def test_options_overrule_what_a_method_brings_along() -> None:
    assert compose("dcd").eos.eos_policy == "first_commit"  # type: ignore[attr-defined]
    changed = compose("dcd+freedave", options={"eos_policy": "prefix_complete"})
    assert changed.eos.eos_policy == "prefix_complete"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("spec", "selectors"),
    [
        ("prophet", "llada"),
        ("dcd+prophet", "threshold"),  # a quota needs a window that stays
        ("dsb+prophet", "threshold"),
        ("multi_blocks+prophet", "threshold"),
        ("margin+dsb", "fixed"),  # its scores are no probabilities
        ("margin", "fixed"),
        ("r2", "threshold"),
        ("r2+prophet", "threshold"),
        ("fixed+r2+prophet", "fixed"),
    ],
)
def test_what_is_brought_along_fits_what_is_given(spec: str, selectors: str) -> None:
    assert [part.name for part in compose(spec).selectors] == selectors.split()


@pytest.mark.parametrize(
    ("spec", "options", "error", "words"),
    [
        ("thrshold", {}, UnknownNameError, "did you mean 'threshold'"),
        ("threshold(tua=1)", {}, UnknownNameError, "did you mean 'tau'"),
        ("threshold(1.5)", {}, ConfigError, "outside [0, 1]"),
        ("threshold(-0.1)", {}, ConfigError, "outside [0, 1]"),
        ("localleap(w=-1)", {}, ConfigError, "w must not be negative"),
        ("prophet(steps=0)", {}, ConfigError, "steps must be at least 1"),
        ("r2(confidence_cluster_unmasked=-1)", {}, ConfigError, "must not be negative"),
        ("threshold(", {}, ConfigError, "name(key=value)"),
        ("threshold - blocks", {}, ConfigError, "cannot read"),
        ("threshold(tau=f(1))", {}, ConfigError, "cannot read the value"),
        ("threshold(0.9, 2, 3)", {}, ConfigError, "at most 2"),
        ("threshold(0.8, tau=0.9)", {}, ConfigError, "tau is given twice"),
        ("threshold(tau=0.8, tau=0.9)", {}, ConfigError, "tau is given twice"),
        ("blocks+whole", {}, ConfigError, "both a window"),
        ("threshold+margin", {}, ConfigError, "use prob instead"),
        ("threshold+random", {}, ConfigError, "use prob instead"),
        ("dparallel+prob", {}, ConfigError, "use neg_entropy instead"),
        ("threshold", {"steps": 4}, ConfigError, "takes no steps"),
        ("dream", {"block_length": 4}, ConfigError, "takes no block_length"),
        ("llada(steps=3)", {"steps": 4}, ConfigError, "given twice"),
        ("llada(remasking=rando)", {}, UnknownNameError, "did you mean 'random'"),
        ("dream(alg=entropi)", {}, UnknownNameError, "did you mean 'entropy'"),
        ("llada(steps=0)", {}, ConfigError, "at least 1"),
        ("blocks(0)", {}, ConfigError, "at least 1"),
        ("dcd(block_length=0)", {}, ConfigError, "at least 1"),
        ("dcd", {"block_length": -3}, ConfigError, "at least 1"),
        ("dcd(block_length=4, e_max=-1)", {}, ConfigError, "negative"),
        ("prophet(start=2, region=all_masked)", {}, ConfigError, "drop all_masked"),
        ("prophet(progress=token)", {}, UnknownNameError, "did you mean 'tokens'"),
        ("factor(0)", {}, ConfigError, "positive"),
        ("eb(gamma=-1)", {}, ConfigError, "negative"),
        ("eos(eos_policy=never)", {}, UnknownNameError, "eos_policy"),
        (3, {}, ConfigError, ""),
    ],
)
def test_errors_say_what_to_do(
    spec: str, options: dict[str, object], error: type[Exception], words: str
) -> None:
    with pytest.raises(error) as result:
        compose(spec, options=options)
    assert words in str(result.value)
    assert "\n" not in str(result.value)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("fixed(n=2, steps=3)", "keep one"),
        ("fixed(steps=0)", "steps must be at least 1"),
        ("fixed(n=1.5)", "fixed: n takes a whole number or None, not 1.5"),
        ("blocks(2.5)", "blocks: block_length takes a whole number or None, not 2.5"),
        ("lopa(k=2.5)", "k takes a whole number"),
        ("lopa(3)", "base takes parts such as threshold, not 3; write k=3"),
        ("lopa(k=2, base=3)", "base takes parts such as threshold, not 3"),
        ("ete(4)", "write k=4"),
        ("freedave(4)", "write draft_depth=4"),
        ("freedave(draft_depth=2.5)", "draft_depth takes a whole number or None"),
        ("dcd(s_init=4.5)", "s_init takes a whole number"),
        ("dsb(2.5)", "block_length takes a whole number"),
        ("staged_blocks(2.5)", "block_length takes a whole number"),
        ("r2(confidence_cluster_size=2.5)", "takes a whole number or None"),
        ("prophet(start=1.5)", "start takes a whole number or None"),
        ("llada(remasking=3)", "remasking takes a word, not 3"),
        ("adablock(delimiters=198)", "delimiters takes a whole number, as in (1,) or None"),
        ("adablock(delimiters=(1.5,))", "delimiters takes"),
        ("threshold(true)", "tau takes a number, not True"),
        ("threshold(tau=None)", "tau takes a number, not None"),
        ("s2d2(causal=1)", "causal takes True or False, not 1"),
        ("credit(credit_alpha=1e39)", "credit_alpha must lie between -1e+30 and 1e+30, not 1e+39"),
        (f"threshold(tau=1{'0' * 400})", "tau must lie between"),
        ("entropy_bound(t_min=inf)", "t_min must lie between 1e-6 and 1e6, not inf"),
        (
            "edit(tau=2)",
            "tau=2 is outside [0, 1]: choose one within, or inf, which nothing reaches",
        ),
    ],
)
def test_values_of_a_wrong_type_are_refused(spec: str, words: str) -> None:
    with pytest.raises(ConfigError) as result:
        compose(spec)
    assert words in str(result.value)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Threshold("0.9"), "wrong argument for threshold: tau takes a number, not '0.9'"),
        (lambda: Threshold(n=2.5), "n takes a whole number, not 2.5"),
        (lambda: StaticBlocks(block_length=True), "block_length takes a whole number or None"),
        (lambda: DualCache(refresh_every="2"), "wrong argument for dual: refresh_every takes"),
    ],
)
def test_objects_are_checked_as_strings_are(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ConfigError) as result:
        make()
    assert words in str(result.value)


def test_a_value_is_read_as_its_field_takes_it() -> None:
    assert compose("lopa(base=localleap, k=3)").parts == compose("lopa(localleap, k=3)").parts
    assert compose("llada(4, random)").parts == compose("llada(4, remasking=random)").parts


def test_a_list_is_as_good_as_a_tuple() -> None:
    assert compose("adablock(delimiters=[3, 7])") == replace(
        compose("adablock(delimiters=(3, 7))"), spec="adablock(delimiters=[3, 7])"
    )
    assert compose("threshold(1)").selectors == (Threshold(1.0),)


def test_a_third_party_selector_takes_part() -> None:
    @register("every_other", paper="A test")
    @dataclass(frozen=True)
    class EveryOther(Selector):
        """Commit every second undecided position."""

        def select(self, view: View) -> BoolArray:
            return np.arange(len(view.positions)) % 2 == 0

    try:
        assert compose("every_other+blocks(8)").selectors == (EveryOther(),)
        listed = {info.name: info for info in available()}["every_other"]
        assert (listed.role, listed.summary) == (
            "selector", "Commit every second undecided position.",
        )  # fmt: skip
        with pytest.raises(ConfigError, match="exists already"):
            register("every_other")(Threshold)
    finally:
        SAMPLERS._entries.pop("every_other")


def test_every_listed_part_is_described() -> None:
    for info in available():
        assert info.summary and info.role
        assert info.role == "eos" or info.arxiv


def test_words_of_a_specification_mean_what_they_say() -> None:
    assert compose("threshold+eos(eos_policy=none)").eos.eos_policy == "none"  # type: ignore[attr-defined]
    with pytest.raises(
        ConfigError, match=r"r2: temporal_steps takes a whole number or None, not 'none'"
    ):
        compose("r2(temporal_steps=none)")
    assert compose("threshold+r2(temporal_steps=None)").choosers[0].temporal_steps is None  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Odd(Selector):
    """Returns whatever it was given."""

    name = "odd"

    value: object = None

    def select(self, view: View) -> BoolArray:
        return self.value  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("value", "got"),
    [
        (None, "None"),
        ([True, False, True], "a list"),
        (np.array([0, 2]), "an array of int64, shape (2,)"),
        (np.ones(2, np.bool_), "an array of bool, shape (2,)"),
        (np.ones(3, np.float32), "an array of float32, shape (3,)"),
        (np.ones((3, 1), np.bool_), "an array of bool, shape (3, 1)"),
    ],
)
@pytest.mark.parametrize("chained", [False, True])
def test_what_a_selector_must_return(value: object, got: str, chained: bool) -> None:
    canvas = canvas_of(3)
    sampler = compose((Threshold(math.inf), Odd(value)) if chained else Odd(value))
    sampler.prepare(canvas)
    with pytest.raises(ConfigError) as result:
        decide(sampler, canvas, predict(canvas, [0.9, 0.8, 0.7]))
    assert f"odd.select returned {got}, not one bool per position" in str(result.value)
    assert "shape (3,)" in str(result.value) and "\n" not in str(result.value)


@pytest.mark.parametrize(("part", "field"), [(Prophet, "mid"), (ElasticCache, "gamma")])
def test_not_a_number_is_no_number(part: Callable[..., object], field: str) -> None:
    with pytest.raises(ConfigError, match=f"{field} takes a number, not nan"):
        part(**{field: math.nan})
