"""Bearer keys from a file, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from pathlib import Path

from jpeg_dlm.errors import UsageError
from jpeg_dlm.serve.http_errors import ApiError

SHORTEST_KEY = 16


def read_keys(path: Path) -> tuple[bytes, ...]:
    """Return the hashes of the keys in a file: one on each line; empty lines and those that begin with # do not count."""
    lines = [line.strip() for line in path.read_text("utf-8").splitlines()]
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise UsageError(f"'{path}' holds no key: write one on each line.")
    if min(map(len, keys)) < SHORTEST_KEY:
        raise UsageError(f"A key in '{path}' has fewer than {SHORTEST_KEY} characters: make it longer.")
    return tuple(hashlib.sha256(key.encode()).digest() for key in keys)


def check_key(header: str, keys: Sequence[bytes]) -> None:
    """Raise an error unless the header `Authorization` holds one of the keys."""
    scheme, _, key = header.partition(" ")
    found = hashlib.sha256(key.strip().encode("utf-8", "replace")).digest()
    # Hashes of equal length, all of them compared: the time tells nothing about a key.
    known = [hmac.compare_digest(found, other) for other in keys]
    if scheme.lower() != "bearer" or not any(known):
        raise ApiError(
            401, "This server needs a key: send the header  Authorization: Bearer KEY.", code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )  # fmt: skip
