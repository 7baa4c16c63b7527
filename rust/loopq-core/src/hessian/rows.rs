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
    bytes.chunks_exact(2).fold(0, |top, c| top.max(u16::from_le_bytes([c[0], c[1]]) & 0x7fff))
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

    /// Packs rows into `room`, whatever it holds.
    pub(crate) fn pack(rows: Rows<'_>, pairs: bool, room: &'a mut [u32]) -> Self {
        debug_assert!(rows.n_rows() <= BLOCK_ROWS);
        let depth = if pairs { rows.n_rows().div_ceil(2) } else { rows.n_rows() };
        let lanes = &mut room[..rows.dim().div_ceil(PANEL) * depth * PANEL];
        if pairs {
            pack_pairs(rows, depth, lanes);
            return Self { depth, lanes: Lanes::Pairs(lanes) };
        }
        let lanes = bytemuck::cast_slice_mut(lanes);
        pack_single(rows, lanes);
        Self { depth, lanes: Lanes::Single(lanes) }
    }

    pub(crate) fn panel<'b, T>(&self, lanes: &'b [T], p: usize) -> &'b [T] {
        let size = self.depth * PANEL;
        &lanes[p * size..(p + 1) * size]
    }
}

/// Copies rows to panels line by line; rows are read in order, which is what memory likes best.
fn pack_single(rows: Rows<'_>, lanes: &mut [f32]) {
    let depth = rows.n_rows();
    for k in 0..depth {
        let row = rows.slice(k, 1).bytes();
        for (p, bytes) in row.chunks(PANEL * rows.dtype().size()).enumerate() {
            let line = &mut lanes[(p * depth + k) * PANEL..][..PANEL];
            let (line, past) = line.split_at_mut(bytes.len() / rows.dtype().size());
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

fn pack_pairs(rows: Rows<'_>, depth: usize, lanes: &mut [u32]) {
    let empty = vec![0_u8; rows.row_bytes()];
    for k in 0..depth {
        let even = rows.slice(2 * k, 1).bytes();
        let odd = if 2 * k + 1 < rows.n_rows() { rows.slice(2 * k + 1, 1).bytes() } else { &empty };
        for (p, (even, odd)) in even.chunks(2 * PANEL).zip(odd.chunks(2 * PANEL)).enumerate() {
            let line = &mut lanes[(p * depth + k) * PANEL..][..PANEL];
            let (line, past) = line.split_at_mut(even.len() / 2);
            past.fill(0);
            for ((lane, e), o) in line.iter_mut().zip(even.chunks_exact(2)).zip(odd.chunks_exact(2)) {
                *lane = u32::from_le_bytes([e[0], e[1], o[0], o[1]]);
            }
        }
    }
}
