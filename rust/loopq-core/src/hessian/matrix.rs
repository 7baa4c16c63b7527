//! The exact upper triangle, stored in squares, and the pass that adds blocks of rows to it.

use rayon::prelude::*;

use crate::hessian::limbs;
use crate::hessian::rows::{Lanes, PackedBlock};
use crate::hessian::{MACRO, PANEL};
use crate::pool::pool;
use crate::simd::{add_limbs, tile_pairs, Isa, Real, MR};
use crate::{dims, Error, Result, Watch};

const TILE: usize = PANEL * PANEL;

/// Lines of a panel pair that are worked on together.
const SWEEP: usize = 64;

/// Up to `MACRO` x `MACRO` squares of the upper triangle: the unit of work of one thread.
#[derive(Clone, Debug)]
struct Patch {
    /// Panel pairs `(i, j)`, `i <= j`, in the order of their limbs.
    pairs: Vec<(usize, usize)>,
    hi: Vec<i64>,
    lo: Vec<i64>,
}

/// The exact sum of `x x^T` over rows.
#[derive(Clone, Debug)]
pub(crate) struct ExactMatrix {
    dim: usize,
    patches: Vec<Patch>,
}

impl ExactMatrix {
    pub(crate) fn zeros(dim: usize) -> Result<Self> {
        dims::product("the exact Hessian", dims::n_upper(dim)?, 32)?;
        let panels = dim.div_ceil(PANEL);
        let macros = panels.div_ceil(MACRO);
        let mut patches = Vec::new();
        for mj in 0..macros {
            for mi in 0..=mj {
                let mut pairs = Vec::new();
                for j in mj * MACRO..panels.min((mj + 1) * MACRO) {
                    for i in mi * MACRO..panels.min((mi + 1) * MACRO).min(j + 1) {
                        pairs.push((i, j));
                    }
                }
                let n = pairs.len() * TILE;
                patches.push(Patch { pairs, hi: vec![0; n], lo: vec![0; n] });
            }
        }
        Ok(Self { dim, patches })
    }

    /// Adds the products of all blocks.
    pub(crate) fn add_blocks(
        &mut self,
        blocks: &[PackedBlock],
        isa: Isa,
        threads: usize,
        watch: &Watch,
    ) -> Result<()> {
        pool(threads)?.install(|| {
            self.patches.par_iter_mut().with_max_len(1).for_each(|patch| patch.add(blocks, isa));
        });
        watch.check()
    }

    /// Calls `f(row, column, hi, lo)` for every entry of the upper triangle.
    pub(crate) fn for_each(&self, mut f: impl FnMut(usize, usize, i64, i64)) {
        for patch in &self.patches {
            for (t, &(pi, pj)) in patch.pairs.iter().enumerate() {
                for i in pi * PANEL..self.dim.min((pi + 1) * PANEL) {
                    for j in (pj * PANEL).max(i)..self.dim.min((pj + 1) * PANEL) {
                        let at = t * TILE + (i - pi * PANEL) * PANEL + (j - pj * PANEL);
                        f(i, j, patch.hi[at], patch.lo[at]);
                    }
                }
            }
        }
    }

    /// Calls `f(row, column, hi, lo)` for every entry of the upper triangle, to change it.
    pub(crate) fn for_each_mut(&mut self, mut f: impl FnMut(usize, usize, &mut i64, &mut i64)) {
        let dim = self.dim;
        for patch in &mut self.patches {
            for (t, &(pi, pj)) in patch.pairs.iter().enumerate() {
                for i in pi * PANEL..dim.min((pi + 1) * PANEL) {
                    for j in (pj * PANEL).max(i)..dim.min((pj + 1) * PANEL) {
                        let at = t * TILE + (i - pi * PANEL) * PANEL + (j - pj * PANEL);
                        f(i, j, &mut patch.hi[at], &mut patch.lo[at]);
                    }
                }
            }
        }
    }

    /// Adds another sum, entry by entry.
    pub(crate) fn merge(&mut self, other: &Self) {
        for (mine, theirs) in self.patches.iter_mut().zip(&other.patches) {
            let entries = mine.hi.iter_mut().zip(&mut mine.lo);
            for ((hi, lo), (&add_hi, &add_lo)) in entries.zip(theirs.hi.iter().zip(&theirs.lo)) {
                limbs::add_one(hi, lo, add_hi, add_lo);
            }
        }
    }

    /// The diagonal in double precision.
    pub(crate) fn diagonal(&self) -> Vec<f64> {
        let mut diagonal = vec![0.0; self.dim];
        for patch in &self.patches {
            for (t, &(pi, pj)) in patch.pairs.iter().enumerate().filter(|(_, (i, j))| i == j) {
                for i in pi * PANEL..self.dim.min((pi + 1) * PANEL) {
                    let at = t * TILE + (i - pi * PANEL) * PANEL + (i - pj * PANEL);
                    diagonal[i] = limbs::to_f64(limbs::integer(patch.hi[at], patch.lo[at]));
                }
            }
        }
        diagonal
    }

    /// Bytes that the limbs take.
    pub(crate) fn n_bytes(&self) -> usize {
        self.patches.iter().map(|p| p.hi.len() * 16).sum()
    }

    /// Sets the entries from packed upper triangles.
    pub(crate) fn load(&mut self, hi: &[i64], lo: &[i64]) -> Result<()> {
        let n = dims::n_upper(self.dim)?;
        if hi.len() != n || lo.len() != n {
            return Err(Error::BadState(format!("{n} entries needed, {} and {} given", hi.len(), lo.len())));
        }
        if let Some(bad) = lo.iter().position(|&l| !limbs::is_canonical(l)) {
            return Err(Error::BadState(format!("low limb {bad} is {}, outside 0..2^62", lo[bad])));
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

impl Patch {
    fn add(&mut self, blocks: &[PackedBlock], isa: Isa) {
        let mut sums = [0.0_f32; TILE];
        for block in blocks {
            for (t, &(pi, pj)) in self.pairs.iter().enumerate() {
                sums.fill(0.0);
                match &block.lanes {
                    Lanes::Single(lanes) => {
                        let (a, b) = (block.panel(lanes, pi), block.panel(lanes, pj));
                        sweep(block.depth, a, b, &mut sums, |k, a, b, c| {
                            f32::tile(isa, k, a, PANEL, b, PANEL, c, PANEL);
                        });
                    }
                    Lanes::Pairs(lanes) => {
                        let (a, b) = (block.panel(lanes, pi), block.panel(lanes, pj));
                        sweep(block.depth, a, b, &mut sums, |k, a, b, c| {
                            tile_pairs(isa, k, a, PANEL, b, PANEL, c, PANEL);
                        });
                    }
                }
                let at = t * TILE..(t + 1) * TILE;
                add_limbs(isa, &sums, &mut self.hi[at.clone()], &mut self.lo[at]);
            }
        }
    }
}

/// Runs the tiles of one panel pair. Lines are taken [`SWEEP`] at a time, so that both panels' share and the sums stay
/// in the first-level cache while all tiles use them; each entry is still one chain over all lines.
#[inline(always)]
fn sweep<T>(depth: usize, a: &[T], b: &[T], sums: &mut [f32], tile: impl Fn(usize, &[T], &[T], &mut [f32])) {
    for from in (0..depth).step_by(SWEEP) {
        let k = SWEEP.min(depth - from);
        let (a, b) = (&a[from * PANEL..], &b[from * PANEL..]);
        for r in (0..PANEL).step_by(MR) {
            tile(k, &a[r..], b, &mut sums[r * PANEL..]);
        }
    }
}
