"""FSDP2, the strongest rival, in its variants: ``fsdp2[-prefetch2][-symm | -zerocta][-keep]``.

- ``-prefetch2``: each layer gathers the next two in the forward and in the backward, instead of one.
- ``-symm``: all-gathers are copies between GPUs over symmetric memory, without NCCL (``SymmetricAllGather``).
- ``-zerocta``: torch's own all-gather over symmetric memory in a group with NCCL's zero-CTA policy (torch 2.13).
- ``-keep``: parameters and gradients stay whole until the step's last micro-batch, as under ZeRO-2: more memory, fewer messages.
"""

import re
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

NAME = re.compile(r"fsdp2(?P<prefetch>-prefetch2)?(?P<gather>-symm|-zerocta)?(?P<keep>-keep)?")
AHEAD = 2  # layers that -prefetch2 gathers ahead
PLACES = AHEAD + 3  # of a layer: the gathers ahead, the one in use, the one before (freed after the next copy-out), one to write
ROOT_PLACES = 2  # of the parameters outside layers, which are gathered once a step
TIMEOUT_MS = 60_000  # of a device that waits for its peers; the kernel then traps


def variant(name: str) -> re.Match[str]:
    """The parts of a variant's name.

    Raises:
        ValueError: the name is not known, or the torch at hand or the device has no such all-gather.
    """
    parts = NAME.fullmatch(name)
    if parts is None:
        raise ValueError(f"engine {name!r} is no variant of FSDP2; allowed are fsdp2[-prefetch2][-symm or -zerocta][-keep]")
    if parts["gather"] and not torch.cuda.is_available():
        raise ValueError(f"engine {name!r} gathers over symmetric memory, which needs CUDA; use fsdp2 or fsdp2-prefetch2 here")
    if parts["gather"] == "-zerocta" and not hasattr(FSDPModule, "set_symm_mem_for_comm"):
        raise ValueError(
            f"engine {name!r} needs FSDPModule.set_symm_mem_for_comm, which torch {torch.__version__} does not have; "
            "take torch 2.13 or newer, or fsdp2-symm"
        )
    return parts


class SymmetricAllGather:
    """FSDP2's all-gather as copies between peers: each rank pulls the others' shards out of their buffers.

    Outputs rotate through ``count`` buffers per size. FSDP2 lets a new gather write only after it has waited for the copy-out
    of an old one, and holds fewer than ``count``, so the oldest buffer is free on this rank; a gather ends only when all peers
    have read, so it is free for the others too.
    """

    def __init__(self, group: dist.ProcessGroup, count: int = PLACES):
        self.group, self.count = group, count
        # (elements, dtype) -> [(output, handle)], and how many gathers of this size there were
        self.places: dict[tuple[int, torch.dtype], list[tuple[torch.Tensor, Any]]] = defaultdict(list)
        self.gathers: dict[tuple[int, torch.dtype], int] = defaultdict(int)
        self.handles: dict[int, Any] = {}  # address of an output -> handle

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The next buffer of this size; the first ``count`` calls of a size are collective."""
        from torch.distributed import _symmetric_memory as symmetric

        key = int(size[0]), dtype
        places, turn = self.places[key], self.gathers[key]
        self.gathers[key] += 1
        if len(places) < self.count:
            output = symmetric.empty(key[0], dtype=dtype, device=device)
            handle = symmetric.rendezvous(output, self.group)
            places.append((output, handle))
            self.handles[output.data_ptr()] = handle
        return places[turn % self.count][0]

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False) -> None:
        """Gather on the current stream. ``input_tensor`` is this rank's part of ``output_tensor``, in place."""
        assert not async_op, "FSDP2 gathers on a stream of its own"
        handle = self.handles[output_tensor.data_ptr()]
        rank, size, count = handle.rank, handle.world_size, input_tensor.numel()
        handle.barrier(timeout_ms=TIMEOUT_MS)  # all inputs are there
        for peer in ((rank + i) % size for i in range(1, size)):
            theirs = handle.get_buffer(peer, (count,), output_tensor.dtype, storage_offset=peer * count)
            output_tensor.narrow(0, peer * count, count).copy_(theirs, non_blocking=True)
        handle.barrier(timeout_ms=TIMEOUT_MS)  # all peers have read

    def outside_nbytes(self) -> int:
        """Bytes of the buffers, which torch's caching allocator does not count."""
        return sum(output.nbytes for places in self.places.values() for output, _ in places)

    def destroy(self) -> None:
        """Collective: free the buffers once no peer reads them."""
        torch.cuda.synchronize()
        dist.barrier(self.group)
        self.places.clear()
        self.handles.clear()


class AllGathers(tuple[SymmetricAllGather, ...]):
    """A model's all-gathers."""

    def outside_nbytes(self) -> int:
        return sum(one.outside_nbytes() for one in self)

    def destroy(self) -> None:
        """Collective."""
        for one in self:
            one.destroy()


def shard(model: Any, layers: list[Any], parts: re.Match[str], dtype: torch.dtype) -> AllGathers | None:
    """Shard a model and its layers, each by itself, as the variant says; the object to destroy, if there is one.

    Passes are in ``dtype``; parameters are gathered anew for the backward, as ZeRO-3 does.
    """
    how: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)}
    if parts["gather"] == "-zerocta":
        how["mesh"] = _zero_cta_mesh()
    for layer in layers:
        fully_shard(layer, **how)
    fully_shard(model, **how)
    if parts["prefetch"]:
        model.set_modules_to_forward_prefetch(layers[:AHEAD])
        model.set_modules_to_backward_prefetch(layers[: -AHEAD - 1 : -1])
        for i, layer in enumerate(layers):
            layer.set_modules_to_forward_prefetch(layers[i + 1 : i + 1 + AHEAD])
            layer.set_modules_to_backward_prefetch(layers[max(i - AHEAD, 0) : i][::-1])
    for module in (*layers, model):
        if parts["gather"] == "-zerocta":
            module.set_symm_mem_for_comm("NCCL")
    if parts["gather"] != "-symm":
        return None
    assert dist.group.WORLD is not None
    of_layers, of_root = SymmetricAllGather(dist.group.WORLD), SymmetricAllGather(dist.group.WORLD, ROOT_PLACES)
    for layer in layers:
        layer.set_custom_all_gather(of_layers)
    model.set_custom_all_gather(of_root)
    return AllGathers((of_layers, of_root))


def _zero_cta_mesh() -> Any:
    """All ranks, in a group whose all-gathers NCCL leaves to copy engines where it can."""
    from torch.distributed.device_mesh import DeviceMesh

    options = dist.ProcessGroupNCCL.Options()
    options.config.cta_policy = dist.ProcessGroupNCCL.NCCL_CTA_POLICY_ZERO
    group = dist.new_group(backend="nccl", pg_options=options, device_id=torch.device("cuda", torch.cuda.current_device()))
    return DeviceMesh.from_group(group, "cuda")


def each_micro_batch(model: torch.nn.Module, parts: re.Match[str]) -> Callable[[bool], AbstractContextManager]:
    """The context of a micro-batch, from whether it is the step's last."""
    if not parts["keep"]:
        return lambda last: nullcontext()
    model.set_reshard_after_forward(False)

    def begin(last: bool) -> AbstractContextManager:
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)
        return nullcontext()

    return begin
