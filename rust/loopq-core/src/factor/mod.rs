//! Factorisations of `H`, and the only place that names an algebra crate.
//!
//! GPTQ needs, for every column `j`, how an error in an earlier column is best made up for in `j`. With the *reversed*
//! Cholesky factorisation `H' = R R^T`, `R` upper triangular, that is `A = R diag(R)^-1`: no inverse is formed.

mod cholesky;
mod eigen;
mod panels;

pub use cholesky::Factor;
pub use eigen::eigvalsh;
pub(crate) use panels::{Panels, PANEL_WIDTH};

use crate::error::name_of;
use crate::{dims, Error, Result};

/// A symmetric matrix as it was given.
#[derive(Clone, Copy, Debug)]
pub enum Symmetric<'a> {
    /// Single precision, row-major.
    F32(&'a [f32]),
    /// Double precision, row-major.
    F64(&'a [f64]),
}

impl Symmetric<'_> {
    /// Entry at flat index `i`.
    #[inline]
    #[must_use]
    pub fn at(&self, i: usize) -> f64 {
        match self {
            Self::F32(values) => f64::from(values[i]),
            Self::F64(values) => values[i],
        }
    }

    /// Checks size and finiteness; the upper triangle is what will be read.
    pub fn check(&self, dim: usize) -> Result<()> {
        match self {
            Self::F32(values) => dims::check_matrix("H", values, dim, dim)?,
            Self::F64(values) => dims::check_matrix("H", values, dim, dim)?,
        }
        let bad = match self {
            Self::F32(values) => values.iter().position(|v| !v.is_finite()),
            Self::F64(values) => values.iter().position(|v| !v.is_finite()),
        };
        bad.map_or(Ok(()), |at| {
            Err(Error::NonFiniteMatrix {
                what: "H",
                row: at / dim,
                column: at % dim,
                value: name_of(self.at(at)),
            })
        })
    }

    /// The diagonal.
    #[must_use]
    pub fn diagonal(&self, dim: usize) -> Vec<f64> {
        (0..dim).map(|i| self.at(i * dim + i)).collect()
    }
}
