//! Dense bitstreams: code `j` of a row takes bits `j * b .. (j + 1) * b`, counted from the least significant bit of
//! the row's first 32-bit word. Rows start on word boundaries. Spec: `docs/formats/packing.md`.
//!
//! Codes come one to a byte. Eight of them lie in a 64-bit word. Their bits are brought together pair by pair, in lanes
//! of 16, 32 and 64 bits: the *compress* of H. Warren, *Hacker's Delight* (2nd ed., section 7-4), for fixed masks. It
//! has neither branches nor tables, so the compiler vectorises it.

use crate::grid::check_bits;
use crate::memory::zeros;
use crate::simd::{per_isa, Isa};
use crate::{dims, Result};

/// Words that a row of `dim` codes takes.
pub fn words(dim: usize, bits: u32) -> Result<usize> {
    Ok(dims::product("packed codes", dim, bits as usize)?.div_ceil(32))
}

/// Packs biased codes (rows, dim), each below `2^bits`.
pub fn pack(codes: &[u8], rows: usize, dim: usize, bits: u32) -> Result<Vec<u32>> {
    check_bits(bits)?;
    dims::check_matrix("codes", codes, rows, dim)?;
    super::check_codes(codes, dim, bits, 0)?;
    let n_words = words(dim, bits)?;
    let mut out = zeros("packed codes", dims::product("packed codes", rows, n_words)?)?;
    if dim > 0 {
        pack_dense(Isa::best(), codes, dim, bits, &mut out);
    }
    Ok(out)
}

/// Codes in a run: their bits fill as many whole words as a code has bits.
const CHUNK: usize = 32;

per_isa! {
    /// Packs rows of `dim` codes.
    fn pack_dense(codes: &[u8], dim: usize, bits: u32, out: &mut [u32]) = pack_body;
}
per_isa! {
    /// The inverse of [`pack_dense`].
    fn unpack_dense(packed: &[u32], dim: usize, bits: u32, out: &mut [u8]) = unpack_body;
}

#[inline(always)]
fn pack_body(codes: &[u8], dim: usize, bits: u32, out: &mut [u32]) {
    match bits {
        2 => pack_rows::<2>(codes, dim, out),
        3 => pack_rows::<3>(codes, dim, out),
        4 => pack_rows::<4>(codes, dim, out),
        _ => pack_rows::<8>(codes, dim, out),
    }
}

#[inline(always)]
fn pack_rows<const BITS: usize>(codes: &[u8], dim: usize, out: &mut [u32]) {
    for (row, line) in codes.chunks_exact(dim).zip(out.chunks_exact_mut((dim * BITS).div_ceil(32))) {
        let (chunks, rest) = row.as_chunks::<CHUNK>();
        let (whole, last) = line.split_at_mut(chunks.len() * BITS);
        for (words, codes) in whole.as_chunks_mut::<BITS>().0.iter_mut().zip(chunks) {
            *words = pack_chunk(codes);
        }
        if !rest.is_empty() {
            let mut filled = [0; CHUNK];
            filled[..rest.len()].copy_from_slice(rest);
            let packed = pack_chunk::<BITS>(&filled);
            last.copy_from_slice(&packed[..last.len()]);
        }
    }
}

#[inline(always)]
fn pack_chunk<const BITS: usize>(codes: &[u8; CHUNK]) -> [u32; BITS] {
    if BITS == 8 {
        let (words, _) = codes.as_chunks::<4>();
        return std::array::from_fn(|i| u32::from_le_bytes(words[i]));
    }
    let (eights, _) = codes.as_chunks::<8>();
    let mut stream = 0_u128;
    for (i, eight) in eights.iter().enumerate() {
        stream |= u128::from(squeeze::<BITS>(u64::from_le_bytes(*eight))) << (8 * BITS * i);
    }
    std::array::from_fn(|i| (stream >> (32 * i)) as u32)
}

const fn ones(width: usize) -> u64 {
    u64::MAX >> (64 - width)
}

/// Packs eight codes, one to a byte, to the lowest `8 * BITS` bits. Neighbours are joined in ever wider lanes.
#[inline(always)]
const fn squeeze<const BITS: usize>(codes: u64) -> u64 {
    let gap = 8 - BITS;
    let pairs = (codes | codes >> gap) & (ones(2 * BITS) * 0x0001_0001_0001_0001);
    let fours = (pairs | pairs >> (2 * gap)) & (ones(4 * BITS) * 0x0000_0001_0000_0001);
    (fours | fours >> (4 * gap)) & ones(8 * BITS)
}

/// The inverse of [`squeeze`]; bits beyond the lowest `8 * BITS` do not matter.
#[inline(always)]
const fn spread<const BITS: usize>(packed: u64) -> u64 {
    let gap = 8 - BITS;
    let packed = packed & ones(8 * BITS);
    let fours = (packed | packed << (4 * gap)) & (ones(4 * BITS) * 0x0000_0001_0000_0001);
    let pairs = (fours | fours << (2 * gap)) & (ones(2 * BITS) * 0x0001_0001_0001_0001);
    (pairs | pairs << gap) & (ones(BITS) * 0x0101_0101_0101_0101)
}

/// The inverse of [`pack`].
pub fn unpack(packed: &[u32], rows: usize, dim: usize, bits: u32) -> Result<Vec<u8>> {
    check_bits(bits)?;
    let n_words = words(dim, bits)?;
    dims::check_matrix("packed codes", packed, rows, n_words)?;
    let mut out = zeros("codes", dims::product("codes", rows, dim)?)?;
    if dim > 0 {
        unpack_dense(Isa::best(), packed, dim, bits, &mut out);
    }
    Ok(out)
}

#[inline(always)]
fn unpack_body(packed: &[u32], dim: usize, bits: u32, out: &mut [u8]) {
    match bits {
        2 => unpack_rows::<2>(packed, dim, out),
        3 => unpack_rows::<3>(packed, dim, out),
        4 => unpack_rows::<4>(packed, dim, out),
        _ => unpack_rows::<8>(packed, dim, out),
    }
}

#[inline(always)]
fn unpack_rows<const BITS: usize>(packed: &[u32], dim: usize, out: &mut [u8]) {
    for (row, line) in out.chunks_exact_mut(dim).zip(packed.chunks_exact((dim * BITS).div_ceil(32))) {
        let (chunks, rest) = row.as_chunks_mut::<CHUNK>();
        let (whole, last) = line.split_at(chunks.len() * BITS);
        for (codes, words) in chunks.iter_mut().zip(whole.as_chunks::<BITS>().0) {
            *codes = unpack_chunk(words);
        }
        if !rest.is_empty() {
            let mut filled = [0; BITS];
            filled[..last.len()].copy_from_slice(last);
            rest.copy_from_slice(&unpack_chunk(&filled)[..rest.len()]);
        }
    }
}

#[inline(always)]
fn unpack_chunk<const BITS: usize>(words: &[u32; BITS]) -> [u8; CHUNK] {
    let mut codes = [0; CHUNK];
    if BITS == 8 {
        for (codes, word) in codes.as_chunks_mut::<4>().0.iter_mut().zip(words) {
            *codes = word.to_le_bytes();
        }
        return codes;
    }
    let stream = words.iter().rev().fold(0_u128, |stream, &word| stream << 32 | u128::from(word));
    for (i, eight) in codes.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        *eight = spread::<BITS>((stream >> (8 * BITS * i)) as u64).to_le_bytes();
    }
    codes
}
