//! Reversed Cholesky: `H + mu I = R R^T`, `R` upper triangular.
//!
//! Panels of columns are taken from the right. Of each, the diagonal block is factored, the rows above it are solved
//! against that block (vectors run over rows), and their products are taken off the triangle that is left. Every entry
//! is one chain of fused multiply-adds over `k = dim - 1, dim - 2, ...`, so panels, threads and vector widths leave no
//! trace in the bits. Cost `dim^3 / 3` operations; no inverse is formed.

use rayon::prelude::*;

use crate::factor::{Panels, Symmetric, PANEL_WIDTH};
use crate::pages::Pages;
use crate::pool::pool;
use crate::simd::{axpy, Isa, Real, MR};
use crate::{Error, Result, Watch};

/// Rows that one task of the long update works on.
const TASK_ROWS: usize = 96;

/// Lines of packed panels that are worked on together.
const SWEEP: usize = 96;

/// `A = R diag(R)^-1` and the pivots `diag(R)^2` of a damped Hessian.
#[derive(Debug)]
pub struct Factor<T> {
    /// Entries above the diagonal are `A`.
    pub(crate) a: Panels<T>,
    pub(crate) pivots: Vec<f64>,
    /// Position in the factor -> column of `H`; empty for the identity.
    pub(crate) order: Vec<usize>,
    /// `mu`.
    pub damping_abs: f64,
    /// Columns of `H` whose diagonal is zero.
    pub n_dead_columns: usize,
}

/// What a refusal names.
struct Refusal {
    damping: f64,
}

impl<T: Real> Factor<T> {
    /// Factors `H + damping * mean(diag H) * I`.
    ///
    /// `act_order` takes the columns by descending diagonal (ties by ascending index).
    pub fn new(
        h: Symmetric<'_>,
        dim: usize,
        damping: f64,
        act_order: bool,
        threads: usize,
        watch: &Watch,
    ) -> Result<Self> {
        if !damping.is_finite() || damping < 0.0 {
            return Err(Error::setting(
                "damping",
                damping,
                "0 or more, finite (a fraction of the mean diagonal)",
            ));
        }
        if dim == 0 {
            return Err(Error::shape("H", "1 or more columns", 0));
        }
        h.check(dim)?;
        let diagonal = h.diagonal(dim);
        if diagonal.iter().all(|&v| v == 0.0) {
            return Err(Error::ZeroHessian);
        }
        let damping_abs = damping * (diagonal.iter().sum::<f64>() / dim as f64);
        let order = if act_order { descending(&diagonal) } else { Vec::new() };
        let mut made = Self {
            a: Panels::zeros(dim),
            pivots: vec![0.0; dim],
            order,
            damping_abs,
            n_dead_columns: diagonal.iter().filter(|&&v| v == 0.0).count(),
        };
        let pool = pool(threads)?;
        pool.install(|| {
            made.load(h, &diagonal);
            made.factor(&Refusal { damping }, Isa::best(), watch)
        })?;
        Ok(made)
    }

    /// Copies the damped upper triangle, in the order of the factor.
    fn load(&mut self, h: Symmetric<'_>, diagonal: &[f64]) {
        let (dim, order, damping) = (self.a.dim, &self.order, self.damping_abs);
        self.a.panels.par_iter_mut().with_max_len(1).enumerate().for_each(|(p, panel)| {
            for (i, line) in panel.chunks_exact_mut(PANEL_WIDTH).enumerate() {
                let from = order.get(i).copied().unwrap_or(i);
                for (c, entry) in line.iter_mut().enumerate() {
                    let j = p * PANEL_WIDTH + c;
                    if j < i || j >= dim {
                        continue;
                    }
                    let to = order.get(j).copied().unwrap_or(j);
                    // The upper triangle is what counts, also when the order swaps a pair.
                    let value = h.at(from.min(to) * dim + from.max(to));
                    *entry = T::of(if i == j { diagonal[from] + damping } else { value });
                }
            }
        });
    }

    fn factor(&mut self, refusal: &Refusal, isa: Isa, watch: &Watch) -> Result<()> {
        let dim = self.a.dim;
        watch.plan((dim as u64).pow(3) / 6);
        let above = self.a.panels.len().saturating_sub(1) * PANEL_WIDTH * PANEL_WIDTH.next_multiple_of(MR);
        let (mut solved, mut negated) = (Pages::zeroed(above), Pages::zeroed(above));
        for p in (0..self.a.panels.len()).rev() {
            let j0 = p * PANEL_WIDTH;
            let nb = PANEL_WIDTH.min(dim - j0);
            let (left, right) = self.a.panels.split_at_mut(p);
            let panel = &mut right[0];
            let (above, block) = panel.split_at_mut(j0 * PANEL_WIDTH);
            let corner = Corner::factor(block, nb, isa).map_err(|(column, value)| Error::NotPositive {
                column: self.order.get(j0 + column).copied().unwrap_or(j0 + column),
                dim,
                value,
                damping: refusal.damping,
                precision: T::NAME,
            })?;
            corner.store(block, &mut self.pivots[j0..j0 + nb]);
            let (solved, negated) = corner.solve_above(above, &mut solved, &mut negated, isa, watch)?;
            take_off(left, solved, negated, nb, isa, watch)?;
            watch.advance(nb as u64 * (j0 as u64).pow(2) / 2)?;
        }
        Ok(())
    }

    /// Columns.
    #[must_use]
    pub fn dim(&self) -> usize {
        self.a.dim
    }

    /// `R_jj^2` in the factor's order.
    #[must_use]
    pub fn pivots(&self) -> &[f64] {
        &self.pivots
    }

    /// Column of `H` at each position of the factor; empty when they are the same.
    #[must_use]
    pub fn order(&self) -> &[usize] {
        &self.order
    }

    /// The smallest pivot.
    #[must_use]
    pub fn min_pivot(&self) -> f64 {
        self.pivots.iter().copied().fold(f64::INFINITY, f64::min)
    }

    /// The largest pivot.
    #[must_use]
    pub fn max_pivot(&self) -> f64 {
        self.pivots.iter().copied().fold(0.0, f64::max)
    }
}

/// The factored diagonal block with its indices turned round, so that it is an ordinary lower Cholesky factor.
struct Corner<T> {
    nb: usize,
    /// Line `k` is column `k` of the turned factor: `l[k * W + i]`, `i >= k`.
    l: Vec<T>,
    pivots: Vec<f64>,
}

impl<T: Real> Corner<T> {
    /// Factors the block whose upper triangle lies in `block`; a failure names column and pivot.
    fn factor(block: &[T], nb: usize, isa: Isa) -> std::result::Result<Self, (usize, f64)> {
        let mut l = vec![T::default(); PANEL_WIDTH * PANEL_WIDTH];
        for k in 0..nb {
            for i in k..nb {
                l[k * PANEL_WIDTH + i] = block[(nb - 1 - i) * PANEL_WIDTH + nb - 1 - k];
            }
        }
        let mut pivots = vec![0.0; nb];
        for k in 0..nb {
            let (done, rest) = l.split_at_mut(k * PANEL_WIDTH);
            let column = &mut rest[k..nb];
            for earlier in done.chunks_exact(PANEL_WIDTH) {
                axpy(isa, -earlier[k], &earlier[k..nb], column);
            }
            let pivot = column[0];
            // Written so that NaN fails too.
            if !(pivot > T::default() && pivot.wide().is_finite()) {
                return Err((nb - 1 - k, pivot.wide()));
            }
            pivots[k] = pivot.wide();
            let root = pivot.root();
            column[0] = root;
            for entry in &mut column[1..] {
                *entry = *entry / root;
            }
        }
        Ok(Self { nb, l, pivots })
    }

    fn root(&self, k: usize) -> T {
        self.l[k * PANEL_WIDTH + k]
    }

    /// Writes the block of `A` and the pivots back in the matrix' own order.
    fn store(&self, block: &mut [T], pivots: &mut [f64]) {
        for k in 0..self.nb {
            pivots[self.nb - 1 - k] = self.pivots[k];
            for i in k..self.nb {
                block[(self.nb - 1 - i) * PANEL_WIDTH + self.nb - 1 - k] =
                    self.l[k * PANEL_WIDTH + i] / self.root(k);
            }
        }
    }

    /// Solves the rows above the block, writes their part of `A`, and returns them packed in lines of `T::NR` rows,
    /// plain and negated, in the room that is given for it.
    fn solve_above<'a>(
        &self,
        above: &mut [T],
        solved: &'a mut [T],
        negated: &'a mut [T],
        isa: Isa,
        watch: &Watch,
    ) -> Result<(&'a [T], &'a [T])> {
        let depth = self.nb.next_multiple_of(MR);
        let mut negative = vec![T::default(); PANEL_WIDTH * PANEL_WIDTH];
        for k in 0..self.nb {
            for i in k + 1..self.nb {
                negative[k * PANEL_WIDTH + i] = -self.l[k * PANEL_WIDTH + i];
            }
        }
        let n_rows = above.len() / PANEL_WIDTH;
        let (solved, negated) = (&mut solved[..n_rows * depth], &mut negated[..n_rows * depth]);
        above
            .par_chunks_exact_mut(T::NR * PANEL_WIDTH)
            .zip(solved.par_chunks_exact_mut(T::NR * depth).zip(negated.par_chunks_exact_mut(T::NR * depth)))
            .try_for_each(|(rows, (lines, minus))| {
                watch.check()?;
                self.solve_chunk(rows, lines, &negative, isa);
                for (minus, &line) in minus.iter_mut().zip(&*lines) {
                    *minus = -line;
                }
                Ok(())
            })?;
        Ok((solved, negated))
    }

    fn solve_chunk(&self, rows: &mut [T], lines: &mut [T], negative: &[T], isa: Isa) {
        let (nb, nr) = (self.nb, T::NR);
        for (r, row) in rows.chunks_exact(PANEL_WIDTH).enumerate() {
            for k in 0..nb {
                lines[k * nr + r] = row[nb - 1 - k];
            }
        }
        for k0 in (0..nb).step_by(MR) {
            let (done, rest) = lines.split_at_mut(k0 * nr);
            T::tile(isa, k0, &negative[k0..], PANEL_WIDTH, done, nr, rest, nr);
            for k in k0..nb.min(k0 + MR) {
                let (before, line) = rest.split_at_mut((k - k0) * nr);
                for (q, earlier) in before.chunks_exact(nr).enumerate() {
                    axpy(isa, negative[(k0 + q) * PANEL_WIDTH + k], earlier, &mut line[..nr]);
                }
                let root = self.root(k);
                for entry in &mut line[..nr] {
                    *entry = *entry / root;
                }
            }
        }
        for (r, row) in rows.chunks_exact_mut(PANEL_WIDTH).enumerate() {
            for k in 0..nb {
                row[nb - 1 - k] = lines[k * nr + r] / self.root(k);
            }
        }
    }
}

/// `left -= solved * solved^T` on the upper triangle.
fn take_off<T: Real>(
    left: &mut [Pages<T>],
    solved: &[T],
    negated: &[T],
    nb: usize,
    isa: Isa,
    watch: &Watch,
) -> Result<()> {
    let (nr, size) = (T::NR, T::NR * nb.next_multiple_of(MR));
    left.par_iter_mut().enumerate().rev().try_for_each(|(p, panel)| {
        panel.par_chunks_mut(TASK_ROWS * PANEL_WIDTH).with_max_len(1).enumerate().try_for_each(|(t, rows)| {
            watch.check()?;
            let (first, n) = (t * TASK_ROWS, rows.len() / PANEL_WIDTH);
            for from in (0..nb).step_by(SWEEP) {
                let k = SWEEP.min(nb - from);
                for c in (0..PANEL_WIDTH).step_by(nr) {
                    let column = p * PANEL_WIDTH + c;
                    let b = &solved[column / nr * size + from * nr..];
                    // Tiles wholly below the diagonal are never read.
                    for r in (0..n).step_by(MR).take_while(|r| first + r < column + nr) {
                        let a = &negated[(first + r) / nr * size + from * nr + (first + r) % nr..];
                        T::tile(isa, k, a, nr, b, nr, &mut rows[r * PANEL_WIDTH + c..], PANEL_WIDTH);
                    }
                }
            }
            Ok(())
        })
    })
}

/// Indices by descending value, ties by ascending index.
fn descending(values: &[f64]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|&i, &j| values[j].total_cmp(&values[i]).then(i.cmp(&j)));
    order
}
