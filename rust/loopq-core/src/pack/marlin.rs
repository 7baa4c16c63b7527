//! The Marlin layout of 4-bit symmetric codes. Spec: `docs/formats/packing.md`.
//!
//! `W` is seen as `K` x `N` (inputs x outputs); codes come row-major as (outputs, inputs), the way they are solved.

use crate::{dims, Error, Result};

fn check(k: usize, n: usize) -> Result<()> {
    if !k.is_multiple_of(16) || k == 0 {
        return Err(Error::setting("inputs (K)", k, "a multiple of 16: pad with zero codes"));
    }
    if !n.is_multiple_of(64) || n == 0 {
        return Err(Error::setting("outputs (N)", n, "a multiple of 64: pad with zero codes"));
    }
    Ok(())
}

/// Word and nibble of entry `(k, n)`.
#[inline]
fn place(k: usize, n: usize, n_out: usize) -> (usize, usize) {
    let word = (k >> 4) * 2 * n_out + (n >> 6) * 128 + (4 * (n & 7) + ((k & 7) >> 1)) * 4 + ((n >> 4) & 3);
    (word, 2 * ((n >> 3) & 1) + ((k >> 3) & 1) + 4 * (k & 1))
}

/// Packs biased 4-bit codes (N, K) to `(K / 16, 2 N)` words.
pub fn pack(codes: &[u8], k: usize, n: usize) -> Result<Vec<u32>> {
    check(k, n)?;
    dims::check_matrix("codes", codes, n, k)?;
    if let Some(at) = codes.iter().position(|&code| code > 15) {
        let value = i64::from(codes[at]);
        return Err(Error::CodeRange { row: at / k, column: at % k, value, bits: 4, zero_offset: 0 });
    }
    let mut out = vec![0_u32; dims::product("packed codes", k / 16, 2 * n)?];
    for (row, line) in codes.chunks_exact(k).enumerate() {
        for (column, &code) in line.iter().enumerate() {
            let (word, nibble) = place(column, row, n);
            out[word] |= u32::from(code) << (4 * nibble);
        }
    }
    Ok(out)
}

/// The inverse of [`pack`].
pub fn unpack(packed: &[u32], k: usize, n: usize) -> Result<Vec<u8>> {
    check(k, n)?;
    dims::check_matrix("packed codes", packed, k / 16, 2 * n)?;
    let mut out = vec![0; dims::product("codes", k, n)?];
    for (row, line) in out.chunks_exact_mut(k).enumerate() {
        for (column, code) in line.iter_mut().enumerate() {
            let (word, nibble) = place(column, row, n);
            *code = ((packed[word] >> (4 * nibble)) & 15) as u8;
        }
    }
    Ok(out)
}

/// Where the scale of output `n` is stored in its row of scales. One scale per output and one per group differ.
#[inline]
fn scale_place(n: usize, per_channel: bool) -> usize {
    if per_channel {
        (n & !31) + 8 * ((n & 7) >> 1) + 2 * ((n & 31) >> 3) + (n & 1)
    } else {
        (n & !63) + 8 * (n & 7) + ((n & 63) >> 3)
    }
}

/// Scales (N, G) to the stored order (G, N).
pub fn pack_scales(scales: &[f32], n: usize, n_groups: usize) -> Result<Vec<f32>> {
    check(16, n)?;
    dims::check_matrix("scales", scales, n, n_groups)?;
    let mut out = vec![0.0; scales.len()];
    for row in 0..n {
        for g in 0..n_groups {
            out[g * n + scale_place(row, n_groups == 1)] = scales[row * n_groups + g];
        }
    }
    Ok(out)
}

/// The inverse of [`pack_scales`].
pub fn unpack_scales(packed: &[f32], n: usize, n_groups: usize) -> Result<Vec<f32>> {
    check(16, n)?;
    dims::check_matrix("scales", packed, n_groups, n)?;
    let mut out = vec![0.0; packed.len()];
    for row in 0..n {
        for g in 0..n_groups {
            out[row * n_groups + g] = packed[g * n + scale_place(row, n_groups == 1)];
        }
    }
    Ok(out)
}
