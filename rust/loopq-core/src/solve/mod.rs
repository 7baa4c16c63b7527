//! From `W` and `H` to codes and scales.

mod coupled;
mod descent;
mod fit;
mod full;
mod gptq;
mod levels;
mod order;
mod proxy;
mod refit;
mod rtn;

pub use coupled::{coupled, CoupledReport};
pub use fit::Cost;
pub use full::{full, FullReport, FullSettings, Prepared};
pub use gptq::{gptq, GptqReport, Run, Scales};
pub use order::Order;
pub use proxy::proxy;
pub use rtn::rtn;

use crate::error::name_of;
use crate::{dims, Error, Result};

/// Checks shape and finiteness of a weight.
pub(crate) fn check_weight(what: &'static str, w: &[f32], rows: usize, dim: usize) -> Result<()> {
    dims::check_matrix(what, w, rows, dim)?;
    if dim == 0 {
        return Err(Error::shape(what, "1 or more columns", 0));
    }
    w.iter().position(|v| !v.is_finite()).map_or(Ok(()), |at| {
        let value = name_of(f64::from(w[at]));
        Err(Error::NonFiniteMatrix { what, row: at / dim, column: at % dim, value })
    })
}

/// Puts row and group into a scale's error.
pub(crate) fn located(error: Error, row: usize, group: usize) -> Error {
    match error {
        Error::ScaleRange { value, what, dtype, .. } => Error::ScaleRange { row, group, value, what, dtype },
        other => other,
    }
}
