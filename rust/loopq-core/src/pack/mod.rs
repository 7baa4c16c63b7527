//! Bit layouts of stored codes.

pub mod dense;
pub mod marlin;
pub mod w4;

use crate::{Error, Result};

/// Refuses codes that `bits` bits cannot hold; `codes` begins with row `first_row` of `dim` columns.
pub fn check_codes(codes: &[u8], dim: usize, bits: u32, first_row: usize) -> Result<()> {
    let top = ((1_u32 << bits) - 1) as u8;
    // All bits that any code has: no branch in the loop, so that it runs at the speed of memory.
    if codes.iter().fold(0, |seen, code| seen | code) <= top {
        return Ok(());
    }
    let at = codes.iter().position(|&code| code > top).unwrap_or(0);
    let (row, column) = (first_row + at / dim, at % dim);
    Err(Error::CodeRange { row, column, value: i64::from(codes[at]), bits, zero_offset: 0 })
}

/// Sixteen inputs of a row as the kernels' layouts take them: bytes 0..8 and 8..16 share a byte each.
#[inline(always)]
fn fold_row(codes: &[u8]) -> u64 {
    let (halves, _) = codes.as_chunks::<8>();
    u64::from_le_bytes(halves[0]) | u64::from_le_bytes(halves[1]) << 4
}

/// The inverse of [`fold_row`].
#[inline(always)]
fn unfold_row(folded: u64, codes: &mut [u8]) {
    const LOW: u64 = 0x0f0f_0f0f_0f0f_0f0f;
    let (halves, _) = codes.as_chunks_mut::<8>();
    halves[0] = (folded & LOW).to_le_bytes();
    halves[1] = (folded >> 4 & LOW).to_le_bytes();
}

/// Four words that hold two outputs' folded rows, byte by byte in turns.
#[inline(always)]
fn interleave(low: u64, high: u64) -> [u32; 4] {
    let front = every_other(low & LANE_32) | every_other(high & LANE_32) << 8;
    let back = every_other(low >> 32) | every_other(high >> 32) << 8;
    [front as u32, (front >> 32) as u32, back as u32, (back >> 32) as u32]
}

/// The inverse of [`interleave`].
#[inline(always)]
fn separate(words: [u32; 4]) -> [u64; 2] {
    let front = u64::from(words[0]) | u64::from(words[1]) << 32;
    let back = u64::from(words[2]) | u64::from(words[3]) << 32;
    [together(front) | together(back) << 32, together(front >> 8) | together(back >> 8) << 32]
}

const LANE_8: u64 = 0x00ff_00ff_00ff_00ff;
const LANE_16: u64 = 0x0000_ffff_0000_ffff;
const LANE_32: u64 = 0x0000_0000_ffff_ffff;

/// Four bytes to the even ones of eight.
#[inline(always)]
fn every_other(bytes: u64) -> u64 {
    let apart = (bytes | bytes << 16) & LANE_16;
    (apart | apart << 8) & LANE_8
}

/// The inverse of [`every_other`]; odd bytes are ignored.
#[inline(always)]
fn together(bytes: u64) -> u64 {
    let bytes = bytes & LANE_8;
    let pairs = (bytes | bytes >> 8) & LANE_16;
    (pairs | pairs >> 16) & LANE_32
}
