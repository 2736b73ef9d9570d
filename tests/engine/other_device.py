"""A device "other" for tests (``-p tests.engine.other_device``): the library that
`other_device.cpp` becomes, whose path is ``DLLM_OTHER_DEVICE``."""

import os
from types import ModuleType

import torch

torch.ops.load_library(os.environ["DLLM_OTHER_DEVICE"])
torch.utils.rename_privateuse1_backend("other")


class Module(ModuleType):
    """``torch.other``: what PyTorch asks of any device."""

    is_available = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 1)
    current_device = staticmethod(lambda: 0)
    _is_in_bad_fork = staticmethod(lambda: False)
    manual_seed_all = staticmethod(lambda seed: None)


torch._register_device_module("other", Module("torch.other"))  # type: ignore[no-untyped-call]
torch.utils.generate_methods_for_privateuse1_backend()
