//! NEON versions of the tiles.
//!
//! Of 32 registers of 128 bits, 24 are accumulators for 8 rows by 3 registers of columns. The others hold the columns
//! and a line of `a`; the multiply-add broadcasts its lanes. The tile of 48 (float32) or 24 (float64) columns is four
//! of these side by side.
//!
//! `bfmmla` is left aside: it rounds the sum of two products at once, where a Hessian's bits are those of one chain
//! (docs/formats/hessian.md). `bfmlalb` has them, but no more products an instruction than `fmla` on float32 numbers.
#![allow(unsafe_code)] // pointers into slices whose lengths have been checked

use std::arch::aarch64::{vfmaq_laneq_f32, vfmaq_laneq_f64, vld1q_f32, vld1q_f64, vst1q_f32, vst1q_f64};

use super::operands::{check, MR};

macro_rules! tile128 {
    ($name:ident, $t:ty, $lanes:literal, $load:ident, $store:ident, $fma:ident, $([$row:literal: $part:literal, $lane:literal]),*) => {
        /// `c[i][j] += sum_k a[k][i] * b[k][j]`.
        #[allow(clippy::too_many_arguments)]
        pub(super) fn $name(k: usize, a: &[$t], lda: usize, b: &[$t], ldb: usize, c: &mut [$t], ldc: usize) {
            const L: usize = $lanes;
            check(k, a, lda, b, ldb, c, ldc, 12 * L);
            for side in [0, 3 * L, 6 * L, 9 * L] {
                let (mut pa, mut pb) = (a.as_ptr(), b.as_ptr().wrapping_add(side));
                // SAFETY: `check` has shown that row `k - 1` of `a` and `b` and row `MR - 1` of `c` end inside their
                // slices. `side + 3 * L` stays within a row. The pointers are stepped `k` times and read only before
                // the step. NEON is part of the architecture.
                unsafe {
                    let pc = c.as_mut_ptr().add(side);
                    let mut acc = [[$load(pc); 3]; MR];
                    for (i, row) in acc.iter_mut().enumerate() {
                        for (v, entry) in row.iter_mut().enumerate() {
                            *entry = $load(pc.add(i * ldc + v * L));
                        }
                    }
                    for _ in 0..k {
                        let columns = [$load(pb), $load(pb.add(L)), $load(pb.add(2 * L))];
                        let line: [_; MR / L] = std::array::from_fn(|part| $load(pa.add(part * L)));
                        for (v, &column) in columns.iter().enumerate() {
                            $(acc[$row][v] = $fma::<$lane>(acc[$row][v], column, line[$part]);)*
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
tile128!(tile_f32, f32, 4, vld1q_f32, vst1q_f32, vfmaq_laneq_f32,
    [0: 0, 0], [1: 0, 1], [2: 0, 2], [3: 0, 3], [4: 1, 0], [5: 1, 1], [6: 1, 2], [7: 1, 3]);
tile128!(tile_f64, f64, 2, vld1q_f64, vst1q_f64, vfmaq_laneq_f64,
    [0: 0, 0], [1: 0, 1], [2: 1, 0], [3: 1, 1], [4: 2, 0], [5: 2, 1], [6: 3, 0], [7: 3, 1]);
