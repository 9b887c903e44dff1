"""GPU memory that the processes of one host map into each other's address space; every rank's may have its own size."""

import os

import torch

from deepspeed_cdp.transport.cuda_bindings import CudaBindings
from deepspeed_cdp.transport.descriptor_exchange import exchange_descriptors
from deepspeed_cdp.transport.store_exchange import StoreExchange


class _Allocation:
    """Memory of the driver, outside torch's allocator, whose blocks cannot be shared one by one. Tensors keep it alive."""

    def __init__(self, driver: CudaBindings, nbytes: int):
        self.driver, self.nbytes, self.address = driver, nbytes, driver.allocate(nbytes)
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}

    def __del__(self) -> None:
        self.driver.unmap(self.address, self.nbytes)


class PeerMemory:
    """Collective: zeroed memory on every rank, mapped by all. It is freed when no rank has it mapped any more.

    Attributes:
        own: this rank's (uint8, 1-D).
        addresses: by rank, of its memory, as mapped here.
    Raises:
        HandoffError: not all ranks called.
        RuntimeError: the memory is not there, or the GPUs cannot share it.
    """

    def __init__(self, nbytes: int, device: torch.device, driver: CudaBindings, exchange: StoreExchange):
        where, self._rank, self._driver = f"rank {exchange.rank}, allocating", exchange.rank, driver
        torch.cuda.empty_cache()  # the driver may need what torch's allocator keeps
        allocation = _Allocation(driver, driver.whole(max(nbytes, 1)))
        self.own = torch.as_tensor(allocation, device=device)[:nbytes]
        self.own.zero_()
        torch.cuda.synchronize(device)
        self._sizes = exchange.exchange(allocation.nbytes, where)
        descriptor = driver.share(allocation.address)
        try:
            descriptors = exchange_descriptors(descriptor, exchange, where)
        finally:
            os.close(descriptor)
        try:
            self.addresses = [
                allocation.address if other is None else driver.map_shared(other, size)
                for other, size in zip(descriptors, self._sizes)
            ]
        finally:
            for other in descriptors:
                if other is not None:
                    os.close(other)
        exchange.exchange(None, where)  # no rank uses the memory before all have mapped it

    def close(self) -> None:
        """Unmap the other ranks' memory."""
        for rank, address in enumerate(self.addresses):
            if rank != self._rank:
                self._driver.unmap(address, self._sizes[rank])
        self.addresses = []
