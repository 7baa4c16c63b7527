"""Golden vectors from the format specs alone: big integers and fractions, none of loopq's code."""

import json
from fractions import Fraction
from pathlib import Path

HERE = Path(__file__).parent


def lcg(seed: int, n: int, top: int) -> list[int]:
    """Give `n` numbers in ``0..top`` from a linear congruential generator."""
    out = []
    for _ in range(n):
        seed = (seed * 6364136223846793005 + 1442695040888963407) % 2**64
        out.append((seed >> 33) % (top + 1))
    return out


def dense(codes: list[int], bits: int) -> list[int]:
    """Pack one row: docs/formats/packing.md, dense bitstream."""
    stream = sum(code << (j * bits) for j, code in enumerate(codes))
    return [(stream >> (32 * w)) & 0xFFFFFFFF for w in range(-(-len(codes) * bits // 32))]


def marlin(codes: list[list[int]]) -> list[int]:
    """Pack codes[n][k]: rust/loopq-core/src/pack/marlin.rs."""
    n_out, n_in = len(codes), len(codes[0])
    words = [0] * (n_in // 16 * 2 * n_out)
    for n in range(n_out):
        for k in range(n_in):
            word = (k >> 4) * 2 * n_out + (n >> 6) * 128 + (4 * (n & 7) + ((k & 7) >> 1)) * 4 + ((n >> 4) & 3)
            nibble = 2 * ((n >> 3) & 1) + ((k >> 3) & 1) + 4 * (k & 1)
            words[word] |= codes[n][k] << (4 * nibble)
    return words


def hessian(rows: list[list[int]], denominator: int) -> tuple[list[int], list[int]]:
    """Sum rows / denominator exactly; entries are chosen so that no float32 sum rounds."""
    dim = len(rows[0])
    hi, lo = [], []
    for i in range(dim):
        for j in range(i, dim):
            total = sum(Fraction(r[i], denominator) * Fraction(r[j], denominator) for r in rows) * 2**60
            assert total.denominator == 1
            hi.append(total.numerator >> 62)
            lo.append(total.numerator & (2**62 - 1))
    return hi, lo


def main() -> None:
    """Write the vectors."""
    packing: dict[str, object] = {"dense": []}
    for bits in (2, 3, 4, 8):
        for dim in (1, 11, 32, 45, 64):
            codes = lcg(bits * 100 + dim, dim, 2**bits - 1)
            packing["dense"].append({"bits": bits, "codes": codes, "words": dense(codes, bits)})  # type: ignore[attr-defined]
    flat = lcg(7, 64 * 32, 15)
    codes2 = [flat[n * 32 : (n + 1) * 32] for n in range(64)]
    packing["marlin"] = {"codes": codes2, "words": marlin(codes2)}
    (HERE / "packing.json").write_text(json.dumps(packing) + "\n", encoding="utf-8")
    rows = [[v - 8 for v in lcg(31 + r, 5, 16)] for r in range(700)]
    hi, lo = hessian(rows, 16)
    state = {"rows": rows, "denominator": 16, "hi": hi, "lo": lo}
    (HERE / "hessian.json").write_text(json.dumps(state) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
