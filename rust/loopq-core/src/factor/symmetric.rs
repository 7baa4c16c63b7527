//! A symmetric matrix as it was given.

use rayon::prelude::*;

use crate::error::name_of;
use crate::memory::{collected, copied, zeros};
use crate::simd::dot;
use crate::{dims, Error, Execution, Result};

/// Parts of a product with a vector. The number does not depend on the threads, because the sums depend on the parts.
const PARTS: usize = 16;

/// Name of the working memory in errors.
const PRODUCT: &str = "a product with a Hessian";

/// `H` (dim, dim), row-major, in either precision. Only the upper triangle is read.
#[derive(Clone, Copy, Debug)]
pub struct Symmetric<'a> {
    values: Values<'a>,
    dim: usize,
}

#[derive(Clone, Copy, Debug)]
enum Values<'a> {
    F32(&'a [f32]),
    F64(&'a [f64]),
}

impl<'a> Symmetric<'a> {
    /// Views `dim` x `dim` values in single precision.
    pub fn f32(values: &'a [f32], dim: usize) -> Result<Self> {
        dims::check_matrix("H", values, dim, dim)?;
        Ok(Self { values: Values::F32(values), dim })
    }

    /// Views `dim` x `dim` values in double precision.
    pub fn f64(values: &'a [f64], dim: usize) -> Result<Self> {
        dims::check_matrix("H", values, dim, dim)?;
        Ok(Self { values: Values::F64(values), dim })
    }

    /// Columns.
    #[must_use]
    pub fn dim(&self) -> usize {
        self.dim
    }

    /// Entry `(i, j)` or `(j, i)`, whichever lies in the upper triangle.
    #[inline]
    pub(crate) fn at(&self, i: usize, j: usize) -> f64 {
        self.flat(i.min(j) * self.dim + i.max(j))
    }

    #[inline]
    fn flat(&self, at: usize) -> f64 {
        match self.values {
            Values::F32(values) => f64::from(values[at]),
            Values::F64(values) => values[at],
        }
    }

    /// A copy in double precision.
    pub(crate) fn to_f64(self, what: &'static str) -> Result<Vec<f64>> {
        match self.values {
            Values::F64(values) => copied(what, values),
            Values::F32(values) => {
                let mut out = zeros(what, values.len())?;
                out.iter_mut().zip(values).for_each(|(to, &v)| *to = f64::from(v));
                Ok(out)
            }
        }
    }

    /// `H x`.
    pub(crate) fn times(self, x: &[f64], execution: &Execution<'_>) -> Result<Vec<f64>> {
        let parts: Vec<Vec<f64>> = execution.pool()?.install(|| {
            let part = |p: usize| {
                execution.check()?;
                match self.values {
                    Values::F32(values) => times_part(values, x, p),
                    Values::F64(values) => times_part(values, x, p),
                }
            };
            (0..PARTS).into_par_iter().map(part).collect::<Result<_>>()
        })?;
        collected(PRODUCT, (0..self.dim).map(|j| parts.iter().map(|part| part[j]).sum()))
    }

    /// A number that another matrix hardly has: what was made of a matrix knows it again.
    pub(crate) fn fingerprint(self) -> u64 {
        let mix = |sum: u64, bits: u64| (sum.rotate_left(5) ^ bits).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        match self.values {
            Values::F32(values) => values.iter().fold(0, |sum, v| mix(sum, u64::from(v.to_bits()))),
            Values::F64(values) => values.iter().fold(0, |sum, v| mix(sum, v.to_bits())),
        }
    }

    /// Refuses NaN and infinity.
    pub(crate) fn check_finite(&self) -> Result<()> {
        let bad = match self.values {
            Values::F32(values) => values.iter().position(|v| !v.is_finite()),
            Values::F64(values) => values.iter().position(|v| !v.is_finite()),
        };
        bad.map_or(Ok(()), |at| {
            let (row, column) = (at / self.dim, at % self.dim);
            Err(Error::NonFiniteMatrix { what: "H", row, column, value: name_of(self.flat(at)) })
        })
    }
}

/// The part of the product with `x` from every [`PARTS`]-th row of the upper triangle, beginning with row `first`.
fn times_part<T: Copy + Into<f64>>(values: &[T], x: &[f64], first: usize) -> Result<Vec<f64>> {
    let dim = x.len();
    let (mut sums, mut wide): (Vec<f64>, Vec<f64>) = (zeros(PRODUCT, dim)?, zeros(PRODUCT, dim)?);
    for i in (first..dim).step_by(PARTS) {
        let row = &mut wide[i..];
        row.iter_mut().zip(&values[i * dim + i..]).for_each(|(to, &value)| *to = value.into());
        sums[i] += dot(row, &x[i..]);
        for (to, entry) in sums[i + 1..].iter_mut().zip(&row[1..]) {
            *to += entry * x[i];
        }
    }
    Ok(sums)
}
