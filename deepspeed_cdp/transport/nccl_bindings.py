"""ctypes bindings of NCCL's point-to-point calls, in the library that torch has loaded.

``ProcessGroupNCCL`` does not fit: it selects CUDA streams from a shared pool, keeps threads per group, and ends the process on a
timeout, where this package raises an error that names the message.
"""

import ctypes

_UINT8 = 1  # ncclUint8
_CONFIG_VERSION = 21700  # NCCL 2.17: the first with minCTAs and maxCTAs; later libraries read older layouts
_UNDEFINED = -(1 << 31)


class _Id(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * 128)]


class _Config(ctypes.Structure):
    """ncclConfig_v21700"""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cga_cluster_size", ctypes.c_int),
        ("min_ctas", ctypes.c_int),
        ("max_ctas", ctypes.c_int),
        ("net_name", ctypes.c_char_p),
    ]


class NcclBindings:
    """libnccl. Communicators, streams and addresses are integers.

    Raises:
        OSError: the library is missing.
        RuntimeError: a call failed, or NCCL is older than 2.17.
    """

    def __init__(self) -> None:
        library = ctypes.CDLL("libnccl.so.2")
        pointer, comm, size = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t
        self._text, self._last = library.ncclGetErrorString, library.ncclGetLastError
        self._text.argtypes, self._text.restype = [ctypes.c_int], ctypes.c_char_p
        self._last.argtypes, self._last.restype = [comm], ctypes.c_char_p
        self._id, self._abort, self._state = library.ncclGetUniqueId, library.ncclCommAbort, library.ncclCommGetAsyncError
        self._init, self._send, self._receive = library.ncclCommInitRankConfig, library.ncclSend, library.ncclRecv
        self._id.argtypes, self._abort.argtypes = [ctypes.POINTER(_Id)], [comm]
        self._state.argtypes = [comm, ctypes.POINTER(ctypes.c_int)]
        self._init.argtypes = [ctypes.POINTER(comm), ctypes.c_int, _Id, ctypes.c_int, ctypes.POINTER(_Config)]
        self._send.argtypes = self._receive.argtypes = [pointer, size, ctypes.c_int, ctypes.c_int, comm, pointer]
        version = ctypes.c_int()
        self._check(library.ncclGetVersion(ctypes.byref(version)), "ncclGetVersion")
        self.version = version.value
        if self.version < _CONFIG_VERSION:
            raise RuntimeError(f"NCCL {self.version} is older than {_CONFIG_VERSION}")

    def _check(self, code: int, what: str) -> None:
        if code:
            last = self._last(None)
            detail = f" ({last.decode(errors='replace').strip()})" if last else ""
            raise RuntimeError(f"{what}: {self._text(code).decode()}{detail}")

    def new_id(self) -> bytes:
        """The unique id (128 bytes) that both ranks of a new communicator need; they connect through the calling process."""
        made = _Id()
        self._check(self._id(ctypes.byref(made)), "ncclGetUniqueId")
        return bytes(made)

    def connect(self, unique: bytes, rank: int, max_ctas: int) -> int:
        """Make a communicator of ranks 0 and 1; blocks until both have called.

        Args:
            max_ctas: multiprocessors that a message uses at most.
        """
        comm = ctypes.c_void_p()
        config = _Config(ctypes.sizeof(_Config), 0xCAFEBEEF, _CONFIG_VERSION, 1, _UNDEFINED, 1, max_ctas, None)
        self._check(
            self._init(ctypes.byref(comm), 2, _Id.from_buffer_copy(unique), rank, ctypes.byref(config)), "ncclCommInitRankConfig"
        )
        return comm.value or 0

    def send(self, comm: int, peer: int, source: int, nbytes: int, stream: int) -> None:
        """Enqueue a send from device address ``source``; it ends when the peer has received."""
        self._check(self._send(source, nbytes, _UINT8, peer, comm, stream), "ncclSend")

    def receive(self, comm: int, peer: int, into: int, nbytes: int, stream: int) -> None:
        """Enqueue a receive to device address ``into``."""
        self._check(self._receive(into, nbytes, _UINT8, peer, comm, stream), "ncclRecv")

    def error(self, comm: int) -> str | None:
        """The communicator's asynchronous error, such as a lost connection; None if there is none."""
        code = ctypes.c_int()
        self._check(self._state(comm, ctypes.byref(code)), "ncclCommGetAsyncError")
        return self._text(code.value).decode() if code.value not in (0, 7) else None  # ncclInProgress

    def abort(self, comm: int) -> None:
        """Abort the communicator's operations, and free it."""
        self._check(self._abort(comm), "ncclCommAbort")
