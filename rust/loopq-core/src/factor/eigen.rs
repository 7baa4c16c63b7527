//! Eigenvalues of a symmetric matrix.

use faer::{MatRef, Par, Side};

use crate::factor::Symmetric;
use crate::pool::pool;
use crate::{Error, Result};

/// All eigenvalues, ascending, in double precision. Reads the upper triangle.
pub fn eigvalsh(h: Symmetric<'_>, dim: usize, threads: usize) -> Result<Vec<f64>> {
    h.check(dim)?;
    if dim == 0 {
        return Ok(Vec::new());
    }
    let widened: Vec<f64>;
    let values = match h {
        Symmetric::F64(values) => values,
        Symmetric::F32(values) => {
            widened = values.iter().map(|&v| f64::from(v)).collect();
            &widened
        }
    };
    let pool = pool(threads)?;
    // A fixed degree of parallelism would tie the bits to it: faer splits its sums by thread count.
    faer::set_global_parallelism(Par::Seq);
    // Row-major upper is column-major lower.
    let matrix = MatRef::from_column_major_slice(values, dim, dim);
    pool.install(|| matrix.self_adjoint_eigenvalues(Side::Lower)).map_err(|_| Error::NoConvergence { dim })
}
