//! Checking rows and packing them in panels.

use crate::dump::{RowType, Rows};
use crate::error::name_of;
use crate::hessian::{BLOCK_ROWS, PANEL, ROW_LIMIT};
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

/// The numbers of a packed block.
#[derive(Clone, Copy)]
pub(crate) enum Lanes<'a> {
    /// One row per line, in single precision.
    Single(&'a [f32]),
    /// Two rows per line: the even row's bf16 bits in the low half of a word, the odd row's in the high half.
    Pairs(&'a [u32]),
}

/// One block of rows (at most [`BLOCK_ROWS`]) as panels of [`PANEL`] columns: line `k` of panel `p` starts at
/// `(p * depth + k) * PANEL`; columns past the last, and the row that an odd number lacks, are zero.
#[derive(Clone, Copy)]
pub(crate) struct PackedBlock<'a> {
    /// Lines per panel.
    pub(crate) depth: usize,
    pub(crate) lanes: Lanes<'a>,
}

impl<'a> PackedBlock<'a> {
    /// Words that [`PackedBlock::pack`] needs for a block of `dim` columns.
    pub(crate) fn n_words(dim: usize, pairs: bool) -> usize {
        dim.div_ceil(PANEL) * PANEL * if pairs { BLOCK_ROWS.div_ceil(2) } else { BLOCK_ROWS }
    }

    /// Packs rows into `scratch`, whatever it holds.
    pub(crate) fn pack(rows: Rows<'_>, pairs: bool, isa: Isa, scratch: &'a mut [u32]) -> Self {
        debug_assert!(rows.n_rows() <= BLOCK_ROWS);
        let depth = if pairs { rows.n_rows().div_ceil(2) } else { rows.n_rows() };
        let lanes = &mut scratch[..rows.dim().div_ceil(PANEL) * depth * PANEL];
        if pairs {
            pack_pairs(isa, rows, lanes);
            return Self { depth, lanes: Lanes::Pairs(lanes) };
        }
        let lanes = bytemuck::cast_slice_mut(lanes);
        pack_single(isa, rows, lanes);
        Self { depth, lanes: Lanes::Single(lanes) }
    }

    pub(crate) fn panel<'b, T>(&self, lanes: &'b [T], p: usize) -> &'b [T] {
        let size = self.depth * PANEL;
        &lanes[p * size..(p + 1) * size]
    }
}

/// Lines that are packed before the next panel's turn. A row holds a part of every panel; with one line at a time each of
/// these would be written to once per row, more places than a cache has lines for.
const LINES: usize = 8;

per_isa! {
    /// Packs rows one to a line, in single precision.
    fn pack_single(rows: Rows<'_>, lanes: &mut [f32]) = single_body;
}
per_isa! {
    /// Packs rows of bf16 two to a line.
    fn pack_pairs(rows: Rows<'_>, lanes: &mut [u32]) = pairs_body;
}

#[inline(always)]
fn single_body(rows: Rows<'_>, lanes: &mut [f32]) {
    let (depth, size) = (rows.n_rows(), rows.dtype().size());
    for first in (0..depth).step_by(LINES) {
        let near = rows.slice(first, LINES.min(depth - first));
        for p in 0..rows.dim().div_ceil(PANEL) {
            let lines = &mut lanes[(p * depth + first) * PANEL..][..near.n_rows() * PANEL];
            for (row, line) in near.bytes().chunks_exact(near.row_bytes()).zip(lines.chunks_exact_mut(PANEL))
            {
                let bytes = columns(row, p, size);
                let (line, past) = line.split_at_mut(bytes.len() / size);
                past.fill(0.0);
                match rows.dtype() {
                    RowType::F32 => {
                        for (lane, b) in line.iter_mut().zip(bytes.chunks_exact(4)) {
                            *lane = f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
                        }
                    }
                    RowType::Bf16 => {
                        for (lane, b) in line.iter_mut().zip(bytes.chunks_exact(2)) {
                            *lane = f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16);
                        }
                    }
                    RowType::F16 => {
                        for (lane, b) in line.iter_mut().zip(bytes.chunks_exact(2)) {
                            *lane = half::f16::from_le_bytes([b[0], b[1]]).to_f32();
                        }
                    }
                }
            }
        }
    }
}

#[inline(always)]
fn pairs_body(rows: Rows<'_>, lanes: &mut [u32]) {
    let depth = rows.n_rows().div_ceil(2);
    let empty = vec![0_u8; rows.row_bytes()];
    let size = rows.dtype().size();
    for first in (0..depth).step_by(LINES) {
        let near = rows.slice(2 * first, (2 * LINES).min(rows.n_rows() - 2 * first));
        for p in 0..rows.dim().div_ceil(PANEL) {
            let lines = &mut lanes[(p * depth + first) * PANEL..][..near.n_rows().div_ceil(2) * PANEL];
            for (pair, line) in near.bytes().chunks(2 * near.row_bytes()).zip(lines.chunks_exact_mut(PANEL)) {
                let (even, odd) = pair.split_at(near.row_bytes());
                let (even, odd) =
                    (columns(even, p, size), columns(if odd.is_empty() { &empty } else { odd }, p, size));
                let (line, past) = line.split_at_mut(even.len() / size);
                past.fill(0);
                for ((lane, e), o) in line.iter_mut().zip(even.chunks_exact(2)).zip(odd.chunks_exact(2)) {
                    *lane = u32::from_le_bytes([e[0], e[1], o[0], o[1]]);
                }
            }
        }
    }
}

/// What of a row lies in panel `p`.
#[inline(always)]
fn columns(row: &[u8], p: usize, size: usize) -> &[u8] {
    &row[p * PANEL * size..row.len().min((p + 1) * PANEL * size)]
}
