//! The weight that is quantized.

use crate::error::name_of;
use crate::{dims, Error, Result};

/// `W` (rows, dim), row-major with a row per output, after checks of shape and finiteness.
#[derive(Clone, Copy, Debug)]
pub struct Weight<'a> {
    values: &'a [f32],
    rows: usize,
    dim: usize,
}

impl<'a> Weight<'a> {
    /// Views `rows` x `dim` values; `what` names them in a refusal.
    pub fn new(what: &'static str, values: &'a [f32], rows: usize, dim: usize) -> Result<Self> {
        dims::check_matrix(what, values, rows, dim)?;
        if dim == 0 {
            return Err(Error::shape(what, "1 or more columns", 0));
        }
        if let Some(at) = values.iter().position(|v| !v.is_finite()) {
            let value = name_of(f64::from(values[at]));
            return Err(Error::NonFiniteMatrix { what, row: at / dim, column: at % dim, value });
        }
        Ok(Self { values, rows, dim })
    }

    /// Refuses a weight of another width than its Hessian, one without rows too.
    pub(crate) fn check_width(&self, dim: usize) -> Result<()> {
        if self.dim == dim {
            return Ok(());
        }
        Err(Error::shape("columns of W", format!("{dim}, those of H"), self.dim))
    }

    /// All values.
    #[must_use]
    pub fn values(&self) -> &'a [f32] {
        self.values
    }

    /// Outputs.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Inputs.
    #[must_use]
    pub fn dim(&self) -> usize {
        self.dim
    }

    /// Rows `from..from + n`; the caller keeps within the weight.
    pub(crate) fn slice(&self, from: usize, n: usize) -> Self {
        Self { values: &self.values[from * self.dim..(from + n) * self.dim], rows: n, ..*self }
    }
}
