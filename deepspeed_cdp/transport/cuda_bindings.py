"""The few calls of the CUDA driver that torch does not offer: stream memory operations and plain copies between addresses.

``cuStreamWaitValue32`` holds a stream until a word in memory has reached a value, ``cuStreamWriteValue32`` sets one when the work
before it is done. Neither uses a multiprocessor; the words may lie in a peer's memory.
"""

import ctypes


class Driver:
    """libcuda, called directly: each call returns once it is enqueued.

    Raises:
        OSError: there is no driver library.
        RuntimeError: the driver reports an error.
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
        self._name = library.cuGetErrorName
        self._name.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)]

    def _check(self, code: int, what: str) -> None:
        if code:
            name = ctypes.c_char_p()
            self._name(code, ctypes.byref(name))
            raise RuntimeError(f"{what}: {name.value.decode() if name.value else code}")

    def wait(self, stream: int, word: int, value: int) -> None:
        """Hold ``stream`` until the 32-bit word at address ``word`` is at least ``value`` (compared cyclically)."""
        self._check(self._wait(stream, word, value & 0xFFFFFFFF, 0), "cuStreamWaitValue32")

    def write(self, stream: int, word: int, value: int) -> None:
        """Set the word once ``stream`` has done what it was given; what it wrote before is visible by then."""
        self._check(self._write(stream, word, value & 0xFFFFFFFF, 0), "cuStreamWriteValue32")

    def copy(self, stream: int, to: int, source: int, nbytes: int) -> None:
        """Copy between device addresses, a peer's too, with a copy engine."""
        self._check(self._copy(to, source, nbytes, stream), "cuMemcpyDtoDAsync")

    def fill(self, stream: int, to: int, value: int, nbytes: int) -> None:
        """Set ``nbytes`` bytes at a device address; unlike torch's kernels this loads nothing on first use."""
        self._check(self._fill(to, value, nbytes, stream), "cuMemsetD8Async")

    def stream(self, priority: int = -1) -> int:
        """A new stream of high priority that no one else is given (torch hands out the same 32 in turn)."""
        handle = ctypes.c_void_p()
        self._check(self._new_stream(ctypes.byref(handle), 1, priority), "cuStreamCreateWithPriority")  # CU_STREAM_NON_BLOCKING
        return handle.value or 0

    def destroy(self, stream: int) -> None:
        """Give a stream of ``stream`` back."""
        self._check(self._end_stream(stream), "cuStreamDestroy")

    def idle(self, stream: int) -> bool:
        """Whether ``stream`` has done what it was given."""
        code = self._idle(stream)
        if code == 600:  # CUDA_ERROR_NOT_READY
            return False
        self._check(code, "cuStreamQuery")
        return True

    def event(self) -> int:
        """A new event without timing."""
        handle = ctypes.c_void_p()
        self._check(self._create(ctypes.byref(handle), 2), "cuEventCreate")  # CU_EVENT_DISABLE_TIMING
        return handle.value or 0

    def record(self, event: int, stream: int) -> None:
        """The event comes when ``stream`` has done what it was given."""
        self._check(self._record(event, stream), "cuEventRecord")

    def follow(self, stream: int, event: int) -> None:
        """Hold ``stream`` until the event, as it was last recorded, comes; the event may be recorded anew right after."""
        self._check(self._await(stream, event, 0), "cuStreamWaitEvent")

    def reached(self, event: int) -> bool:
        """Whether the event has come."""
        code = self._query(event)
        if code == 600:  # CUDA_ERROR_NOT_READY
            return False
        self._check(code, "cuEventQuery")
        return True
