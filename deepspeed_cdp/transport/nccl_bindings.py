"""The few calls of NCCL that hand-offs need, on the library that torch has loaded.

Called directly, because torch's ProcessGroupNCCL chooses the streams itself (from a pool of 32 that others share), keeps threads
and a registry per group, and ends the process where this package wants an error that says what a rank waited for.
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


class Nccl:
    """libnccl.

    Raises:
        OSError: there is no library.
        RuntimeError: NCCL reports an error, or is older than 2.17.
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
        """What both ranks of a new communicator must know; the process that asks for it serves as their meeting point."""
        made = _Id()
        self._check(self._id(ctypes.byref(made)), "ncclGetUniqueId")
        return bytes(made)

    def connect(self, unique: bytes, rank: int, max_ctas: int) -> int:
        """Blocks until both ranks (0 and 1) of a communicator are there; at most ``max_ctas`` multiprocessors per message."""
        comm = ctypes.c_void_p()
        config = _Config(ctypes.sizeof(_Config), 0xCAFEBEEF, _CONFIG_VERSION, 1, _UNDEFINED, 1, max_ctas, None)
        self._check(
            self._init(ctypes.byref(comm), 2, _Id.from_buffer_copy(unique), rank, ctypes.byref(config)), "ncclCommInitRankConfig"
        )
        return comm.value or 0

    def send(self, comm: int, peer: int, source: int, nbytes: int, stream: int) -> None:
        """Enqueue sending from a device address on a stream; it ends when the peer has received."""
        self._check(self._send(source, nbytes, _UINT8, peer, comm, stream), "ncclSend")

    def receive(self, comm: int, peer: int, into: int, nbytes: int, stream: int) -> None:
        """Enqueue receiving to a device address."""
        self._check(self._receive(into, nbytes, _UINT8, peer, comm, stream), "ncclRecv")

    def error(self, comm: int) -> str | None:
        """What has gone wrong with a communicator meanwhile (a connection lost), if anything."""
        code = ctypes.c_int()
        self._check(self._state(comm, ctypes.byref(code)), "ncclCommGetAsyncError")
        return self._text(code.value).decode() if code.value not in (0, 7) else None  # ncclInProgress

    def abort(self, comm: int) -> None:
        """End what the communicator is doing, and free it."""
        self._check(self._abort(comm), "ncclCommAbort")
