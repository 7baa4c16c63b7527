//! Size arithmetic that cannot wrap.

use crate::{Error, Result};

/// `a * b`, or an error that names what was sized.
pub fn product(what: &'static str, a: usize, b: usize) -> Result<usize> {
    a.checked_mul(b)
        .filter(|&n| isize::try_from(n).is_ok())
        .ok_or_else(|| Error::TooLarge { what, detail: format!("{a} x {b}") })
}

/// `a + b`, or an error that names what was sized.
pub fn sum(what: &'static str, a: usize, b: usize) -> Result<usize> {
    a.checked_add(b)
        .filter(|&n| isize::try_from(n).is_ok())
        .ok_or_else(|| Error::TooLarge { what, detail: format!("{a} + {b}") })
}

/// Number of entries of the upper triangle of a `dim` x `dim` matrix, its diagonal included.
pub(crate) fn n_upper(dim: usize) -> Result<usize> {
    Ok(product("the upper triangle", dim, dim.saturating_add(1))? / 2)
}

/// Checks that a slice has the length of a `rows` x `columns` matrix.
pub fn check_matrix<T>(what: &'static str, data: &[T], rows: usize, columns: usize) -> Result<()> {
    let expected = product(what, rows, columns)?;
    if data.len() == expected {
        return Ok(());
    }
    Err(Error::shape(
        what,
        format!("{rows} x {columns} = {expected} values"),
        format!("{} values", data.len()),
    ))
}
