//! Codes to values, and between signed and biased codes.

use std::ops::RangeInclusive;

use crate::memory::zeros;
use crate::{dims, Error, Result};

/// `(step - zero) * scale` for every entry, in float32: `step` of a code, zero points where there are any.
pub fn dequantize<C: Copy>(
    codes: &[C],
    step: impl Fn(C) -> f32,
    scales: &[f32],
    zeros: Option<&[u8]>,
    rows: usize,
    dim: usize,
    group: usize,
) -> Result<Vec<f32>> {
    let group = group.max(1);
    dims::check_matrix("codes", codes, rows, dim)?;
    let n_groups = dim.div_ceil(group);
    dims::check_matrix("scales", scales, rows, n_groups)?;
    if let Some(zeros) = zeros {
        dims::check_matrix("zeros", zeros, rows, n_groups)?;
    }
    let mut out = self::zeros("values", codes.len())?;
    for (r, row) in out.chunks_exact_mut(dim.max(1)).enumerate() {
        for (j, values) in row.chunks_mut(group).enumerate() {
            let level = r * n_groups + j;
            let (scale, zero) = (scales[level], zeros.map_or(0.0, |zeros| f32::from(zeros[level])));
            for (to, &code) in values.iter_mut().zip(&codes[r * dim + j * group..]) {
                *to = (step(code) - zero) * scale;
            }
        }
    }
    Ok(out)
}

/// Adds the offset of its group (rows, groups) to every value.
pub fn add_offsets(values: &mut [f32], offsets: &[f32], rows: usize, dim: usize, group: usize) -> Result<()> {
    let group = group.max(1);
    dims::check_matrix("values", values, rows, dim)?;
    dims::check_matrix("offsets", offsets, rows, dim.div_ceil(group))?;
    let rows = values.chunks_exact_mut(dim.max(1)).zip(offsets.chunks_exact(dim.div_ceil(group).max(1)));
    for (values, offset) in rows.flat_map(|(row, offsets)| row.chunks_mut(group).zip(offsets)) {
        for value in values {
            *value += offset;
        }
    }
    Ok(())
}

/// Signed codes of a symmetric grid, `u - 2^(bits - 1)`, in the same memory.
#[must_use]
pub fn to_signed(mut codes: Vec<u8>, bits: u32) -> Vec<i8> {
    let middle = 1_u8 << (bits - 1);
    for code in &mut codes {
        *code = code.wrapping_sub(middle);
    }
    bytemuck::allocation::cast_vec(codes)
}

/// Biased codes of signed ones: `q + zero_offset`, each checked to fit `bits` bits.
pub fn to_biased(codes: &[i8], dim: usize, bits: u32, zero_offset: i64) -> Result<Vec<u8>> {
    let mut out = zeros("biased codes", codes.len())?;
    match shift(codes, zero_offset, 0..=(1 << bits) - 1, &mut out, |u| u as u8) {
        None => Ok(out),
        Some(i) => {
            let (row, column, value) = (i / dim.max(1), i % dim.max(1), i64::from(codes[i]));
            Err(Error::CodeRange { row, column, value, bits, zero_offset })
        }
    }
}

/// Signed codes `u - zero_offset`; refuses what int8 cannot hold.
pub fn to_signed_by(codes: &[u8], zero_offset: i64) -> Result<Vec<i8>> {
    let range = i32::from(i8::MIN)..=i32::from(i8::MAX);
    let mut out = zeros("signed codes", codes.len())?;
    match shift(codes, zero_offset.saturating_neg(), range, &mut out, |q| q as i8) {
        None => Ok(out),
        Some(column) => {
            let value = i64::from(codes[column]) - zero_offset;
            Err(Error::CodeRange { row: 0, column, value, bits: 8, zero_offset })
        }
    }
}

/// Writes `code + offset`, narrowed; returns the place of the first code that this takes out of `range`. That place is
/// looked for only when there is one: the loop has no branch and runs at the speed of memory.
fn shift<A: Copy + Into<i32>, B>(
    codes: &[A],
    offset: i64,
    range: RangeInclusive<i32>,
    out: &mut [B],
    narrow: impl Fn(i32) -> B,
) -> Option<usize> {
    // Codes have 8 bits: an offset beyond 1000 takes all of them out of any range, and so does 1000.
    let offset = offset.clamp(-1000, 1000) as i32;
    let mut outside = false;
    for (to, &code) in out.iter_mut().zip(codes) {
        let value = code.into() + offset;
        outside |= !range.contains(&value);
        *to = narrow(value);
    }
    outside.then(|| codes.iter().position(|&code| !range.contains(&(code.into() + offset))).unwrap_or(0))
}
