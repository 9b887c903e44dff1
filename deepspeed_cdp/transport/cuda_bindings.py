"""ctypes bindings of CUDA driver calls that torch does not offer: stream memory operations, copies by address, shared memory.

``cuStreamWaitValue32`` makes a stream wait until a 32-bit word in memory reaches a value. ``cuStreamWriteValue32`` writes a word
once the stream's earlier work is done. Neither occupies a multiprocessor, and the word may be in a peer GPU's memory.
"""

import ctypes


class _Handle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = [("reserved", ctypes.c_char * 64)]


class CudaBindings:
    """libcuda. Calls that take a stream only enqueue work. Streams, events and addresses are integers.

    Raises:
        OSError: the driver library is missing.
        RuntimeError: a call failed; the message names it and the driver's error.
    """

    def __init__(self) -> None:
        library = ctypes.CDLL("libcuda.so.1")
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
        self._allocate, self._free = library.cuMemAlloc_v2, library.cuMemFree_v2
        self._share, self._open, self._close = (
            library.cuIpcGetMemHandle,
            library.cuIpcOpenMemHandle_v2,
            library.cuIpcCloseMemHandle,
        )
        self._allocate.argtypes, self._share.argtypes = [ctypes.POINTER(address), size], [ctypes.POINTER(_Handle), address]
        self._open.argtypes = [ctypes.POINTER(address), _Handle, ctypes.c_uint]
        self._free.argtypes = self._close.argtypes = [address]
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

    def allocate(self, nbytes: int) -> int:
        """Address of new memory on the current device."""
        found = ctypes.c_uint64()
        self._check(self._allocate(ctypes.byref(found), nbytes), f"cuMemAlloc of {nbytes} bytes")
        return found.value

    def free(self, address: int) -> None:
        """Free memory of ``allocate``, once all work of the device is done. An error is ignored: the process may be ending."""
        self._free(address)

    def share(self, address: int) -> bytes:
        """A handle with which other processes of the host open this memory of ``allocate``."""
        handle = _Handle()
        self._check(self._share(ctypes.byref(handle), address), "cuIpcGetMemHandle")
        return ctypes.string_at(ctypes.byref(handle), ctypes.sizeof(handle))

    def open_shared(self, handle: bytes) -> int:
        """Address of another process's memory, mapped for the current device."""
        found = ctypes.c_uint64()
        self._check(self._open(ctypes.byref(found), _Handle.from_buffer_copy(handle), 1), "cuIpcOpenMemHandle")  # peer access
        return found.value

    def close_shared(self, address: int) -> None:
        """Unmap memory of ``open_shared``."""
        self._check(self._close(address), "cuIpcCloseMemHandle")

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
