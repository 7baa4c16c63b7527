//! Checking rows.

use crate::dump::{RowType, Rows};
use crate::error::name_of;
use crate::hessian::ROW_LIMIT;
use crate::simd::{per_isa, Isa};
use crate::{Error, Result};

/// Largest magnitude among the rows; refuses NaN, infinity and what the grid cannot hold.
pub(crate) fn check(rows: Rows<'_>, isa: Isa, step: usize, first_row: u64) -> Result<f64> {
    let bits = top_magnitude(isa, rows);
    let top = match rows.dtype() {
        RowType::F32 => f64::from(f32::from_bits(bits)),
        RowType::F16 => half::f16::from_bits(bits as u16).to_f64(),
        RowType::Bf16 => half::bf16::from_bits(bits as u16).to_f64(),
    };
    if top <= ROW_LIMIT {
        return Ok(top);
    }
    Err(locate(rows, step, first_row))
}

per_isa! {
    /// The largest bits of any value without its sign, which is the largest magnitude, infinity and NaN above all.
    fn top_magnitude(rows: Rows<'_>) -> u32 = top_body;
}

#[inline(always)]
fn top_body(rows: Rows<'_>) -> u32 {
    if rows.dtype() == RowType::F32 {
        let bits = |c: &[u8]| u32::from_le_bytes([c[0], c[1], c[2], c[3]]) & 0x7fff_ffff;
        return rows.bytes().chunks_exact(4).fold(0, |top, c| top.max(bits(c)));
    }
    let bits = |c: &[u8]| u16::from_le_bytes([c[0], c[1]]) & 0x7fff;
    u32::from(rows.bytes().chunks_exact(2).fold(0, |top, c| top.max(bits(c))))
}

/// The value at flat index `i`.
fn value(rows: Rows<'_>, i: usize) -> f32 {
    let b = &rows.bytes()[i * rows.dtype().size()..];
    match rows.dtype() {
        RowType::F32 => f32::from_le_bytes([b[0], b[1], b[2], b[3]]),
        RowType::F16 => half::f16::from_le_bytes([b[0], b[1]]).to_f32(),
        RowType::Bf16 => half::bf16::from_le_bytes([b[0], b[1]]).to_f32(),
    }
}

#[cold]
fn locate(rows: Rows<'_>, step: usize, first_row: u64) -> Error {
    let n = rows.n_rows() * rows.dim();
    let bad = (0..n).find(|&i| !value(rows, i).is_finite());
    let at = bad.or_else(|| (0..n).find(|&i| f64::from(value(rows, i).abs()) > ROW_LIMIT)).unwrap_or(0);
    let (row, column) = (first_row + (at / rows.dim()) as u64, at % rows.dim());
    let magnitude = f64::from(value(rows, at));
    if bad.is_some() {
        return Error::NonFiniteRow { step, row, column, value: name_of(magnitude) };
    }
    Error::RowTooLarge { step, row, column, magnitude: magnitude.abs(), limit: ROW_LIMIT }
}
