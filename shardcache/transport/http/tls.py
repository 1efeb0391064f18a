"""TLS sockets that read many records in one call.

`opening` wraps the socket of an https connection in a `TlsSocket`, and `body_readers` fills memory
with its `fill`. A record is the piece that TLS encrypts as a whole, of at most 16 KiB.

Python's ssl returns one record per call. For each record, it releases and takes the interpreter
lock and makes two system calls. That happens 64,000 times per GB, and the threads of a process
spend more time on handing over the lock than on decrypting. OpenSSL can do better, though ssl does
not offer it: `SSL_set_read_ahead` reads several records with one system call, and a read through
`BIO_f_buffer` returns only when all of the memory is filled (man pages of the same names). A BIO is
a stream of OpenSSL; several BIOs form a chain. These functions are called by ctypes, in the very
library that ssl uses, on connections that ssl has made and verified. Where this is not possible,
for example because the interpreter is linked with OpenSSL statically, records are read one by one.

In a measurement, four threads of one process wrote bodies from a server on the same two cores. With
this module, they took 1.2 s of processor time per GB instead of 2.6, and received 0.30 GB/s instead
of 0.21. These are medians of ten rounds, with and without this module in turn. While other programs
had most of the processors, the threads took 1.5 s instead of 2.0, and received 0.12 GB/s instead of
0.08. On a faster host (Intel Xeon; nginx as the server, TLS 1.3, medians of eight rounds), they
took 0.90 s instead of 1.15, and received 0.95 GB/s instead of 0.87.
"""

import ctypes
import ssl
import sys
import time
import weakref
from ctypes import c_char, c_int, c_long, c_size_t, c_void_p
from functools import cache
from typing import Any, cast

# Longest plaintext of a record. One read by ssl returns no more than that.
_RECORD_BYTES = 16 * 1024
# Number of bytes that OpenSSL requests from the kernel at a time.
_AHEAD_BYTES = 64 * 1024
# For a read that is not larger than this, BIO_f_buffer fills a buffer of its own. The buffer could
# then hold bytes that ssl does not know of, so such small reads go through ssl.
_BUFFER_BYTES = 4 * 1024
# After a fast read, the next read may be four times as large, up to a maximum. At the same rate of
# bytes, it takes 0.1 s at most. After a slow read, the next read is a single record again, so that
# bytes are reported as they arrive.
_FAST_S = 0.025
_GROWTH = 4
_MAX_BYTES = 256 * 1024
_SET_SSL = 109  # OpenSSL's BIO_C_SET_SSL
_CLOSE = 1  # OpenSSL's BIO_CLOSE
_POINTER_BYTES = ctypes.sizeof(c_void_p)

# For each function of OpenSSL, the type of its result, then the types of its arguments.
_FUNCTIONS = {
    "BIO_ctrl": (c_long, c_void_p, c_int, c_long, c_void_p),
    "BIO_f_buffer": (c_void_p,),
    "BIO_f_ssl": (c_void_p,),
    "BIO_free_all": (None, c_void_p),
    "BIO_new": (c_void_p, c_void_p),
    "BIO_push": (c_void_p, c_void_p, c_void_p),
    "BIO_read": (c_int, c_void_p, c_void_p, c_int),
    "SSL_has_pending": (c_int, c_void_p),
    "SSL_set_default_read_buffer_len": (None, c_void_p, c_size_t),
    "SSL_set_quiet_shutdown": (None, c_void_p, c_int),
    "SSL_set_read_ahead": (None, c_void_p, c_int),
    "SSL_up_ref": (c_int, c_void_p),
}


class TlsSocket(ssl.SSLSocket):
    """A client's TLS socket that can fill memory from several records in one call.

    Such a socket is made by the `wrap_socket` of a `client_context`.
    """

    # None before the handshake, and if OpenSSL's functions are unreachable.
    _record_reader: "_RecordReader | None" = None
    _next_bytes = _RECORD_BYTES  # maximum size of the next read

    def do_handshake(self, block: bool = False) -> None:
        """Perform the TLS handshake as ssl does, then prepare the reading of several records."""
        super().do_handshake(block)
        self._record_reader = _RecordReader.of(self)

    def fill(self, memory: memoryview) -> int:
        """Fill some or all of the memory and return the number of bytes; 0 at the stream's end.

        Blocks. The socket must have no time limit. Raises OSError.
        """
        begun_s = time.monotonic()
        count = 0
        may_read_several = self._next_bytes > _RECORD_BYTES and len(memory) > _BUFFER_BYTES
        if may_read_several and self._record_reader is not None:
            count = self._record_reader.read(memory[: self._next_bytes])
        if count <= 0:
            # ssl reads one record. If the read above has failed, ssl raises the error that OpenSSL
            # has met, or returns 0 at the stream's end.
            count = cast(int, self.read(_RECORD_BYTES, memory))

        is_fast = time.monotonic() - begun_s < _FAST_S
        if is_fast:
            self._next_bytes = min(_GROWTH * self._next_bytes, _MAX_BYTES)
        else:
            self._next_bytes = _RECORD_BYTES
        return count

    def pending(self) -> int:
        """Return the number of decrypted bytes that wait to be read.

        If there are none, but OpenSSL holds encrypted bytes that it has read ahead, return 1.
        """
        decrypted_bytes = super().pending()
        if decrypted_bytes or self._record_reader is None:
            return decrypted_bytes
        return 1 if self._record_reader.has_unread else 0


@cache
def client_context(ca_file: str | None) -> ssl.SSLContext:
    """Return a context whose sockets are TlsSockets.

    Args:
        ca_file: path of the certificates to trust; None for the system's.

    Raises OSError, ssl.SSLError.
    """
    context = ssl.create_default_context(cafile=ca_file)
    context.sslsocket_class = TlsSocket
    return context


class _RecordReader:
    """Reader of one connection's records by OpenSSL's own functions.

    Args:
        library: the OpenSSL that ssl uses.
        ssl_pointer: the address of the connection's `SSL` structure.
    """

    def __init__(self, library: ctypes.CDLL, ssl_pointer: int) -> None:
        self._library = library
        self._ssl = ssl_pointer  # stays valid at least as long as this object
        library.SSL_set_read_ahead(ssl_pointer, 1)
        library.SSL_set_default_read_buffer_len(ssl_pointer, _AHEAD_BYTES)
        # The TLS connection is shut down when the chain below is freed. The shutdown must be quiet,
        # that is, write nothing: by then, the descriptor may be that of another file.
        library.SSL_set_quiet_shutdown(ssl_pointer, 1)
        library.SSL_up_ref(ssl_pointer)
        ssl_bio = library.BIO_new(library.BIO_f_ssl())
        library.BIO_ctrl(ssl_bio, _SET_SSL, _CLOSE, ssl_pointer)
        buffer_bio = library.BIO_new(library.BIO_f_buffer())
        self._chain = library.BIO_push(buffer_bio, ssl_bio)
        # The chain is not freed at the interpreter's exit, when a thread may still be reading.
        weakref.finalize(self, library.BIO_free_all, self._chain).atexit = False

    @classmethod
    def of(cls, sock: ssl.SSLSocket) -> "_RecordReader | None":
        """Return the reader of a connected socket; None if OpenSSL's functions are unreachable."""
        library = _openssl()
        pointer = _ssl_pointer(sock)
        if library is None or pointer is None:
            return None
        return cls(library, pointer)

    @property
    def has_unread(self) -> bool:
        """True if OpenSSL holds bytes, decrypted or not."""
        return bool(self._library.SSL_has_pending(self._ssl))

    def read(self, memory: memoryview) -> int:
        """Fill the memory; return the number of bytes.

        Only a part of the memory is filled if an error or the stream's end comes first. The result
        is 0 or less if nothing was read.
        """
        count: int = self._library.BIO_read(
            self._chain,
            ctypes.addressof(c_char.from_buffer(memory)),
            len(memory),
        )
        return count


@cache
def _openssl() -> ctypes.CDLL | None:
    """Return the OpenSSL library that ssl uses; None if its functions cannot be found."""
    try:
        import _ssl

        # Lookups in this extension module also find the symbols of the libraries that it is linked
        # with. So this is the very OpenSSL that ssl uses, wherever the file lies.
        library = ctypes.CDLL(_ssl.__file__)
        for name, (result, *arguments) in _FUNCTIONS.items():
            function = getattr(library, name)
            function.restype = result
            function.argtypes = arguments
    except (ImportError, AttributeError, OSError):
        return None
    return library


def _ssl_pointer(sock: ssl.SSLSocket) -> int | None:
    """Return the address of a connection's `SSL` structure.

    Python does not offer this pointer, so it is read from memory. In CPython's Modules/_ssl.c, the
    header of a connection object is followed by a weak reference to the socket, the pointer, and
    the context. The two neighbours are compared with their known values, to prove that the pointer
    is where it is expected. Return None if it is not.
    """
    connection: Any = getattr(sock, "_sslobj", None)
    if sys.implementation.name != "cpython":
        return None
    header_bytes = object.__basicsize__
    if type(connection).__basicsize__ < header_bytes + 3 * _POINTER_BYTES:
        return None

    socket, pointer, context = (c_void_p * 3).from_address(id(connection) + header_bytes)
    if socket != id(weakref.ref(sock)) or context != id(connection.context):
        return None
    return pointer
