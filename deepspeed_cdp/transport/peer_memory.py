"""GPU memory that the processes of one host open in each other's address space (CUDA IPC); every rank's may have its own size."""

import torch

from deepspeed_cdp.transport.cuda_bindings import CudaBindings
from deepspeed_cdp.transport.store_exchange import StoreExchange


class _Allocation:
    """Memory of the driver, outside torch's allocator, whose blocks cannot be shared one by one. Tensors keep it alive."""

    def __init__(self, driver: CudaBindings, nbytes: int):
        self.driver, self.address = driver, driver.allocate(nbytes)
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}

    def __del__(self) -> None:
        self.driver.free(self.address)


class PeerMemory:
    """Collective: zeroed memory on every rank, opened by all.

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
        allocation = _Allocation(driver, max(nbytes, 1024))
        self.own = torch.as_tensor(allocation, device=device)[:nbytes]
        self.own.zero_()
        torch.cuda.synchronize(device)
        handles = exchange.exchange(driver.share(allocation.address).hex(), where)
        self.addresses = [
            allocation.address if rank == exchange.rank else driver.open_shared(bytes.fromhex(handle))
            for rank, handle in enumerate(handles)
        ]
        exchange.exchange(None, where)  # no rank uses the memory before all have opened it

    def close(self) -> None:
        """Close the other ranks' memory, which they must not free before."""
        for rank, address in enumerate(self.addresses):
            if rank != self._rank:
                self._driver.close_shared(address)
        self.addresses = []
