//! Reversed Cholesky: `S = R R^T`, `R` upper triangular.
//!
//! This is the blocked right-looking algorithm of G. Golub and C. Van Loan, *Matrix Computations* (4th ed., section
//! 4.2), as in LAPACK's `potrf`. All indices run in reverse: the factor is upper triangular and its *last* column comes
//! first. For each panel of columns, from the right:
//!
//! 1. the diagonal block of the panel is factored ([`DiagonalBlock::factor`]);
//! 2. the rows above it are solved against that block ([`DiagonalBlock::solve_above`]; vectors run over rows) and
//!    packed in the tile's layout, one copy plain and one negated;
//! 3. their products with one another are subtracted from the triangle that is left ([`subtract_product`]): nearly all
//!    of the work, and all of it in the register tile.
//!
//! Every entry is one chain of fused multiply-adds over `k = dim - 1, dim - 2, ...`: step 3 of a panel continues the
//! chains of the panel before. So the bits do not depend on panels, threads or vector widths. Cost: `dim^3 / 3`
//! operations.

use rayon::prelude::*;

use crate::factor::panels::{Panels, PANEL_WIDTH};
use crate::memory::{zeros, Buffer};
use crate::simd::{axpy, Isa, Real, MR};
use crate::{Error, Execution, Result};

/// Rows that one task of the long update works on.
const TASK_ROWS: usize = 96;

/// Lines of packed panels that are worked on together.
const SWEEP: usize = 96;

/// The pivots that a factorisation accepts.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Pivots {
    /// Positive ones: Cholesky.
    Positive,
    /// All but zero: `S = R diag(sign(p)) R^T`. There is no pivoting for stability; callers measure the error of the
    /// result.
    Signed,
}

/// Why a factorisation stopped.
pub(super) enum Stop {
    /// A pivot that is not allowed, with its column.
    Pivot(usize, f64),
    /// No memory, or somebody asked it to stop.
    Refused(Error),
}

impl From<Error> for Stop {
    fn from(error: Error) -> Self {
        Self::Refused(error)
    }
}

/// Turns the upper triangle of `S` in `panels` into `A = R diag(R)^-1`, and `pivots` into `diag(R)^2`, with the signs
/// that are `allowed`.
///
/// Runs on the threads of the pool that it is called in.
pub(super) fn factor_in_place<T: Real>(
    panels: &mut Panels<T>,
    pivots: &mut [f64],
    allowed: Pivots,
    execution: &Execution<'_>,
) -> std::result::Result<(), Stop> {
    let (dim, isa) = (panels.dim, Isa::best());
    let above = panels.panels.len().saturating_sub(1) * PANEL_WIDTH * PANEL_WIDTH.next_multiple_of(MR);
    let mut solved = Buffer::zeroed("a packed panel of the factor", above)?;
    let mut negated = Buffer::zeroed("a packed panel of the factor", above)?;
    for p in (0..panels.panels.len()).rev() {
        let j0 = p * PANEL_WIDTH;
        let nb = PANEL_WIDTH.min(dim - j0);
        let (left, right) = panels.panels.split_at_mut(p);
        let (above, block) = right[0].split_at_mut(j0 * PANEL_WIDTH);
        let diagonal = DiagonalBlock::factor(block, nb, allowed, isa).map_err(|stop| match stop {
            Stop::Pivot(column, value) => Stop::Pivot(j0 + column, value),
            refused @ Stop::Refused(_) => refused,
        })?;
        diagonal.store(block, &mut pivots[j0..j0 + nb]);
        let (solved, negated) = diagonal.solve_above(above, &mut solved, &mut negated, isa, execution)?;
        subtract_product(left, solved, negated, nb, isa, execution)?;
        execution.check()?;
    }
    Ok(())
}

/// The factored diagonal block with its indices turned round, so that it is an ordinary lower Cholesky factor.
struct DiagonalBlock<T> {
    nb: usize,
    /// Line `k` is column `k` of the turned factor: `l[k * W + i]`, `i >= k`.
    l: Vec<T>,
    /// 1 or -1, as the pivots.
    signs: Vec<T>,
    pivots: Vec<f64>,
}

impl<T: Real> DiagonalBlock<T> {
    /// Factors the block stored in the upper triangle of `block`; an error names column and pivot.
    fn factor(block: &[T], nb: usize, allowed: Pivots, isa: Isa) -> std::result::Result<Self, Stop> {
        let mut l: Vec<T> = zeros("a block of a factor", PANEL_WIDTH * PANEL_WIDTH)?;
        for k in 0..nb {
            for i in k..nb {
                l[k * PANEL_WIDTH + i] = block[(nb - 1 - i) * PANEL_WIDTH + nb - 1 - k];
            }
        }
        let (mut pivots, mut signs) = (vec![0.0; nb], vec![T::of(1.0); nb]);
        for k in 0..nb {
            let (done, rest) = l.split_at_mut(k * PANEL_WIDTH);
            let column = &mut rest[k..nb];
            for (earlier, &sign) in done.chunks_exact(PANEL_WIDTH).zip(&signs) {
                axpy(isa, -sign * earlier[k], &earlier[k..nb], column);
            }
            let pivot = column[0];
            if allowed == Pivots::Signed && pivot < T::default() {
                signs[k] = T::of(-1.0);
            }
            // Written so that NaN fails too.
            if !(signs[k] * pivot > T::default() && pivot.wide().is_finite()) {
                return Err(Stop::Pivot(nb - 1 - k, pivot.wide()));
            }
            pivots[k] = pivot.wide();
            let root = (signs[k] * pivot).root();
            column[0] = root;
            for entry in &mut column[1..] {
                *entry = *entry / (signs[k] * root);
            }
        }
        Ok(Self { nb, l, signs, pivots })
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

    /// Solves the rows above the block and writes their part of `A`. Returns them packed in lines of `T::NR` rows,
    /// plain and times the negated sign; `solved` and `negated` are scratch memory for that.
    fn solve_above<'a>(
        &self,
        above: &mut [T],
        solved: &'a mut [T],
        negated: &'a mut [T],
        isa: Isa,
        execution: &Execution<'_>,
    ) -> Result<(&'a [T], &'a [T])> {
        let depth = self.nb.next_multiple_of(MR);
        let mut negative: Vec<T> = zeros("a block of a factor", PANEL_WIDTH * PANEL_WIDTH)?;
        for k in 0..self.nb {
            for i in k + 1..self.nb {
                negative[k * PANEL_WIDTH + i] = -self.signs[k] * self.l[k * PANEL_WIDTH + i];
            }
        }
        let n_rows = above.len() / PANEL_WIDTH;
        let (solved, negated) = (&mut solved[..n_rows * depth], &mut negated[..n_rows * depth]);
        above
            .par_chunks_exact_mut(T::NR * PANEL_WIDTH)
            .zip(solved.par_chunks_exact_mut(T::NR * depth).zip(negated.par_chunks_exact_mut(T::NR * depth)))
            .try_for_each(|(rows, (lines, minus))| {
                execution.check()?;
                self.solve_chunk(rows, lines, &negative, isa);
                let both = minus.chunks_exact_mut(T::NR).zip(lines.chunks_exact(T::NR));
                for ((minus, line), &sign) in both.zip(&self.signs) {
                    for (minus, &value) in minus.iter_mut().zip(line) {
                        *minus = -sign * value;
                    }
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
                let root = self.signs[k] * self.root(k);
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

/// `left -= solved * diag(sign) * solved^T` on the upper triangle.
fn subtract_product<T: Real>(
    left: &mut [Buffer<T>],
    solved: &[T],
    negated: &[T],
    nb: usize,
    isa: Isa,
    execution: &Execution<'_>,
) -> Result<()> {
    let (nr, size) = (T::NR, T::NR * nb.next_multiple_of(MR));
    left.par_iter_mut().enumerate().rev().try_for_each(|(p, panel)| {
        panel.par_chunks_mut(TASK_ROWS * PANEL_WIDTH).with_max_len(1).enumerate().try_for_each(|(t, rows)| {
            execution.check()?;
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
