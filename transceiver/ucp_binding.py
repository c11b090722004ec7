"""Typed ctypes calls on the UCP library that ucxx has already loaded: what ucxx's Python API lacks.

Owns: memory mapping, packed remote keys, one-sided `get`, control messages as UCP active messages, request status, the
list of lanes of an endpoint. Called by `transceiver.ucx` only, and only from its progress thread. It must never load a
second copy of the library, and never raise into a UCX callback.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import POINTER, c_char_p, c_int, c_int8, c_size_t, c_uint, c_uint32, c_uint64, c_void_p

__all__ = ["UCS_INPROGRESS", "UCS_OK", "UcpBinding", "UcpError"]

UCS_OK = 0
UCS_INPROGRESS = 1
_ERROR_POINTERS = 100  # a status pointer in the last 100 addresses is a negated error code
_AM_EAGER_REPLY = 0x1 | 0x2
_MAP_NONBLOCK = 0x1
_MAP_FIELDS = 0x1 | 0x2 | 0x4 | 0x10  # address, length, flags, memory type
_ATTR_FLAGS = 0x10
_ATTR_MEMH = 0x100

AmCallback = ctypes.CFUNCTYPE(c_int8, c_void_p, c_void_p, c_size_t, c_void_p, c_size_t, c_void_p)


class UcpError(OSError):
    """A UCP call failed; the text is UCX's own."""


class _MapParams(ctypes.Structure):
    _fields_ = (
        ("field_mask", c_uint64),
        ("address", c_void_p),
        ("length", c_size_t),
        ("flags", c_uint),
        ("prot", c_uint),
        ("memory_type", c_int),
        ("exported", c_void_p),
    )


class _RequestParam(ctypes.Structure):
    _fields_ = (
        ("op_attr_mask", c_uint32),
        ("flags", c_uint32),
        ("request", c_void_p),
        ("callback", c_void_p),
        ("datatype", c_uint64),
        ("user_data", c_void_p),
        ("reply_buffer", c_void_p),
        ("memory_type", c_int),
        ("recv_info", c_void_p),
        ("memh", c_void_p),
    )


class _AmHandlerParam(ctypes.Structure):
    _fields_ = (
        ("field_mask", c_uint64),
        ("id", c_uint),
        ("flags", c_uint32),
        ("cb", c_void_p),
        ("arg", c_void_p),
    )


_AM_ATTR_RNDV = 1 << 17  # UCP_AM_RECV_ATTR_FLAG_RNDV, ucp.h


class _AmRecvParam(ctypes.Structure):
    _fields_ = (("recv_attr", c_uint64), ("reply_ep", c_void_p))


class _TransportEntry(ctypes.Structure):
    _fields_ = (("transport_name", c_char_p), ("device_name", c_char_p))


class _EpAttr(ctypes.Structure):
    _fields_ = (
        ("field_mask", c_uint64),
        ("name", ctypes.c_char * 32),
        ("local_sockaddr", ctypes.c_uint8 * 128),
        ("remote_sockaddr", ctypes.c_uint8 * 128),
        ("entries", POINTER(_TransportEntry)),
        ("num_entries", c_uint),
        ("entry_size", c_size_t),
        ("user_data", c_void_p),
    )


class UcpBinding:
    """The calls, bound once per process image of libucp. Every method blocks no longer than UCX itself does."""

    def __init__(self) -> None:
        self._lib = lib = ctypes.CDLL("libucp.so.0")  # the soname ucxx loaded: the same image
        # The calls made once per block keep the GIL: they queue work and return within a microsecond.
        self._fast = fast = ctypes.PyDLL("libucp.so.0")
        self._ucs = ctypes.CDLL("libucs.so.0")
        self._ucs.ucs_status_string.restype = c_char_p
        self._ucs.ucs_status_string.argtypes = [c_int8]

        def bind(library: ctypes.CDLL, name: str, restype: object, *argtypes: object) -> None:
            function = getattr(library, name)
            function.restype, function.argtypes = restype, list(argtypes)

        bind(lib, "ucp_mem_map", c_int8, c_void_p, POINTER(_MapParams), POINTER(c_void_p))
        bind(lib, "ucp_mem_unmap", c_int8, c_void_p, c_void_p)
        bind(lib, "ucp_rkey_pack", c_int8, c_void_p, c_void_p, POINTER(c_void_p), POINTER(c_size_t))
        bind(lib, "ucp_rkey_buffer_release", None, c_void_p)
        bind(lib, "ucp_ep_rkey_unpack", c_int8, c_void_p, c_char_p, POINTER(c_void_p))
        bind(lib, "ucp_rkey_destroy", None, c_void_p)
        bind(lib, "ucp_worker_set_am_recv_handler", c_int8, c_void_p, POINTER(_AmHandlerParam))
        bind(lib, "ucp_ep_query", c_int8, c_void_p, POINTER(_EpAttr))
        bind(lib, "ucp_worker_progress", c_uint, c_void_p)
        bind(fast, "ucp_get_nbx", c_void_p, c_void_p, c_void_p, c_size_t, c_uint64, c_void_p, POINTER(_RequestParam))
        bind(fast, "ucp_request_check_status", c_int8, c_void_p)
        bind(fast, "ucp_request_free", None, c_void_p)
        bind(
            fast, "ucp_am_send_nbx",
            c_void_p, c_void_p, c_uint, c_char_p, c_size_t, c_void_p, c_size_t, POINTER(_RequestParam),
        )  # fmt: skip
        self._am_param = _RequestParam(op_attr_mask=_ATTR_FLAGS, flags=_AM_EAGER_REPLY)
        self.progress: Callable[[int], int] = lib.ucp_worker_progress

    def status_text(self, status: int) -> str:
        """UCX's text for a status code."""
        text: bytes = self._ucs.ucs_status_string(status)
        return text.decode(errors="replace")

    def _check(self, status: int, what: str) -> None:
        if status != UCS_OK:
            raise UcpError(f"{what}: {self.status_text(status)}")

    def map_memory(self, context: int, address: int, nbytes: int, memory_type: int = 0) -> int:
        """Register `nbytes` at `address` (memory_type 0: host, 1: CUDA); returns the memory handle. Raises UcpError."""
        params = _MapParams(
            field_mask=_MAP_FIELDS, address=address, length=nbytes, flags=_MAP_NONBLOCK, memory_type=memory_type
        )
        handle = c_void_p()
        self._check(self._lib.ucp_mem_map(context, ctypes.byref(params), ctypes.byref(handle)), "ucp_mem_map")
        return int(handle.value or 0)

    def unmap_memory(self, context: int, handle: int) -> None:
        """Undo `map_memory`. Raises UcpError."""
        self._check(self._lib.ucp_mem_unmap(context, handle), "ucp_mem_unmap")

    def pack_key(self, context: int, handle: int) -> bytes:
        """The remote key of a mapped region, to send to a peer."""
        buffer, size = c_void_p(), c_size_t()
        self._check(self._lib.ucp_rkey_pack(context, handle, ctypes.byref(buffer), ctypes.byref(size)), "ucp_rkey_pack")
        try:
            return ctypes.string_at(buffer.value or 0, size.value)
        finally:
            self._lib.ucp_rkey_buffer_release(buffer)

    def unpack_key(self, endpoint: int, packed: bytes) -> int:
        """A peer's key, usable on `endpoint` until `destroy_key`. Raises UcpError for one that UCX refuses.

        `packed` must be a whole key (`ucx_fabric.key_is_sound`): UCX believes the lengths in it.
        """
        key = c_void_p()
        self._check(self._lib.ucp_ep_rkey_unpack(endpoint, packed, ctypes.byref(key)), "ucp_ep_rkey_unpack")
        return int(key.value or 0)

    def destroy_key(self, key: int) -> None:
        """Release what `unpack_key` returned."""
        self._lib.ucp_rkey_destroy(key)

    def get_param(self, memh: int | None) -> ctypes.Structure:
        """The parameter block of gets into the local region `memh` (None: memory that is not mapped); reuse it."""
        return _RequestParam() if memh is None else _RequestParam(op_attr_mask=_ATTR_MEMH, memh=memh)

    def get(self, endpoint: int, local: int, nbytes: int, remote: int, key: int, param: ctypes.Structure) -> int:
        """Start one get. Returns 0 (already complete) or a request pointer; raises UcpError if UCX refuses it."""
        pointer = self._fast.ucp_get_nbx(endpoint, local, nbytes, remote, key, ctypes.byref(param))
        return self._request(pointer, "ucp_get_nbx")

    def send(self, endpoint: int, am_id: int, payload: bytes) -> int:
        """Start one control message; `payload` must live until the request is done. Returns as `get`."""
        pointer = self._fast.ucp_am_send_nbx(
            endpoint, am_id, None, 0, payload, len(payload), ctypes.byref(self._am_param)
        )
        return self._request(pointer, "ucp_am_send_nbx")

    def send_data(self, endpoint: int, am_id: int, header: bytes, address: int, nbytes: int) -> int:
        """Start one message of a header and `nbytes` of memory; both must live until the request is done. As `get`."""
        pointer = self._fast.ucp_am_send_nbx(
            endpoint, am_id, header, len(header), address, nbytes, ctypes.byref(self._am_param)
        )
        return self._request(pointer, "ucp_am_send_nbx")

    def _request(self, pointer: int | None, what: str) -> int:
        if not pointer:
            return 0
        if pointer >= 2**64 - _ERROR_POINTERS:
            raise UcpError(f"{what}: {self.status_text(pointer - 2**64)}")
        return pointer

    def status(self, request: int) -> int:
        """UCS_INPROGRESS, UCS_OK or a negative error of a started operation."""
        result: int = self._fast.ucp_request_check_status(request)
        return result

    def free(self, request: int) -> None:
        """Forget a finished request. The pointer is invalid afterwards."""
        self._fast.ucp_request_free(request)

    def on_message(self, worker: int, am_id: int, handler: Callable[[int, int, int], None] | None) -> object:
        """Call ``handler(endpoint, data address, length)`` for every message with `am_id`; None removes it.

        The handler runs inside `progress`, must copy what it keeps, and must not raise. Keep the returned object
        alive as long as the handler is installed. A message that its sender only announces (by rendezvous, which
        this side never uses: the address would be that of UCX's own description of it) is dropped.
        """
        if handler is None:
            return self._set_handler(worker, am_id, None)
        return self.on_data(worker, am_id, lambda endpoint, _header, data, length: handler(endpoint, data, length))

    def on_data(self, worker: int, am_id: int, handler: Callable[[int, bytes, int, int], None]) -> object:
        """As `on_message`, for messages with a header: ``handler(endpoint, header, data address, length)``."""

        def trampoline(_arg: int, header: int, hlen: int, data: int, length: int, param: int) -> int:
            facts = _AmRecvParam.from_address(param)
            if not facts.recv_attr & _AM_ATTR_RNDV:
                header_bytes = ctypes.string_at(header, hlen) if hlen else b""
                handler(facts.reply_ep or 0, header_bytes, data or 0, length)
            return UCS_OK

        return self._set_handler(worker, am_id, AmCallback(trampoline))

    def _set_handler(self, worker: int, am_id: int, callback: ctypes._FuncPointer | None) -> object:
        params = _AmHandlerParam(
            field_mask=0x7, id=am_id, flags=0x1, cb=ctypes.cast(callback, c_void_p) if callback else None
        )
        self._check(
            self._lib.ucp_worker_set_am_recv_handler(worker, ctypes.byref(params)), "ucp_worker_set_am_recv_handler"
        )
        return callback

    def transports(self, endpoint: int) -> tuple[str, ...]:
        """Transport/device names of the endpoint's lanes, e.g. ``("tcp/eth0", "cma/memory")``."""
        entries = (_TransportEntry * 32)()
        attr = _EpAttr(field_mask=0x8, entries=entries, num_entries=32, entry_size=ctypes.sizeof(_TransportEntry))
        self._check(self._lib.ucp_ep_query(endpoint, ctypes.byref(attr)), "ucp_ep_query")
        return tuple(
            f"{(e.transport_name or b'?').decode()}/{(e.device_name or b'?').decode()}"
            for e in entries[: attr.num_entries]
        )
