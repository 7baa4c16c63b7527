//! The exact upper triangle, stored in squares, and the pass that adds blocks of rows to it.
//!
//! The pass is a symmetric rank-k update (BLAS `syrk`), laid out as in Goto and van de Geijn (see the file of
//! [`Real::tile`](crate::simd::Real::tile)). `tiles.rs` describes it for AMX; otherwise:
//!
//! 1. Rows are packed in panels of 48 columns, the width of the tile, once for all products (`packed.rs`).
//! 2. Only pairs of panels on and above the diagonal are multiplied: half the work of a general product.
//! 3. A tile runs through all lines of a block in one go, so that a strip of 8 x 48 float32 sums never leaves the
//!    registers before it is whole.
//! 4. The strip is then added to its limbs, which are stored in the same squares of 48 x 48. Two blocks are added at a
//!    time, since most of the remaining cost is reading and writing 16 bytes an entry. The limbs are prefetched before
//!    the tile runs, so they have arrived when it ends.
//! 5. One task is a square of up to 8 x 8 panels: their packed panels fit the second-level cache. No two tasks share an
//!    entry, so there is nothing to wait for.

use rayon::prelude::*;

use crate::hessian::limbs;
use crate::hessian::packed::{PackedBlock, RowOrder};
use crate::hessian::{tiles, PANEL, SQUARE};
use crate::memory::{zeros, Buffer};
use crate::simd::{prefetch, Isa, MR};
use crate::{dims, Error, Execution, Result};

/// Panels per side of the largest square that one thread works on at a time.
const SIDE: usize = 8;

/// Entries of the strip that one tile fills.
const STRIP: usize = MR * PANEL;

/// Blocks added to the limbs together.
const FUSED: usize = 2;

/// Up to [`SIDE`] x [`SIDE`] squares of the upper triangle: the unit of work of one thread.
#[derive(Debug)]
struct Patch {
    /// Panel pairs `(i, j)`, `i <= j`, in the order of their limbs.
    pairs: Vec<(usize, usize)>,
    /// Where its limbs begin.
    start: usize,
}

impl Patch {
    fn n_limbs(&self) -> usize {
        self.pairs.len() * SQUARE
    }

    /// Adds the products of all blocks.
    fn add(&self, hi: &mut [i64], lo: &mut [i64], blocks: &[PackedBlock<'_>], isa: Isa) {
        if blocks.first().is_some_and(|block| block.layout == RowOrder::Tiles) {
            return tiles::add(&self.pairs, hi, lo, blocks, isa);
        }
        self.add_strips(hi, lo, blocks, isa);
    }

    /// Adds them strip by strip, [`FUSED`] blocks at a time, so that the limbs are read and written once for several
    /// blocks.
    fn add_strips(&self, hi: &mut [i64], lo: &mut [i64], blocks: &[PackedBlock<'_>], isa: Isa) {
        let mut sums = Sums([0.0; FUSED * STRIP]);
        for fused in blocks.chunks(FUSED) {
            let sums = &mut sums.0[..fused.len() * STRIP];
            for (t, &(pi, pj)) in self.pairs.iter().enumerate() {
                for r in (0..PANEL).step_by(MR) {
                    let at = t * SQUARE + r * PANEL;
                    let (hi, lo) = (&mut hi[at..at + STRIP], &mut lo[at..at + STRIP]);
                    prefetch(isa, hi);
                    prefetch(isa, lo);
                    for (block, sums) in fused.iter().zip(sums.chunks_exact_mut(STRIP)) {
                        block.strip(isa, pi, pj, r, sums);
                    }
                    limbs::add(isa, sums, hi, lo);
                }
            }
        }
    }
}

/// Sums of strips, on whole cache lines.
#[repr(C, align(64))]
struct Sums([f32; FUSED * STRIP]);

/// The exact sum of `x x^T` over rows.
#[derive(Debug)]
pub(crate) struct ExactMatrix {
    dim: usize,
    patches: Vec<Patch>,
    hi: Buffer<i64>,
    lo: Buffer<i64>,
}

impl ExactMatrix {
    pub(crate) fn zeros(dim: usize) -> Result<Self> {
        let panels = dim.div_ceil(PANEL);
        let n_limbs = dims::product("the exact Hessian", dims::n_upper(panels)?, SQUARE)?;
        let limbs = || Buffer::zeroed("the exact sums of a Hessian", n_limbs);
        let (hi, lo) = (limbs()?, limbs()?);
        // Small matrices are cut finer, so that all threads have work.
        let side = (panels / 10).clamp(1, SIDE);
        let macros = panels.div_ceil(side);
        let (mut patches, mut start) = (Vec::new(), 0);
        for mj in 0..macros {
            for mi in 0..=mj {
                let mut pairs = Vec::new();
                for j in mj * side..panels.min((mj + 1) * side) {
                    for i in mi * side..panels.min((mi + 1) * side).min(j + 1) {
                        pairs.push((i, j));
                    }
                }
                pairs.sort_by_key(tiles::square);
                let patch = Patch { pairs, start };
                start += patch.n_limbs();
                patches.push(patch);
            }
        }
        Ok(Self { dim, patches, hi, lo })
    }

    /// Adds the products of all blocks.
    pub(crate) fn add_blocks(
        &mut self,
        blocks: &[PackedBlock<'_>],
        isa: Isa,
        execution: &Execution<'_>,
    ) -> Result<()> {
        execution.pool()?.install(|| {
            let (mut hi, mut lo) = (&mut self.hi[..], &mut self.lo[..]);
            let mut tasks = Vec::with_capacity(self.patches.len());
            for patch in &self.patches {
                let (own_hi, rest_hi) = hi.split_at_mut(patch.n_limbs());
                let (own_lo, rest_lo) = lo.split_at_mut(patch.n_limbs());
                (hi, lo) = (rest_hi, rest_lo);
                tasks.push((patch, own_hi, own_lo));
            }
            tasks.into_par_iter().with_max_len(1).for_each(|(patch, hi, lo)| patch.add(hi, lo, blocks, isa));
        });
        execution.check()
    }

    /// Calls `f(row, column, hi, lo)` for every entry of the upper triangle.
    pub(crate) fn for_each(&self, mut f: impl FnMut(usize, usize, i64, i64)) {
        for patch in &self.patches {
            for (t, &(pi, pj)) in patch.pairs.iter().enumerate() {
                for i in pi * PANEL..self.dim.min((pi + 1) * PANEL) {
                    for j in (pj * PANEL).max(i)..self.dim.min((pj + 1) * PANEL) {
                        let at = patch.start + t * SQUARE + (i - pi * PANEL) * PANEL + (j - pj * PANEL);
                        f(i, j, self.hi[at], self.lo[at]);
                    }
                }
            }
        }
    }

    /// Calls `f(row, column, hi, lo)` for every entry of the upper triangle, with mutable limbs.
    pub(crate) fn for_each_mut(&mut self, mut f: impl FnMut(usize, usize, &mut i64, &mut i64)) {
        let dim = self.dim;
        for patch in &self.patches {
            for (t, &(pi, pj)) in patch.pairs.iter().enumerate() {
                for i in pi * PANEL..dim.min((pi + 1) * PANEL) {
                    for j in (pj * PANEL).max(i)..dim.min((pj + 1) * PANEL) {
                        let at = patch.start + t * SQUARE + (i - pi * PANEL) * PANEL + (j - pj * PANEL);
                        f(i, j, &mut self.hi[at], &mut self.lo[at]);
                    }
                }
            }
        }
    }

    /// Adds another sum, entry by entry.
    pub(crate) fn merge(&mut self, other: &Self) {
        let entries = self.hi.iter_mut().zip(&mut *self.lo);
        for ((hi, lo), (&add_hi, &add_lo)) in entries.zip(other.hi.iter().zip(&*other.lo)) {
            limbs::add_one(hi, lo, add_hi, add_lo);
        }
    }

    /// The diagonal in double precision.
    pub(crate) fn diagonal(&self) -> Result<Vec<f64>> {
        let mut diagonal = zeros("a diagonal", self.dim)?;
        for patch in &self.patches {
            for (t, &(pi, pj)) in patch.pairs.iter().enumerate().filter(|(_, (i, j))| i == j) {
                for i in pi * PANEL..self.dim.min((pi + 1) * PANEL) {
                    let at = patch.start + t * SQUARE + (i - pi * PANEL) * PANEL + (i - pj * PANEL);
                    diagonal[i] = limbs::to_f64(limbs::integer(self.hi[at], self.lo[at]));
                }
            }
        }
        Ok(diagonal)
    }

    /// A bound on the magnitude of every entry, within the low limb's range of the largest one.
    pub(crate) fn top(&self) -> f64 {
        let hi = self.hi.iter().fold(0_u64, |top, hi| top.max(hi.unsigned_abs()));
        // A negative entry's high limb is rounded down, a positive one's low limb adds less than one unit.
        if hi == 0 && self.lo.iter().all(|&lo| lo == 0) {
            return 0.0;
        }
        (hi as f64 + 1.0) * limbs::HI_UNIT
    }

    /// Sets the entries from packed upper triangles of the right length.
    pub(crate) fn load(&mut self, hi: &[i64], lo: &[i64]) -> Result<()> {
        if let Some(bad) = lo.iter().position(|&l| !limbs::is_canonical(l)) {
            return Err(Error::BadState(format!("low limb {bad} is {}, outside 0..2^62", lo[bad])));
        }
        // No sum that was ever accepted lies beyond; merging relies on it.
        if let Some(bad) = hi.iter().position(|&h| !(-limbs::HI_LIMIT..=limbs::HI_LIMIT).contains(&h)) {
            return Err(Error::BadState(format!("high limb {bad} is {}, beyond a sum of 2^64", hi[bad])));
        }
        let dim = self.dim;
        self.for_each_mut(|i, j, h, l| {
            let at = upper_index(dim, i, j);
            *h = hi[at];
            *l = lo[at];
        });
        Ok(())
    }
}

/// Index of `(i, j)`, `i <= j`, in a row-major packed upper triangle.
pub(crate) fn upper_index(dim: usize, i: usize, j: usize) -> usize {
    i * dim - i * (i + 1) / 2 + j
}
