//! Checking rows and packing them in panels.

use crate::dump::{RowType, Rows};
use crate::error::name_of;
use crate::hessian::{BLOCK_ROWS, PANEL, ROW_LIMIT};
use crate::{Error, Result};

/// Largest magnitude among the rows; refuses NaN, infinity and what the grid cannot hold.
pub(crate) fn check(rows: Rows<'_>, step: usize, first_row: u64) -> Result<f64> {
    let top = match rows.dtype() {
        RowType::F32 => f64::from(f32::from_bits(top_bits32(rows.bytes()))),
        RowType::F16 => half::f16::from_bits(top_bits16(rows.bytes())).to_f64(),
        RowType::Bf16 => half::bf16::from_bits(top_bits16(rows.bytes())).to_f64(),
    };
    if top <= ROW_LIMIT {
        return Ok(top);
    }
    Err(locate(rows, step, first_row))
}

fn top_bits32(bytes: &[u8]) -> u32 {
    let bits = |c: &[u8]| u32::from_le_bytes([c[0], c[1], c[2], c[3]]) & 0x7fff_ffff;
    bytes.chunks_exact(4).fold(0, |top, c| top.max(bits(c)))
}

fn top_bits16(bytes: &[u8]) -> u16 {
    bytes.chunks_exact(2).fold(0, |top, c| {
        top.max(u16::from_le_bytes([c[0], c[1]]) & 0x7fff)
    })
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
    let at = bad
        .or_else(|| (0..n).find(|&i| f64::from(value(rows, i).abs()) > ROW_LIMIT))
        .unwrap_or(0);
    let (row, column) = (first_row + (at / rows.dim()) as u64, at % rows.dim());
    let magnitude = f64::from(value(rows, at));
    if bad.is_some() {
        return Error::NonFiniteRow {
            step,
            row,
            column,
            value: name_of(magnitude),
        };
    }
    Error::RowTooLarge {
        step,
        row,
        column,
        magnitude: magnitude.abs(),
        limit: ROW_LIMIT,
    }
}

/// One block of rows (at most [`BLOCK_ROWS`]) as panels of [`PANEL`] columns: entry `(k, j)` of panel `p` is
/// `lanes[(p * n_rows + k) * PANEL + j]`; columns past the last are zero.
pub(crate) struct PackedBlock {
    pub(crate) n_rows: usize,
    pub(crate) lanes: Vec<f32>,
}

impl PackedBlock {
    pub(crate) fn pack(rows: Rows<'_>) -> Self {
        debug_assert!(rows.n_rows() <= BLOCK_ROWS);
        let (n_rows, dim) = (rows.n_rows(), rows.dim());
        let mut lanes = vec![0.0; dim.div_ceil(PANEL) * n_rows * PANEL];
        for (p, panel) in lanes.chunks_exact_mut((n_rows * PANEL).max(1)).enumerate() {
            let columns = PANEL.min(dim - p * PANEL);
            for (k, line) in panel.chunks_exact_mut(PANEL).enumerate() {
                for (j, lane) in line[..columns].iter_mut().enumerate() {
                    *lane = value(rows, k * dim + p * PANEL + j);
                }
            }
        }
        Self { n_rows, lanes }
    }

    pub(crate) fn panel(&self, p: usize) -> &[f32] {
        &self.lanes[p * self.n_rows * PANEL..(p + 1) * self.n_rows * PANEL]
    }
}
