"""One environment variable is the key of the server and of all its clients."""

from typing import Any

import numpy as np
import pytest

import dllm
from dllm.core.access import KEY
from dllm.core.errors import ConfigError, DllmError
from dllm.drafting.device import write_with
from dllm.serve.settings import Settings
from tests.drafting.conftest import make_verifier

from .conftest import Start, raw

PROMPT = [5, 6, 7, 5, 6, 7, 5]


def test_a_device_that_drafts(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    verifier = make_verifier("full")
    served = start(verifier, api_key="sesame")
    how: dict[str, Any] = {"tokenizer": verifier.tokenizer, "max_new_tokens": 8}
    prompt = np.asarray(PROMPT)
    monkeypatch.delenv(KEY, raising=False)
    with pytest.raises(DllmError, match="API key"):
        list(write_with(served.url, "prompt_lookup", prompt, **how))
    monkeypatch.setenv(KEY, "sesame")
    written = [t for ids in write_with(served.url, "prompt_lookup", prompt, **how) for t in ids]
    assert written == dllm.speculate(verifier, None, PROMPT, max_new_tokens=8).tokens


def test_spare_rows_of_a_model_are_no_other_vocabulary(start: Start) -> None:
    """Many checkpoints have more rows than tokens; a device without a model does not know them."""
    verifier = make_verifier("full", vocab_size=544)
    assert verifier.tokenizer is not None and len(verifier.tokenizer) < 544
    how: dict[str, Any] = {"tokenizer": verifier.tokenizer, "max_new_tokens": 4}
    rounds = write_with(start(verifier).url, "prompt_lookup", np.asarray(PROMPT), **how)
    expected = dllm.speculate(verifier, None, PROMPT, max_new_tokens=4).tokens
    assert [token for ids in rounds for token in ids] == expected


def test_keys_as_people_write_them(start: Start, tiny: dllm.DiffusionModel) -> None:
    """With blanks around them, in any script, as curl sends it; and none is no key."""
    served = start(tiny, api_key="one, schlüssel")
    for key, status in (("one", b"200"), ("schlüssel", b"200"), ("", b"401"), (",", b"401")):
        head = (
            f"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX-Api-Key: {key}\r\n\r\n"
        )
        assert raw(served, head.encode())[9:12] == status, key
    for empty in ("", " , "):
        with pytest.raises(ConfigError, match="empty"):
            Settings(api_key=empty)


HOSTILE = ["x/health?", "x/health", "/health", "x?/", "x#/metrics", "localhost/../health?a=", "x/",
           "x:80/version"]  # fmt: skip


def test_a_host_header_opens_no_door(start: Start, tiny: dllm.DiffusionModel) -> None:
    """The key is asked for by the path of the request line, whatever the Host header says."""
    served = start(tiny, api_key="sesame")
    for host in HOSTILE:
        head = f"GET /v1/models HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
        assert raw(served, head.encode())[9:12] in (b"401", b"400"), host
        good = head.replace("\r\n\r\n", "\r\nAuthorization: Bearer sesame\r\n\r\n")
        assert raw(served, good.encode())[9:12] in (b"200", b"400"), host
