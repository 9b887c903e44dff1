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
        self._read = library.cuMemcpyDtoH_v2
        self._wait.argtypes = self._write.argtypes = [stream, address, ctypes.c_uint32, ctypes.c_uint]
        self._copy.argtypes = [address, address, size, stream]
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
