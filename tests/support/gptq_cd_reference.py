"""GPTQ with coordinate descent in plain NumPy float64: the twin that the core must agree with.

All functions work on all rows at once. `values` is W^ = (code - zero) * scale in float64 of the float32 product.
"""

from __future__ import annotations

import numpy as np

SCALE = {"float32": np.float32, "float16": np.float16}
SHRINK_STEPS = 70


def stored(scale, scale_dtype):
    """Round through float32 to the stored type."""
    return scale.astype(np.float32).astype(SCALE[scale_dtype]).astype(np.float64)


def groups(d, group_size):
    """Group of each column, and the column ranges of the groups."""
    g = d if group_size <= 0 else group_size
    return np.arange(d) // g, [slice(k, min(k + g, d)) for k in range(0, d, g)]


def to_code(w, scale, zero, bits):
    """Nearest biased code."""
    return np.clip(np.round(w / scale) + zero, 0, 2**bits - 1)


def value(code, scale, zero):
    """The value of a code: one float32 product."""
    return ((code - zero).astype(np.float32) * scale.astype(np.float32)).astype(np.float64)


def fit_scales(w, cost, *, bits, group_size, symmetric, scale_dtype, signed):
    """Scales and zero points of least weighted error on a shrink grid; `signed` tries both signs of a scale."""
    m, d = w.shape
    _, ranges = groups(d, group_size)
    middle, top = 2 ** (bits - 1), 2**bits - 1
    scales, zeros = np.ones((m, len(ranges))), np.full((m, len(ranges)), middle if symmetric else 0)
    for k, r in enumerate(ranges):
        block, c = w[:, r], cost[r]
        low, high = np.minimum(block.min(1), 0), np.maximum(block.max(1), 0)
        best = np.full(m, np.inf)
        for sign in (1, -1) if signed and symmetric else (1,):
            lo, hi = (low, high) if sign > 0 else (-high, -low)
            for i in range(SHRINK_STEPS):
                shrink = 1 - i / 100
                if symmetric:
                    exact = (
                        np.maximum(hi / (middle - 1), -lo / middle)
                        if signed
                        else np.maximum(hi, -lo) / (middle - 1)
                    )
                else:
                    exact = (hi - lo) / top
                s = stored(exact * shrink, scale_dtype) * sign
                live = s != 0
                s = np.where(live, s, 1.0)
                z = np.full(m, middle) if symmetric else np.clip(np.round(-lo * shrink / s), 0, top)
                q = value(to_code(block, s[:, None], z[:, None], bits), s[:, None], z[:, None])
                err = np.where(live | (i == 0), ((block - q) ** 2 @ c), np.inf)
                better = err < best
                best = np.where(better, err, best)
                scales[:, k] = np.where(better, s, scales[:, k])
                zeros[:, k] = np.where(better, z, zeros[:, k])
    return scales, zeros.astype(np.int64)


def conditional_order(s):
    """Columns by falling conditional energy 1 / [(S_F)^-1]_jj, F the columns that remain."""
    p = np.linalg.inv(s)
    p = (p + p.T) / 2
    left = np.ones(len(s), bool)
    order = []
    for _ in range(len(s)):
        diag = np.where(left, np.diag(p), np.inf)
        j = int(np.argmin(diag))
        order.append(j)
        left[j] = False
        p = p - np.outer(p[:, j], p[j] / p[j, j])
    return np.array(order)


def reversed_factor(s):
    """R upper triangular with S = R R^T."""
    return np.linalg.cholesky(s[::-1, ::-1])[::-1, ::-1]


def pivots(s, order):
    """The cost of a unit error in each column after the later columns of the order have compensated it."""
    out = np.empty(len(s))
    out[order] = np.diag(reversed_factor(s[np.ix_(order, order)])) ** 2
    return out


def sweep(w, s, order, scales, zeros, bits, group_size):
    """One greedy pass: each column rounded in turn, its error spread over the columns still to come."""
    m, d = w.shape
    owner, _ = groups(d, group_size)
    r = reversed_factor(s[np.ix_(order, order)])
    a = r / np.diag(r)
    updated = w[:, order].copy()
    codes, q = np.zeros((m, d)), np.zeros((m, d))
    for i, j in enumerate(order):
        k = owner[j]
        codes[:, j] = to_code(updated[:, i], scales[:, k], zeros[:, k], bits)
        q[:, j] = value(codes[:, j], scales[:, k], zeros[:, k])
        updated[:, i + 1 :] += np.outer(w[:, j] - q[:, j], a[i, i + 1 :])
    return codes, q


def beam(w, s, order, scales, zeros, bits, group_size, n_paths):
    """Sweep with `n_paths` open in each row, each going on with its two nearest codes; give the cheapest."""
    m, d = w.shape
    owner, _ = groups(d, group_size)
    r = reversed_factor(s[np.ix_(order, order)])
    a, p = r / np.diag(r), np.diag(r) ** 2
    best = np.zeros((m, d))
    for row in range(m):
        codes, updated, costs = np.zeros((1, d)), w[row : row + 1, order], np.zeros(1)
        for i, j in enumerate(order):
            scale, zero = scales[row, owner[j]], zeros[row, owner[j]]
            near = to_code(updated[:, i], scale, zero, bits)
            second = near + np.where(updated[:, i] / scale + zero > near, 1, -1)
            paths, code = np.tile(np.arange(len(costs)), 2), np.concatenate([near, second])
            q = value(code, scale, zero)
            costs = costs[paths] + p[i] * (updated[paths, i] - q) ** 2
            costs[(code < 0) | (code > 2**bits - 1)] = np.inf
            kept = np.argsort(costs, kind="stable")[:n_paths]
            kept = kept[np.isfinite(costs[kept])]
            codes, updated, costs = codes[paths[kept]], updated[paths[kept]], costs[kept]
            codes[:, j] = code[kept]
            updated[:, i + 1 :] += np.outer(w[row, j] - q[kept], a[i, i + 1 :])
        best[row] = codes[np.argmin(costs)]
    return best, value(best, scales[:, owner], zeros[:, owner])


def loss(w, q, s):
    """(w - q) S (w - q)^T of every row."""
    e = q - w
    return np.einsum("ij,ij->i", e @ s, e)


def descend(w, s, codes, scales, zeros, bits, group_size, sweeps):
    """Change one code at a time to its best value given the others, until no code changes; count the changes."""
    d = w.shape[1]
    owner, _ = groups(d, group_size)
    codes = codes.copy()
    q = value(codes, scales[:, owner], zeros[:, owner])
    grad = (q - w) @ s
    moves = 0
    for _ in range(sweeps):
        changed = False
        for j in range(d):
            k = owner[j]
            new = to_code(q[:, j] - grad[:, j] / s[j, j], scales[:, k], zeros[:, k], bits)
            q_new = value(new, scales[:, k], zeros[:, k])
            delta = q_new - q[:, j]
            gain = delta * (2 * grad[:, j] + delta * s[j, j])
            move = (new != codes[:, j]) & (gain < 0)
            if move.any():
                changed = True
                moves += int(move.sum())
                delta = np.where(move, delta, 0)
                codes[:, j] = np.where(move, new, codes[:, j])
                q[:, j] += delta
                grad += np.outer(delta, s[j])
        if not changed:
            break
    return codes, value(codes, scales[:, owner], zeros[:, owner]), moves


def rescale(w, s, codes, scales, zeros, group_size, scale_dtype, signed=False):
    """Change one scale at a time to its best value given the others, once round the groups."""
    d = w.shape[1]
    owner, ranges = groups(d, group_size)
    scales = scales.copy()
    steps = (codes - zeros[:, owner]).astype(np.float64)
    for k, r in enumerate(ranges):
        error = value(codes, scales[:, owner], zeros[:, owner]) - w
        b = np.zeros_like(steps)
        b[:, r] = steps[:, r]
        slope, curve = np.sum(b * (error @ s), axis=1), np.sum(b * (b @ s), axis=1)
        live = curve > 0
        best = stored(scales[:, k] - slope / np.where(live, curve, 1), scale_dtype)
        fits = live & np.isfinite(best) & (best != 0) & (signed | (best > 0))
        new = scales.copy()
        new[:, k] = np.where(fits, best, scales[:, k])
        after = loss(w, value(codes, new[:, owner], zeros[:, owner]), s)
        better = after < loss(w, error + w, s)
        scales[:, k] = np.where(better, new[:, k], scales[:, k])
    return scales
