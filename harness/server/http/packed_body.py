"""Compressed request bodies (gzip, zstd), unpacked in another thread within bounds: a few bytes may hide many."""

import asyncio
import sys
import zlib
from collections.abc import Callable, Mapping

from harness.errors import BodyTooLarge, EncodingRefused, MalformedRequest

_GZIP = 16 + zlib.MAX_WBITS
_ZSTD_WINDOW_LOG = 23  # 8 MiB, which every decoder must support (RFC 8878)


async def unpack_body(packed: bytes, encoding: str, most_bytes: int) -> bytes:
    """Unpack a body. Raises `EncodingRefused`, `BodyTooLarge`, or `MalformedRequest` for invalid data."""
    unpack = _UNPACKERS.get(encoding)
    if unpack is None:
        raise EncodingRefused(
            f"content-encoding: expected {' or '.join(_UNPACKERS)}, or none; got {encoding[:64]!r}",
            param="content-encoding",
        )
    body = await asyncio.to_thread(unpack, packed, most_bytes + 1)
    if len(body) > most_bytes:
        raise BodyTooLarge(
            f"body: expected at most {most_bytes} bytes once unpacked (the server's limit `body_bytes`), got more",
            limit="body_bytes",
        )
    return body


def _unpack_gzip(packed: bytes, most_bytes: int) -> bytes:
    member = zlib.decompressobj(_GZIP)
    try:
        body = member.decompress(packed, most_bytes)
    except zlib.error as error:
        raise _describe_damage("gzip", error) from error
    if len(body) < most_bytes and (not member.eof or member.unused_data):
        raise _describe_damage("gzip", "it is not one whole member")
    return body


def _unpack_zstd(packed: bytes, most_bytes: int) -> bytes:
    # Imported late, because few clients compress bodies.
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd

    frame = zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: _ZSTD_WINDOW_LOG})
    try:
        body = frame.decompress(packed, most_bytes)
    except zstd.ZstdError as error:
        raise _describe_damage("zstd", error) from error
    if len(body) < most_bytes and (not frame.eof or frame.unused_data):
        raise _describe_damage("zstd", "it is not one whole frame")
    return body


_UNPACKERS: Mapping[str, Callable[[bytes, int], bytes]] = {
    "gzip": _unpack_gzip,
    "x-gzip": _unpack_gzip,
    "zstd": _unpack_zstd,
}


def _describe_damage(encoding: str, why: object) -> MalformedRequest:
    return MalformedRequest(f"body: expected {encoding} data, as content-encoding says: {why}", param="body")
