//! AVX2 and AVX-512 versions of the tiles.
//!
//! All tiles have `MR` = 8 rows and a width of 48 (float32, bf16 pairs) or 24 (float64). With 512-bit registers there
//! are 24 accumulators, 3 registers for the columns and one for the broadcast row. This hides the latency of a fused
//! multiply-add, with 11 loads per 24 of them. With 256-bit registers the same tile is run as sub-tiles of 4 x 3
//! registers.
//!
//! Every function is `unsafe` for one reason, its instruction set, and checks the lengths of its slices itself before
//! it turns them into pointers.
#![allow(unsafe_code)] // pointers into slices whose lengths have been checked; each block says how

#[allow(clippy::wildcard_imports)] // some forty intrinsics
use std::arch::x86_64::*;

use super::operands::{check, Short, Ways, CHAIN, CODES, MR, NODES};

macro_rules! tile512 {
    ($name:ident, $t:ty, $lanes:literal, $load:ident, $store:ident, $set:ident, $fma:ident) => {
        /// `c[i][j] += sum_k a[k][i] * b[k][j]`.
        #[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,fma")]
        pub(super) fn $name(k: usize, a: &[$t], lda: usize, b: &[$t], ldb: usize, c: &mut [$t], ldc: usize) {
            const L: usize = $lanes;
            check(k, a, lda, b, ldb, c, ldc, 3 * L);
            let (mut pa, mut pb, pc) = (a.as_ptr(), b.as_ptr(), c.as_mut_ptr());
            // SAFETY: `check` has shown that row `k - 1` of `a` and `b` and row `MR - 1` of `c` end inside their
            // slices. The pointers are stepped `k` times and read only before the step. The last step may pass the end,
            // which `wrapping_add` allows. Loads and stores are the unaligned ones.
            unsafe {
                let mut acc = [[$load(pc); 3]; MR];
                for (i, row) in acc.iter_mut().enumerate() {
                    for (v, entry) in row.iter_mut().enumerate() {
                        *entry = $load(pc.add(i * ldc + v * L));
                    }
                }
                for _ in 0..k {
                    let columns = [$load(pb), $load(pb.add(L)), $load(pb.add(2 * L))];
                    for (i, row) in acc.iter_mut().enumerate() {
                        let x = $set(*pa.add(i));
                        row[0] = $fma(x, columns[0], row[0]);
                        row[1] = $fma(x, columns[1], row[1]);
                        row[2] = $fma(x, columns[2], row[2]);
                    }
                    pa = pa.wrapping_add(lda);
                    pb = pb.wrapping_add(ldb);
                }
                for (i, row) in acc.iter().enumerate() {
                    for (v, &entry) in row.iter().enumerate() {
                        $store(pc.add(i * ldc + v * L), entry);
                    }
                }
            }
        }
    };
}
tile512!(tile_f32_avx512, f32, 16, _mm512_loadu_ps, _mm512_storeu_ps, _mm512_set1_ps, _mm512_fmadd_ps);
tile512!(tile_f64_avx512, f64, 8, _mm512_loadu_pd, _mm512_storeu_pd, _mm512_set1_pd, _mm512_fmadd_pd);

macro_rules! tile256 {
    ($name:ident, $t:ty, $lanes:literal, $load:ident, $store:ident, $set:ident, $fma:ident) => {
        /// `c[i][j] += sum_k a[k][i] * b[k][j]`.
        #[target_feature(enable = "avx2,fma")]
        pub(super) fn $name(k: usize, a: &[$t], lda: usize, b: &[$t], ldb: usize, c: &mut [$t], ldc: usize) {
            const L: usize = $lanes;
            check(k, a, lda, b, ldb, c, ldc, 6 * L);
            for (half, side) in [(0, 0), (4, 0), (0, 3 * L), (4, 3 * L)] {
                let (mut pa, mut pb) = (a.as_ptr().wrapping_add(half), b.as_ptr().wrapping_add(side));
                // SAFETY: as in the 512-bit version; `half < MR` and `side < 6 * L` stay within a row.
                unsafe {
                    let pc = c.as_mut_ptr().add(half * ldc + side);
                    let mut acc = [[$load(pc); 3]; 4];
                    for (i, row) in acc.iter_mut().enumerate() {
                        for (v, entry) in row.iter_mut().enumerate() {
                            *entry = $load(pc.add(i * ldc + v * L));
                        }
                    }
                    for _ in 0..k {
                        let columns = [$load(pb), $load(pb.add(L)), $load(pb.add(2 * L))];
                        for (i, row) in acc.iter_mut().enumerate() {
                            let x = $set(*pa.add(i));
                            row[0] = $fma(x, columns[0], row[0]);
                            row[1] = $fma(x, columns[1], row[1]);
                            row[2] = $fma(x, columns[2], row[2]);
                        }
                        pa = pa.wrapping_add(lda);
                        pb = pb.wrapping_add(ldb);
                    }
                    for (i, row) in acc.iter().enumerate() {
                        for (v, &entry) in row.iter().enumerate() {
                            $store(pc.add(i * ldc + v * L), entry);
                        }
                    }
                }
            }
        }
    };
}
tile256!(tile_f32_avx2, f32, 8, _mm256_loadu_ps, _mm256_storeu_ps, _mm256_set1_ps, _mm256_fmadd_ps);
tile256!(tile_f64_avx2, f64, 4, _mm256_loadu_pd, _mm256_storeu_pd, _mm256_set1_pd, _mm256_fmadd_pd);

/// `c = sum over words` of products of bf16 pairs, in lines 48 apart and in the order of [`super::tile::tile_chains`].
///
/// The instruction rounds after each of its two products, the high one first, so eight words are a chain of 16 rows. It
/// takes subnormal numbers as zero, and `TINY` says whether a sum of chains could still be subnormal.
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx512bf16,fma")]
pub(super) fn tile_bf16<const TINY: bool>(k: usize, a: &[u32], b: &[u32], c: &mut [f32]) {
    const WORDS: usize = CHAIN / 2;
    check(k, a, 3 * 16, b, 3 * 16, c, 3 * 16, 3 * 16);
    assert!(k.is_multiple_of(2 * WORDS));
    c.fill(0.0);
    for first in (0..k).step_by(2 * WORDS) {
        // SAFETY: `check` has shown that line `k - 1` of `a` and `b` and row `MR - 1` of `c` end inside their slices, and
        // two chains lie before line `k`. Loads and stores are the unaligned ones.
        unsafe {
            let (pa, pb) = (a.as_ptr().add(first * 48), b.as_ptr().add(first * 48));
            let one = chain_bf16::<WORDS>(pa, pb);
            let other = chain_bf16::<WORDS>(pa.add(WORDS * 48), pb.add(WORDS * 48));
            for (i, (one, other)) in one.iter().zip(&other).enumerate() {
                for v in 0..3 {
                    let to = c.as_mut_ptr().add(i * 48 + v * 16);
                    let both = flushed::<TINY>(_mm512_add_ps(one[v], other[v]));
                    _mm512_storeu_ps(to, flushed::<TINY>(_mm512_add_ps(_mm512_loadu_ps(to), both)));
                }
            }
        }
    }
}

/// The sums of a few words from zero.
///
/// # Safety
/// `a` points to the columns of `K` lines of 48 words, `b` to such lines.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn chain_bf16<const K: usize>(a: *const u32, b: *const u32) -> [[__m512; 3]; MR] {
    let mut acc = [[_mm512_setzero_ps(); 3]; MR];
    for k in 0..K {
        // SAFETY: the caller's. A vector of words and a vector of bf16 pairs are the same 512 bits, for which every pattern
        // is valid.
        unsafe {
            let (a, b) = (a.add(k * 48), b.add(k * 48));
            let pair = |p: *const u32| std::mem::transmute::<__m512i, __m512bh>(_mm512_loadu_si512(p.cast()));
            let columns = [pair(b), pair(b.add(16)), pair(b.add(32))];
            for (i, row) in acc.iter_mut().enumerate() {
                let x = _mm512_set1_epi32((*a.add(i)).cast_signed());
                let x = std::mem::transmute::<__m512i, __m512bh>(x);
                row[0] = _mm512_dpbf16_ps(row[0], x, columns[0]);
                row[1] = _mm512_dpbf16_ps(row[1], x, columns[1]);
                row[2] = _mm512_dpbf16_ps(row[2], x, columns[2]);
            }
        }
    }
    acc
}

/// Zeros in place of subnormal numbers, if asked for.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
fn flushed<const YES: bool>(v: __m512) -> __m512 {
    const SUBNORMAL: i32 = 0x20;
    if YES {
        return _mm512_maskz_mov_ps(!_mm512_fpclass_ps_mask::<SUBNORMAL>(v), v);
    }
    v
}

macro_rules! rows {
    ($name:ident, $features:literal, $columns:literal, $parts:literal, $load:ident, $store:ident, $set:ident, $fma:ident) => {
        /// `to[k] += sum_i rows[i][k] * by[i]`; returns how many columns are done, whole blocks only.
        #[target_feature(enable = $features)]
        pub(super) fn $name(to: &mut [[f64; 8]], rows: &[&[f64]], by: &[[f64; 8]]) -> usize {
            const L: usize = 8 / $parts;
            let done = to.len() / $columns * $columns;
            assert!(rows.len() == by.len() && rows.iter().all(|row| row.len() >= done));
            for k in (0..done).step_by($columns) {
                // SAFETY: columns `k..k + $columns` lie below `done`, which `to` and every row reach; a lane holds
                // `$parts` vectors of `L` numbers. Loads and stores are the unaligned ones.
                unsafe {
                    let p = to.as_mut_ptr().add(k).cast::<f64>();
                    let mut acc = [[$load(p); $parts]; $columns];
                    for (c, parts) in acc.iter_mut().enumerate() {
                        for (v, entry) in parts.iter_mut().enumerate() {
                            *entry = $load(p.add(8 * c + L * v));
                        }
                    }
                    for (row, by) in rows.iter().zip(by) {
                        let (row, by) = (row.as_ptr().add(k), by.as_ptr());
                        // Rows are more streams than a processor follows by itself. No program sees what is asked for.
                        for ahead in ($columns..2 * $columns).step_by(8) {
                            _mm_prefetch::<_MM_HINT_T0>(row.wrapping_add(ahead).cast());
                        }
                        for (c, parts) in acc.iter_mut().enumerate() {
                            let x = $set(*row.add(c));
                            for (v, entry) in parts.iter_mut().enumerate() {
                                *entry = $fma(x, $load(by.add(L * v)), *entry);
                            }
                        }
                    }
                    for (c, parts) in acc.iter().enumerate() {
                        for (v, &entry) in parts.iter().enumerate() {
                            $store(p.add(8 * c + L * v), entry);
                        }
                    }
                }
            }
            done
        }
    };
}
rows!(
    rows_avx512,
    "avx512f,avx512dq,avx512bw,avx512vl,fma",
    16,
    1,
    _mm512_loadu_pd,
    _mm512_storeu_pd,
    _mm512_set1_pd,
    _mm512_fmadd_pd
);
rows!(rows_avx2, "avx2,fma", 4, 2, _mm256_loadu_pd, _mm256_storeu_pd, _mm256_set1_pd, _mm256_fmadd_pd);

/// Asks for the cache lines of a slice.
#[inline]
pub(super) fn prefetch(values: &[i64]) {
    for line in values.chunks(8) {
        // SAFETY: a prefetch reads nothing that a program can see, and the address is one of the slice.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().cast()) };
    }
}

/// [`super::dots`] for the rows that fill whole quads; returns how many.
#[target_feature(enable = "avx2")]
pub(super) fn dots_avx2(rows: &[Short], by: &Short, out: &mut [f32]) -> usize {
    for (rows, out) in rows.chunks_exact(4).zip(out.chunks_exact_mut(4)) {
        // SAFETY: every array has eight numbers.
        let eight = |of: &Short| unsafe { _mm256_loadu_ps(of.0.as_ptr()) };
        let product = |r: usize| _mm256_mul_ps(eight(&rows[r]), eight(by));
        // Neighbours added twice: of each half the sums of all four rows.
        let pairs = _mm256_hadd_ps(product(0), product(1));
        let quads = _mm256_hadd_ps(pairs, _mm256_hadd_ps(product(2), product(3)));
        let sums = _mm_add_ps(_mm256_castps256_ps128(quads), _mm256_extractf128_ps::<1>(quads));
        // SAFETY: `out` is a chunk of four.
        unsafe { _mm_storeu_ps(out.as_mut_ptr(), sums) };
    }
    rows.len() / 4 * 4
}

/// [`super::ways::cheapest`], which has checked the sizes.
///
/// # Safety
/// The lengths of `ways` and `next` are those that [`super::ways::cheapest`] asserts.
#[target_feature(enable = "avx2")]
pub(super) unsafe fn cheapest_avx2(ways: &Ways, next: &mut [u32]) {
    let (digits, apart) = (ways.digits, ways.keys.len() / ways.digits);
    let clear = _mm256_set1_epi32(!(digits as i32 - 1));
    let scale = _mm256_set1_ps(ways.scale);
    let mut values = ways.values.as_ptr();
    for block in 0..apart / NODES {
        for group in 0..digits / CODES {
            let mut least = [_mm256_set1_epi32(-1); CODES];
            for first in 0..digits {
                let from = first * apart + block * NODES;
                // SAFETY: `from + NODES` is at most the number of nodes.
                let (keys, wanted) = unsafe {
                    let keys = _mm256_loadu_si256(ways.keys.as_ptr().add(from).cast());
                    (keys, _mm256_loadu_ps(ways.wanted.as_ptr().add(from)))
                };
                let keys = _mm256_castsi256_ps(_mm256_and_si256(keys, clear));
                let code = _mm256_set1_epi32(first as i32);
                for least in &mut least {
                    // SAFETY: all loops together run over `nodes * digits` values, `NODES` each time.
                    let value = unsafe { _mm256_loadu_ps(values) };
                    // SAFETY: as above; after the last time it is the end.
                    values = unsafe { values.add(NODES) };
                    let d = _mm256_sub_ps(_mm256_mul_ps(scale, value), wanted);
                    let cost = _mm256_castps_si256(_mm256_add_ps(keys, _mm256_mul_ps(d, d)));
                    *least = _mm256_min_epu32(*least, _mm256_or_si256(_mm256_and_si256(cost, clear), code));
                }
            }
            // Four codes of each node beside each other.
            let [a, b] =
                [_mm256_unpacklo_epi32(least[0], least[1]), _mm256_unpackhi_epi32(least[0], least[1])];
            let [c, d] =
                [_mm256_unpacklo_epi32(least[2], least[3]), _mm256_unpackhi_epi32(least[2], least[3])];
            let nodes = [
                _mm256_unpacklo_epi64(a, c),
                _mm256_unpackhi_epi64(a, c),
                _mm256_unpacklo_epi64(b, d),
                _mm256_unpackhi_epi64(b, d),
            ];
            for (i, two) in nodes.into_iter().enumerate() {
                let at = |i: usize| (block * NODES + i) * digits + group * CODES;
                // SAFETY: `CODES` entries from `at(i)` with `i < NODES` are within the nodes.
                unsafe {
                    let next = next.as_mut_ptr();
                    _mm_storeu_si128(next.add(at(i)).cast(), _mm256_castsi256_si128(two));
                    _mm_storeu_si128(next.add(at(i + 4)).cast(), _mm256_extracti128_si256::<1>(two));
                }
            }
        }
    }
}
