"""TLS sockets that read many records in one call.

Python's ssl returns one record of at most 16 KiB a call, for which it gives up and takes the
interpreter lock and makes two system calls: 64,000 times per GB, and the threads of a process spend
more time on handing over the lock than on decrypting. OpenSSL can do better, but ssl does not offer
it: `SSL_set_read_ahead` reads several records with one system call, and a read through
`BIO_f_buffer` returns only when all of the memory is filled (man pages of the same names). Both are
called by ctypes, in the very library that ssl uses, on connections that ssl has made and verified.
Where that is not possible, for example because an interpreter contains OpenSSL statically, records
are read one by one.

Four threads of one process that wrote parts from a server on the same two cores took 1.2 s of
processor time per GB instead of 2.6, and received 0.30 GB/s instead of 0.21: medians of ten rounds,
with and without it in turn. Where other programs had most of the processors, it was 1.5 s instead
of 2.0, and 0.12 GB/s instead of 0.08.
"""

import ctypes
import ssl
import sys
import time
import weakref
from ctypes import c_char, c_int, c_long, c_size_t, c_void_p
from functools import cache
from typing import Any, cast

# Longest plaintext of a record, which is what one read by ssl returns at most.
_RECORD_BYTES = 16 * 1024
# Bytes that OpenSSL asks the kernel for at a time.
_AHEAD_BYTES = 64 * 1024
# BIO_f_buffer reads shorter pieces into a buffer of this size, which would then hold bytes that ssl
# does not know of.
_BUFFER_BYTES = 4 * 1024
# After a fast read, the next one may be four times as large, up to a maximum: at the same pace, it
# takes 0.1 s at most. After a slow one, it is a record again: bytes are reported as they arrive.
_FAST_S = 0.025
_GROWTH = 4
_MAX_BYTES = 256 * 1024
# OpenSSL's BIO_C_SET_SSL and BIO_CLOSE.
_SET_SSL = 109
_CLOSE = 1
_POINTER_BYTES = ctypes.sizeof(c_void_p)

# Type of the result, and those of the arguments.
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
    """A client's TLS socket that fills memory from as many records as that takes.

    It is made by the `wrap_socket` of a `client_context`.
    """

    _records: "_Records | None" = None
    _next_bytes = _RECORD_BYTES

    def do_handshake(self, block: bool = False) -> None:
        """Perform the TLS handshake, as ssl does."""
        super().do_handshake(block)
        self._records = _Records.of(self)

    def fill(self, memory: memoryview) -> int:
        """Fill some or all of the memory and return the number of bytes; 0 at the stream's end.

        Blocks; the socket must have no time limit. Raises OSError.
        """
        begun_s = time.monotonic()
        count = 0
        takes_several = self._next_bytes > _RECORD_BYTES and len(memory) > _BUFFER_BYTES
        if takes_several and self._records is not None:
            count = self._records.read(memory[: self._next_bytes])
        if count <= 0:
            # ssl then raises the error that OpenSSL has met, or returns 0 at the stream's end.
            count = cast(int, self.read(_RECORD_BYTES, memory))

        is_fast = time.monotonic() - begun_s < _FAST_S
        if is_fast:
            self._next_bytes = min(_GROWTH * self._next_bytes, _MAX_BYTES)
        else:
            self._next_bytes = _RECORD_BYTES
        return count

    def pending(self) -> int:
        """Return the number of decrypted bytes that wait to be read.

        1 if OpenSSL holds some that are encrypted.
        """
        decrypted_bytes = super().pending()
        if decrypted_bytes or self._records is None:
            return decrypted_bytes
        return 1 if self._records.has_unread else 0


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


class _Records:
    """OpenSSL's own reading of one connection."""

    def __init__(self, library: ctypes.CDLL, ssl_pointer: int) -> None:
        self._library = library
        self._ssl = ssl_pointer  # lives as long as this object, or longer
        library.SSL_set_read_ahead(ssl_pointer, 1)
        library.SSL_set_default_read_buffer_len(ssl_pointer, _AHEAD_BYTES)
        # Freeing the chain shuts the connection down, which must not write to a file descriptor
        # that may be another's.
        library.SSL_set_quiet_shutdown(ssl_pointer, 1)
        library.SSL_up_ref(ssl_pointer)
        ssl_bio = library.BIO_new(library.BIO_f_ssl())
        library.BIO_ctrl(ssl_bio, _SET_SSL, _CLOSE, ssl_pointer)
        buffer_bio = library.BIO_new(library.BIO_f_buffer())
        self._chain = library.BIO_push(buffer_bio, ssl_bio)
        # Not at exit, when a thread may still be reading.
        weakref.finalize(self, library.BIO_free_all, self._chain).atexit = False

    @classmethod
    def of(cls, sock: ssl.SSLSocket) -> "_Records | None":
        """Return the records of a connected socket; None if OpenSSL cannot be called here."""
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
        """Fill the memory, or part of it before an error or the stream's end.

        Return 0 or less for none of it.
        """
        count: int = self._library.BIO_read(
            self._chain,
            ctypes.addressof(c_char.from_buffer(memory)),
            len(memory),
        )
        return count


@cache
def _openssl() -> ctypes.CDLL | None:
    """Return the library that ssl uses, wherever it lies.

    None if it cannot be reached, or is another.
    """
    try:
        import _ssl

        # Its symbols include those of the libraries that it has loaded.
        library = ctypes.CDLL(_ssl.__file__)
        for name, (result, *arguments) in _FUNCTIONS.items():
            function = getattr(library, name)
            function.restype = result
            function.argtypes = arguments
    except (ImportError, AttributeError, OSError):
        return None
    return library


def _ssl_pointer(sock: ssl.SSLSocket) -> int | None:
    """Return the `SSL *` of a connection.

    None unless it lies where CPython has it, which both neighbours prove.

    In Modules/_ssl.c, an object's header is followed by a weak reference to the socket, the
    pointer, and the context.
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
