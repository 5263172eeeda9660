"""A file of tokens as examples: windows of one length, read through the memory map of the file."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from autopar.errors import InvalidArgumentError


class TokenWindows:
    """Windows of a token file: `windows[i]` are `length` tokens from token `i * stride` on, as int32.

    Only what is read comes into memory. The tokens after the last whole window are left out.
    """

    def __init__(self, path: str | Path, length: int, dtype: np.dtype, stride: int) -> None:
        self.path, self.length, self.dtype, self.stride = Path(path), length, dtype, stride
        self._tokens = np.memmap(self.path, dtype=dtype, mode="r")

    def __len__(self) -> int:
        return (len(self._tokens) - self.length) // self.stride + 1

    def __getitem__(self, index: int) -> np.ndarray:
        index = range(len(self))[index]
        first = index * self.stride
        tokens = self._tokens[first : first + self.length]
        if tokens.dtype.itemsize >= 4 and tokens.max() > np.iinfo(np.int32).max:
            raise InvalidArgumentError(
                where=f"{self!r}, window {index}", expected="tokens below 2**31, which int32 holds",
                got=str(tokens.max()), hint="give the type that the file was written in: dtype='uint16'",
            )  # fmt: skip
        return tokens.astype(np.int32)

    def __repr__(self) -> str:
        return f"<{len(self)} windows of {self.length} tokens ({self.dtype}) of {self.path}>"


def tokens(
    path: str | Path, *, length: int, dtype: str | np.dtype | type = "uint16", stride: int | None = None
) -> TokenWindows:
    """Windows of `length` tokens of a file that holds nothing but tokens of one integer type, one after the other.

    Windows begin `stride` tokens apart; None: `length`, so that each token is in one window. With `length=n + 1` and
    `stride=n` a window has n tokens and the next token of each.

    Raises: InvalidArgumentError for a file that is not such tokens or has not one window; FileNotFoundError.
    """
    where = f"autopar.data.tokens({str(path)!r})"
    stride = length if stride is None else stride
    try:
        kind = np.dtype(dtype)
    except TypeError:
        kind = None
    if kind is None or kind.kind not in "iu":
        raise InvalidArgumentError(
            where=where, expected="an integer type of tokens", got=repr(dtype) if kind is None else str(kind),
            hint="give the type that the file was written in: numpy.array(tokens, 'uint16').tofile(path)",
        )  # fmt: skip
    if length < 1 or stride < 1:
        raise InvalidArgumentError(
            where=where, expected="length and stride of 1 or more", got=f"length={length}, stride={stride}",
            hint="length is the number of tokens of an example",
        )  # fmt: skip
    num_bytes = os.path.getsize(path)
    if num_bytes % kind.itemsize or num_bytes < length * kind.itemsize:
        raise InvalidArgumentError(
            where=where, expected=f"a file of {kind} tokens, at least {length} of them", got=f"{num_bytes} bytes",
            hint="write it with numpy.array(tokens, dtype).tofile(path), and give the same dtype here",
        )  # fmt: skip
    return TokenWindows(path, length, kind, stride)
