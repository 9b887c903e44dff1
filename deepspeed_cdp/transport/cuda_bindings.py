"""ctypes bindings of CUDA driver calls that torch does not offer: stream memory operations, copies by address, shared memory.

``cuStreamWaitValue32`` makes a stream wait until a 32-bit word in memory reaches a value. ``cuStreamWriteValue32`` writes a word
once the stream's earlier work is done. Neither occupies a multiprocessor, and the word may be in a peer GPU's memory.
"""

import ctypes

LIBRARY = "libcuda.so.1"


class _Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


_PINNED, _DESCRIPTOR, _DEVICE, _READ_AND_WRITE, _RECOMMENDED = 1, 1, 1, 3, 1  # of the driver's enumerations


class CudaBindings:
    """libcuda. Calls that take a stream only enqueue work. Streams, events and addresses are integers.

    Raises:
        OSError: the driver library is missing.
        RuntimeError: a call failed; the message names it and the driver's error.
    """

    def __init__(self) -> None:
        library = ctypes.CDLL(LIBRARY)
        stream, address, size = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t
        self._wait = library.cuStreamWaitValue32_v2
        self._write = library.cuStreamWriteValue32_v2
        self._copy = library.cuMemcpyDtoDAsync_v2
        self._record, self._await, self._query = library.cuEventRecord, library.cuStreamWaitEvent, library.cuEventQuery
        self._create = library.cuEventCreate
        self._record.argtypes, self._await.argtypes = [stream, stream], [stream, stream, ctypes.c_uint]
        self._query.argtypes, self._create.argtypes = [stream], [ctypes.POINTER(stream), ctypes.c_uint]
        self._wait.argtypes = self._write.argtypes = [stream, address, ctypes.c_uint32, ctypes.c_uint]
        self._copy.argtypes = [address, address, size, stream]
        self._fill = library.cuMemsetD8Async
        self._fill.argtypes = [address, ctypes.c_ubyte, size, stream]
        self._new_stream, self._end_stream, self._idle = (
            library.cuStreamCreateWithPriority,
            library.cuStreamDestroy_v2,
            library.cuStreamQuery,
        )
        self._new_stream.argtypes = [ctypes.POINTER(stream), ctypes.c_uint, ctypes.c_int]
        self._end_stream.argtypes = self._idle.argtypes = [stream]
        self._device, self._granularity = library.cuCtxGetDevice, library.cuMemGetAllocationGranularity
        self._create_memory, self._release, self._retain = (
            library.cuMemCreate,
            library.cuMemRelease,
            library.cuMemRetainAllocationHandle,
        )
        self._reserve, self._free_addresses = library.cuMemAddressReserve, library.cuMemAddressFree
        self._map, self._unmap, self._allow = library.cuMemMap, library.cuMemUnmap, library.cuMemSetAccess
        self._export, self._import = library.cuMemExportToShareableHandle, library.cuMemImportFromShareableHandle
        pointer, flags, properties = ctypes.POINTER(address), ctypes.c_ulonglong, ctypes.POINTER(_Properties)
        self._device.argtypes = [ctypes.POINTER(ctypes.c_int)]
        self._granularity.argtypes = [ctypes.POINTER(size), properties, ctypes.c_int]
        self._create_memory.argtypes, self._release.argtypes = [pointer, size, properties, flags], [address]
        self._retain.argtypes = [pointer, address]
        self._reserve.argtypes, self._free_addresses.argtypes = [pointer, size, size, address, flags], [address, size]
        self._map.argtypes, self._unmap.argtypes = [address, size, size, address, flags], [address, size]
        self._allow.argtypes = [address, size, ctypes.POINTER(_Access), size]
        self._export.argtypes = [ctypes.POINTER(ctypes.c_int), address, ctypes.c_int, flags]
        self._import.argtypes = [pointer, ctypes.c_void_p, ctypes.c_int]
        self._name = library.cuGetErrorName
        self._name.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)]

    def _check(self, code: int, what: str) -> None:
        if code:
            name = ctypes.c_char_p()
            self._name(code, ctypes.byref(name))
            raise RuntimeError(f"{what}: {name.value.decode() if name.value else code}")

    def wait_value(self, stream: int, word: int, value: int) -> None:
        """Make ``stream`` wait until the 32-bit word at address ``word`` is at least ``value``, compared modulo 2**32."""
        self._check(self._wait(stream, word, value & 0xFFFFFFFF, 0), "cuStreamWaitValue32")

    def write_value(self, stream: int, word: int, value: int) -> None:
        """Set the word once ``stream`` has finished its earlier work, whose writes are visible by then."""
        self._check(self._write(stream, word, value & 0xFFFFFFFF, 0), "cuStreamWriteValue32")

    def copy(self, stream: int, to: int, source: int, nbytes: int) -> None:
        """Copy ``nbytes`` bytes between device addresses with a copy engine; either may be a peer's."""
        self._check(self._copy(to, source, nbytes, stream), "cuMemcpyDtoDAsync")

    def fill(self, stream: int, to: int, value: int, nbytes: int) -> None:
        """Set ``nbytes`` bytes at a device address to ``value``. Unlike a torch kernel, this loads no module on first use."""
        self._check(self._fill(to, value, nbytes, stream), "cuMemsetD8Async")

    # ---- memory that processes share: cuMemAlloc's, opened by cudaIpc, is a quarter slower to copy over NVLink --------------
    def whole(self, nbytes: int) -> int:
        """Bytes of the smallest such memory that has so many; the calls below take no others."""
        unit, properties = ctypes.c_size_t(), self._properties()
        code = self._granularity(ctypes.byref(unit), ctypes.byref(properties), _RECOMMENDED)
        self._check(code, "cuMemGetAllocationGranularity")
        return -(-nbytes // unit.value) * unit.value

    def allocate(self, nbytes: int) -> int:
        """Address of new memory on the current device, which other processes can map."""
        handle, properties = ctypes.c_uint64(), self._properties()
        code = self._create_memory(ctypes.byref(handle), nbytes, ctypes.byref(properties), 0)
        self._check(code, f"cuMemCreate of {nbytes} bytes")
        return self._mapped(handle, nbytes)

    def share(self, address: int) -> int:
        """A file descriptor of memory of ``allocate``, with which other processes of the host map it; the caller closes it."""
        handle, descriptor = ctypes.c_uint64(), ctypes.c_int()
        self._check(self._retain(ctypes.byref(handle), address), "cuMemRetainAllocationHandle")
        try:
            code = self._export(ctypes.byref(descriptor), handle, _DESCRIPTOR, 0)
            self._check(code, "cuMemExportToShareableHandle")
        finally:
            self._release(handle)
        return descriptor.value

    def map_shared(self, descriptor: int, nbytes: int) -> int:
        """Address of another process's memory of ``nbytes`` bytes, mapped for the current device."""
        handle = ctypes.c_uint64()
        self._check(self._import(ctypes.byref(handle), descriptor, _DESCRIPTOR), "cuMemImportFromShareableHandle")
        return self._mapped(handle, nbytes)

    def unmap(self, address: int, nbytes: int) -> None:
        """Give up memory of ``allocate`` or ``map_shared``, once all work of the device is done. The last process frees it.

        An error is ignored: the process may be ending.
        """
        self._unmap(address, nbytes)
        self._free_addresses(address, nbytes)

    def _properties(self) -> _Properties:
        device = ctypes.c_int()
        self._check(self._device(ctypes.byref(device)), "cuCtxGetDevice")
        return _Properties(_PINNED, _DESCRIPTOR, _Location(_DEVICE, device.value))

    def _mapped(self, handle: ctypes.c_uint64, nbytes: int) -> int:
        """Address at which the memory is mapped, which keeps it; the handle is released."""
        address, access = ctypes.c_uint64(), _Access(self._properties().location, _READ_AND_WRITE)
        try:
            self._check(self._reserve(ctypes.byref(address), nbytes, 0, 0, 0), "cuMemAddressReserve")
            self._check(self._map(address, nbytes, 0, handle, 0), "cuMemMap")
            self._check(self._allow(address, nbytes, ctypes.byref(access), 1), "cuMemSetAccess")
        except RuntimeError:
            self.unmap(address.value, nbytes)
            raise
        finally:
            self._release(handle)
        return address.value

    def create_stream(self, priority: int = -1) -> int:
        """A new non-blocking stream that nothing else uses; torch's pool gives each of its 32 streams to several users."""
        handle = ctypes.c_void_p()
        self._check(self._new_stream(ctypes.byref(handle), 1, priority), "cuStreamCreateWithPriority")  # CU_STREAM_NON_BLOCKING
        return handle.value or 0

    def destroy_stream(self, stream: int) -> None:
        """Destroy a stream that ``create_stream`` made."""
        self._check(self._end_stream(stream), "cuStreamDestroy")

    def stream_done(self, stream: int) -> bool:
        """Whether ``stream`` has finished all its work."""
        code = self._idle(stream)
        if code == 600:  # CUDA_ERROR_NOT_READY
            return False
        self._check(code, "cuStreamQuery")
        return True

    def create_event(self) -> int:
        """A new event without timing."""
        handle = ctypes.c_void_p()
        self._check(self._create(ctypes.byref(handle), 2), "cuEventCreate")  # CU_EVENT_DISABLE_TIMING
        return handle.value or 0

    def record_event(self, event: int, stream: int) -> None:
        """Record the event on ``stream``."""
        self._check(self._record(event, stream), "cuEventRecord")

    def wait_event(self, stream: int, event: int) -> None:
        """Make ``stream`` wait for the event's latest recording; the event may be recorded again at once."""
        self._check(self._await(stream, event, 0), "cuStreamWaitEvent")

    def event_done(self, event: int) -> bool:
        """Whether the event's latest recording has passed."""
        code = self._query(event)
        if code == 600:  # CUDA_ERROR_NOT_READY
            return False
        self._check(code, "cuEventQuery")
        return True
