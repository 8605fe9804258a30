"""Draw random orthogonal matrices, as Hadamard matrices where the width allows it.

    q, how = random_orthogonal(4096, torch.Generator().manual_seed(0))

A row x of C numbers is rotated to x Q. Q = diag(signs) H / sqrt(C) with a Hadamard matrix H, of
numbers 1 and -1 alone, spreads one large number evenly over all channels (QuaRot, Ashkboos et al.
2024, arXiv 2404.00456, section 3).
"""

import math

import torch
from torch import Tensor


def random_orthogonal(size: int, generator: torch.Generator) -> tuple[Tensor, str]:
    """Draw an orthogonal matrix.

    Returns:
        (Q (size, size) in float64, what it is, for people)
    """
    hadamard = hadamard_matrix(size)
    if hadamard is not None:
        signs = 2.0 * torch.randint(2, (size, 1), generator=generator) - 1
        return signs * hadamard / math.sqrt(size), "a Hadamard matrix times random signs"
    # Mezzadri 2007, arXiv math-ph/0609050, section 5: with these signs the matrix is uniform.
    q, r = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))
    return q * r.diagonal().sign(), "a random orthogonal matrix"


def keeping_mean(q: Tensor) -> Tensor:
    """Return an orthogonal matrix near Q (C, C) that leaves the vector of ones as it is.

    A reflection takes Q 1 to 1. So the mean over the channels of x Q is that of x.
    """
    ones = q.new_ones(len(q))
    normal = q @ ones - ones
    square = normal.square().sum()
    if square < 1e-20 * len(q):  # Q 1 = 1 already
        return q
    return q - torch.outer(normal, normal @ q) * (2 / square)


def hadamard_matrix(size: int) -> Tensor | None:
    """Return a Hadamard matrix (size, size) in float64; None where these constructions give none.

    They are those of Sylvester, 2^k, and of Paley, (q + 1) 2^k with a prime q = 3 mod 4: 768 = 12 *
    64 and 5120 = 20 * 256, for example.
    """
    doublings = size & -size  # the largest power of two that divides it
    while doublings >= 1:
        core = size // doublings
        if core == 1:
            return _sylvester(size)
        if core % 4 == 0 and _is_prime(core - 1):
            return torch.kron(_sylvester(doublings), _paley(core - 1))
        doublings //= 2
    return None


def _sylvester(size: int) -> Tensor:
    """Return the Hadamard matrix of a power of two."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


def _paley(prime: int) -> Tensor:
    """Return the Hadamard matrix of Paley (1933) of size q + 1, for a prime q = 3 mod 4.

    It is I + [[0, 1], [-1, S]], and S[i, j] says whether i - j is a square modulo q.
    """
    numbers = torch.arange(prime)
    is_square = torch.zeros(prime, dtype=torch.bool)
    is_square[numbers.square() % prime] = True
    signs = 2.0 * is_square.double() - 1
    signs[0] = 0
    matrix = torch.ones(prime + 1, prime + 1, dtype=torch.float64)
    matrix[1:, 0] = -1
    matrix[0, 0] = 0
    matrix[1:, 1:] = signs[(numbers[:, None] - numbers) % prime]
    return matrix + torch.eye(prime + 1, dtype=torch.float64)


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % n for n in range(2, math.isqrt(number) + 1))
