//! All eigenvalues of a symmetric matrix: Householder's reduction to a tridiagonal one, and QL iterations with implicit
//! shifts on that (G. Golub and C. Van Loan, *Matrix Computations*, 4th ed., sections 8.3.1 and 8.3.3).
//!
//! Step `k` of the reduction makes row `k` tridiagonal by `I - tau v v^T`. It leaves `A - v w^T - w v^T` below, with
//! `y = tau A v` and `w = y - tau/2 (y^T v) v`. The next step forms that difference in the same pass over memory in
//! which it multiplies by its own `v`, since memory takes most of the time. This is no library call for three reasons:
//! it reports missing memory as an error, it can be stopped, and it gives the same bits at any number of threads.

use rayon::prelude::*;

use crate::factor::Symmetric;
use crate::memory::zeros;
use crate::simd::{dot, per_isa, Isa};
use crate::{Error, Execution, Result};

/// Parts of a pass. The number does not depend on the threads, because the sums depend on the parts.
const PARTS: usize = 8;

/// Most iterations for each eigenvalue, on average; two is usual.
const ITERATIONS: usize = 30;

/// An off-diagonal entry of this size counts as zero: the reduction makes larger errors in a matrix with a largest
/// entry of 1 or more.
const NOTHING: f64 = f64::EPSILON * f64::EPSILON;

const WHAT: &str = "a copy of the matrix whose eigenvalues are asked for";

/// All eigenvalues, ascending, in double precision. Reads the upper triangle.
pub fn eigvalsh(h: Symmetric<'_>, execution: &Execution<'_>) -> Result<Vec<f64>> {
    let dim = h.dim();
    h.check_finite()?;
    if dim == 0 {
        return Ok(Vec::new());
    }
    let mut matrix = h.to_f64(WHAT)?;
    let unit = unit_of(&matrix);
    for value in &mut matrix {
        *value /= unit;
    }
    let (mut diagonal, mut beside) = (zeros(WHAT, dim)?, zeros(WHAT, dim)?);
    execution.pool()?.install(|| reduce(&mut matrix, &mut diagonal, &mut beside, execution))?;
    iterate(&mut diagonal, &mut beside, execution)?;
    for value in &mut diagonal {
        *value *= unit;
    }
    diagonal.sort_unstable_by(f64::total_cmp);
    Ok(diagonal)
}

/// The power of two next to the largest magnitude. After division by it no square overflows, and no rounding error
/// matters.
fn unit_of(values: &[f64]) -> f64 {
    let top = values.iter().fold(0.0, |top: f64, v| top.max(v.abs()));
    f64::from_bits((top.to_bits() >> 52).clamp(1, 2045) << 52)
}

/// Vectors of a step, by column; entries before the step are of no meaning.
struct Vectors {
    v: Vec<f64>,
    w: Vec<f64>,
    /// `v` of the step that is on.
    next: Vec<f64>,
}

/// Turns a matrix, of which the upper triangle is read, into a tridiagonal one with the same eigenvalues.
fn reduce(a: &mut [f64], diagonal: &mut [f64], beside: &mut [f64], execution: &Execution<'_>) -> Result<()> {
    let dim = diagonal.len();
    let mut vectors = Vectors { v: zeros(WHAT, dim)?, w: zeros(WHAT, dim)?, next: zeros(WHAT, dim)? };
    let mut sums = zeros(WHAT, PARTS * dim)?;
    for k in 0..dim {
        execution.check()?;
        let Vectors { v, w, next } = &mut vectors;
        let (row, rest) = a[k * dim..].split_at_mut(dim);
        for j in k..dim {
            row[j] -= v[k] * w[j] + w[k] * v[j];
        }
        diagonal[k] = row[k];
        if k + 2 >= dim {
            // A row of one entry is tridiagonal; the step before it still has to reach the last row.
            beside[k] = row.get(k + 1).copied().unwrap_or(0.0);
            continue;
        }
        next[k + 1..].copy_from_slice(&row[k + 1..]);
        let (entry, tau) = reflection(&mut next[k + 1..]);
        beside[k] = entry;
        pass(rest, k + 1, &vectors, &mut sums);
        let Vectors { v, w, next } = &mut vectors;
        for j in k + 1..dim {
            w[j] = tau * sums.iter().skip(j).step_by(dim).sum::<f64>();
        }
        let share = tau / 2.0 * dot(&w[k + 1..], &next[k + 1..]);
        for j in k + 1..dim {
            w[j] -= share * next[j];
        }
        std::mem::swap(v, next);
    }
    Ok(())
}

/// Replaces `x` by `v`, `v_0 = 1`, such that `I - tau v v^T` maps `x` to a multiple of the first unit vector. Returns
/// that multiple and `tau`.
fn reflection(x: &mut [f64]) -> (f64, f64) {
    let (first, below) = (x[0], dot(&x[1..], &x[1..]));
    x[0] = 1.0;
    if below == 0.0 {
        return (first, 0.0);
    }
    let length = -(first * first + below).sqrt().copysign(first);
    for value in &mut x[1..] {
        *value /= first - length;
    }
    (length, (length - first) / length)
}

/// Subtracts `v w^T + w v^T` from the rows `first..`, which begin with their own row, and multiplies the result by
/// `next`. Each part of the rows has its own sums.
fn pass(rows: &mut [f64], first: usize, vectors: &Vectors, sums: &mut [f64]) {
    let dim = vectors.v.len();
    let (isa, n) = (Isa::best(), dim - first);
    sums.fill(0.0);
    // Rows become shorter: parts of as many entries have more and more rows.
    let end = |p: usize| n - (n as f64 * (1.0 - p as f64 / PARTS as f64).sqrt()) as usize;
    let (mut left, mut tasks) = (&mut rows[..n * dim], Vec::with_capacity(PARTS));
    for (p, sums) in sums.chunks_exact_mut(dim).enumerate() {
        let (own, others) = left.split_at_mut((end(p + 1) - end(p)) * dim);
        left = others;
        tasks.push((first + end(p), own, sums));
    }
    tasks.into_par_iter().with_max_len(1).for_each(|(from, rows, sums)| {
        for (i, row) in (from..).zip(rows.chunks_exact_mut(dim)) {
            let Vectors { v, w, next } = vectors;
            let before = sums[i];
            let along = row_pass(isa, &mut row[i..], (&v[i..], &w[i..]), &next[i..], &mut sums[i..]);
            // The diagonal counts once.
            sums[i] = before + along;
        }
    });
}

per_isa! {
    /// `row -= v_0 w + w_0 v` and `sums += u_0 row`; returns `row u`.
    fn row_pass(row: &mut [f64], by: (&[f64], &[f64]), u: &[f64], sums: &mut [f64]) -> f64 = row_body;
}

#[inline(always)]
fn row_body(row: &mut [f64], (v, w): (&[f64], &[f64]), u: &[f64], sums: &mut [f64]) -> f64 {
    const N: usize = 8;
    let (v0, w0, u0) = (-v[0], -w[0], u[0]);
    let mut along = [0.0; N];
    let one = |row: &mut f64, v: f64, w: f64, u: f64, sum: &mut f64, along: &mut f64| {
        *row = w0.mul_add(v, v0.mul_add(w, *row));
        *along = row.mul_add(u, *along);
        *sum = row.mul_add(u0, *sum);
    };
    let ((rows, row), (all_sums, sums)) = (row.as_chunks_mut::<N>(), sums.as_chunks_mut::<N>());
    let ((vs, v), (ws, w), (us, u)) = (v.as_chunks::<N>(), w.as_chunks::<N>(), u.as_chunks::<N>());
    for ((row, sums), ((v, w), u)) in rows.iter_mut().zip(all_sums).zip(vs.iter().zip(ws).zip(us)) {
        for r in 0..N {
            one(&mut row[r], v[r], w[r], u[r], &mut sums[r], &mut along[r]);
        }
    }
    for (r, (row, sum)) in row.iter_mut().zip(sums).enumerate() {
        one(row, v[r], w[r], u[r], sum, &mut along[r]);
    }
    along.iter().sum()
}

/// Turns the diagonal of a tridiagonal matrix into its eigenvalues, in no order. `beside[i]` stands between `i` and `i + 1`,
/// the last entry is not read.
fn iterate(diagonal: &mut [f64], beside: &mut [f64], execution: &Execution<'_>) -> Result<()> {
    let (dim, mut iterations) = (diagonal.len(), 0);
    for first in 0..dim {
        let mut begun = false;
        loop {
            execution.check()?;
            let small = |&m: &usize| {
                beside[m].abs() <= f64::EPSILON * (diagonal[m].abs() + diagonal[m + 1].abs()) + NOTHING
            };
            let last = (first..dim - 1).find(small).unwrap_or(dim - 1);
            if last == first {
                break;
            }
            iterations += 1;
            if iterations > ITERATIONS * dim {
                return Err(Error::NoConvergence { dim });
            }
            beside[last] = 0.0;
            let (diagonal, beside) = (&mut diagonal[first..=last], &mut beside[first..last]);
            // A step goes from the last row to the first, and settles soonest where the first rows are the small ones.
            if !begun && diagonal[0].abs() > diagonal[last - first].abs() {
                diagonal.reverse();
                beside.reverse();
            }
            begun = true;
            step(diagonal, beside);
        }
    }
    Ok(())
}

/// One QL step with the eigenvalue of the first two rows as shift, from the last row to the first.
fn step(diagonal: &mut [f64], beside: &mut [f64]) {
    let last = beside.len();
    let half = (diagonal[1] - diagonal[0]) / (2.0 * beside[0]);
    let shift = diagonal[0] - beside[0] / (half + (half * half + 1.0).sqrt().copysign(half));
    let (mut sine, mut cosine, mut carried, mut bulge) = (1.0, 1.0, 0.0, diagonal[last] - shift);
    for i in (0..last).rev() {
        let (out, along) = (sine * beside[i], cosine * beside[i]);
        let length = f64::sqrt(out * out + bulge * bulge);
        if i + 1 < last {
            beside[i + 1] = length;
        }
        if length == 0.0 {
            // The matrix falls in two here.
            diagonal[i + 1] -= carried;
            return;
        }
        (sine, cosine) = (out / length, bulge / length);
        let base = diagonal[i + 1] - carried;
        let turn = (diagonal[i] - base) * sine + 2.0 * cosine * along;
        carried = sine * turn;
        diagonal[i + 1] = base + carried;
        bulge = cosine * turn - along;
    }
    diagonal[0] -= carried;
    beside[0] = bulge;
}
