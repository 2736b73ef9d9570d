"""One server whose model is split over processes, by transformers' tensor parallel plan.

    torchrun --nproc-per-node 2 -m dllm serve MODEL

Every process has a share of the weights, and the whole scheduler.  What a step does is a function
of which requests were submitted and let go before it, so rank 0, which alone listens to HTTP and
looks at the clock, tells the others just that before every step.  All ranks then plan the same
forward, get the same statistics and decide the same, and no decision travels.
"""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ..drafting.verifiers.base import is_causal_model
from ..errors import CancelledError, ConfigError
from ..session import Change, Session

if TYPE_CHECKING:
    from ..models import DiffusionModel
    from ..scheduler import Progress, Request

FOREVER = timedelta(days=3650)  # nobody may ask anything for that long
END = -1  # in place of the size of a message


@contextmanager
def joined() -> Iterator[Channel]:
    """This process as one of the group that ``torchrun`` has started."""
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        backend = "nccl"
    dist.init_process_group(backend)
    try:
        yield Channel()
    finally:
        dist.destroy_process_group()


def load_share(model: str, loading: Mapping[str, Any]) -> DiffusionModel:
    """This rank's share of ``model``; ``loading``: arguments of `dllm.load`."""
    from transformers.distributed.configuration_utils import DistributedConfig

    from ..models import load

    given = dict(loading)
    if given.pop("device", "auto") != "auto":
        raise ConfigError("under torchrun each process takes the device of its rank: drop --device")
    share = load(
        model, distributed_config=DistributedConfig(tp_size=dist.get_world_size()), **given
    )
    if is_causal_model(share):
        raise ConfigError(
            f"{share.name} is autoregressive: under torchrun only diffusion models run"
        )
    return share


class Channel:
    """What rank 0 tells the others, in order.  It has a group of its own on the host, so that it
    neither waits for the device nor gives up while nobody asks anything."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.group = dist.new_group(backend="gloo", timeout=FOREVER)

    def send(self, changes: list[Change] | None) -> None:
        """Tell what has changed before a step; None: there are no more steps."""
        message = pickle.dumps(changes) if changes else b""
        size = END if changes is None else len(message)
        dist.broadcast(torch.tensor([size]), 0, self.group)
        if size > 0:
            dist.broadcast(torch.frombuffer(bytearray(message), dtype=torch.uint8), 0, self.group)

    def receive(self) -> list[Change] | None:
        """What rank 0 has sent; waits for it."""
        size = torch.empty(1, dtype=torch.int64)
        dist.broadcast(size, 0, self.group)
        if size.item() <= 0:
            return None if size.item() == END else []
        message = torch.empty(int(size.item()), dtype=torch.uint8)
        dist.broadcast(message, 0, self.group)
        changes: list[Change] = pickle.loads(message.numpy().tobytes())  # from rank 0 of this group
        return changes


class Leader(Session):
    """The session of rank 0: what happens in it happens in all ranks."""

    def __init__(self, channel: Channel, *arguments: Any, **options: Any) -> None:
        self.channel = channel
        super().__init__(*arguments, **options)

    def _share(self, changes: list[Change]) -> None:
        self.channel.send(changes)

    def _end(self) -> None:
        with suppress(RuntimeError):  # the group is broken, which is why this is the end
            self.channel.send(None)
        super()._end()


class Follower(Session):
    """The session of another rank: it does what rank 0 says, and nobody reads its results."""

    def __init__(self, channel: Channel, *arguments: Any, **options: Any) -> None:
        self.channel = channel
        self._known: dict[int, Request] = {}
        super().__init__(*arguments, **options)

    def wait(self) -> None:
        """Until rank 0 ends; raises what went wrong here."""
        self._thread.join()
        if self.failure is not None:
            raise self.failure

    def _listen(self) -> list[Change] | None:
        changes = self.channel.receive()
        for change in changes or ():
            if change.order is not None:
                request = self._known[change.index] = self._request(change.order)
                request.index = change.index
                self._scheduler.add(request)
            else:
                self._scheduler.cancel(self._known.pop(change.index), CancelledError("let go"))
        return changes

    def _publish(self, progress: Progress) -> None:
        for request, _ in progress:
            if request.done:
                del self._known[request.index]
                request.row = request.canvas = None


def follow(channel: Channel, model: DiffusionModel, options: Mapping[str, Any]) -> None:
    """Take the steps of rank 0 until it ends.  It decides when: ``torchrun`` sends signals to all
    ranks, but the requests that may still be running are with rank 0."""
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, signal.SIG_IGN)
    Follower(channel, model, **options).wait()
